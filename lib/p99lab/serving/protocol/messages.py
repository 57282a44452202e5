"""Requests, events and errors as the messages of `engine.proto`, and back. Numbers survive to the last bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from types import MappingProxyType

import numpy as np

from p99lab.engine.events import TokenEvent, Usage
from p99lab.engine.request import FinishReason, IntArray, Logprobs, SamplingParams, Timeline
from p99lab.errors import (
    AccountingError,
    BadParameterError,
    EngineClosedError,
    EngineFailedError,
    P99labError,
    QueueFullError,
)
from p99lab.serving.protocol import engine_pb2 as pb

WIRE_IDS = np.dtype("<i4")
Numbered = tuple[int, TokenEvent | Exception]  # of the request with this number

_REASONS = MappingProxyType(
    {
        FinishReason.STOP: pb.REASON_STOP,
        FinishReason.LENGTH: pb.REASON_LENGTH,
        FinishReason.CANCELLED: pb.REASON_CANCELLED,
    }
)
_FINISH_REASONS = MappingProxyType({reason: own for own, reason in _REASONS.items()})
_ERRORS: Mapping[pb.Problem, type[P99labError]] = MappingProxyType(
    {
        pb.PROBLEM_BAD_PARAMETER: BadParameterError,
        pb.PROBLEM_QUEUE_FULL: QueueFullError,
        pb.PROBLEM_ENGINE_CLOSED: EngineClosedError,
        pb.PROBLEM_ENGINE_FAILED: EngineFailedError,
    }
)
_PROBLEMS: Mapping[type[Exception], pb.Problem] = MappingProxyType({kind: own for own, kind in _ERRORS.items()})
_TIMES = tuple(field.name for field in fields(Timeline))


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request as it goes to the engine; `token_ids` are [num_prompt_tokens] int32, read-only where they were sent."""

    number: int
    token_ids: IntArray
    sampling: SamplingParams
    arrival_s: float
    request_id: str | None = None
    priority: int = 0
    deadline_s: float | None = None


def write_add(request: EngineRequest) -> pb.FromGateway:
    """
    Raises:
        BadParameterError: a number that no field can hold.
    """
    sampling = request.sampling
    try:
        asked = pb.Sampling(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=None if sampling.seed is None else str(sampling.seed),
            stop_token_ids=[token_id for token_id in sampling.stop_token_ids if 0 <= token_id < 2**31],
            ignore_eos=sampling.ignore_eos,
            logprobs=sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
        )
        add = pb.Add(
            number=request.number,
            request_id=request.request_id,
            token_ids=request.token_ids.astype(WIRE_IDS, copy=False).tobytes(),
            sampling=asked,
            priority=request.priority,
            deadline_s=request.deadline_s,
            arrival_s=request.arrival_s,
        )
    except ValueError as error:
        raise BadParameterError(f"a request's number is out of range: {error}") from None
    return pb.FromGateway(add=add)


def read_add(add: pb.Add) -> EngineRequest:
    """
    Raises:
        BadParameterError: sampling parameters out of range.
    """
    asked = add.sampling
    sampling = SamplingParams(
        max_tokens=asked.max_tokens,
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
        min_p=asked.min_p,
        seed=int(asked.seed) if asked.HasField("seed") else None,
        stop_token_ids=tuple(asked.stop_token_ids),
        ignore_eos=asked.ignore_eos,
        logprobs=asked.logprobs if asked.HasField("logprobs") else None,
        prompt_logprobs=asked.prompt_logprobs if asked.HasField("prompt_logprobs") else None,
    )
    return EngineRequest(
        add.number,
        np.frombuffer(add.token_ids, WIRE_IDS),
        sampling,
        add.arrival_s,
        add.request_id if add.HasField("request_id") else None,
        add.priority,
        add.deadline_s if add.HasField("deadline_s") else None,
    )


def write_cancel(number: int) -> pb.FromGateway:
    return pb.FromGateway(cancel=number)


def write_events(
    items: Sequence[Numbered], config: bytes | None = None, failure: Exception | None = None
) -> pb.FromEngine:
    """All that one step has made known, in one message. The texts of events are left out."""
    tokens = [(number, item) for number, item in items if isinstance(item, TokenEvent) and item.token_id is not None]
    message = pb.FromEngine(
        numbers=[number for number, _ in tokens],
        token_ids=[event.token_id for _, event in tokens if event.token_id is not None],
        times_s=[event.time_s for _, event in tokens],
        config=config,
        failure=None if failure is None else _error(failure),
    )
    message.scored.extend(_scored(event for _, event in tokens))
    at_token = -1
    for number, item in items:
        if isinstance(item, Exception):
            message.refusals.append(pb.Refusal(number=number, error=_error(item)))
            continue
        at_token += item.token_id is not None
        if item.finish_reason is not None:
            message.ends.append(_end(number, item, None if item.token_id is None else at_token))
    return message


def read_events(message: pb.FromEngine) -> Iterator[Numbered]:
    """Tokens in their order, each with its request's end if that comes with it; then ends and refusals without one."""
    ends = {end.at_token: end for end in message.ends if end.HasField("at_token")}
    scored = {entry.index: entry for entry in message.scored}
    columns = zip(message.numbers, message.token_ids, message.times_s, strict=True)
    for at_token, (number, token_id, time_s) in enumerate(columns):
        event = TokenEvent("", token_id, "", time_s)
        if (entry := scored.get(at_token)) is not None:
            event = _with_scores(event, entry)
        yield number, event if (end := ends.get(at_token)) is None else _ended(event, end)
    for end in message.ends:
        if not end.HasField("at_token"):
            yield end.number, _ended(TokenEvent("", None, "", end.time_s), end)
    for refusal in message.refusals:
        yield refusal.number, read_error(refusal.error)


def read_error(error: pb.Error) -> P99labError:
    """The error as it was; of one that has no class of its own here, only its message."""
    return _ERRORS.get(error.problem, P99labError)(error.message)


def _scored(events: Iterable[TokenEvent]) -> Iterator[pb.Scored]:
    for index, event in enumerate(events):
        if event.logprobs is None and event.prompt_logprobs is None:
            continue
        token = None if event.logprobs is None else _scores([event.logprobs])
        prompt = None
        if event.prompt_logprobs is not None:
            prompt = _scores([entry for entry in event.prompt_logprobs if entry is not None])
        yield pb.Scored(index=index, token=token, prompt=prompt)


def _scores(rows: Sequence[Logprobs]) -> pb.Scores:
    if len({len(row.top) for row in rows}) > 1:
        raise AccountingError("rows of log-probabilities differ in length")
    top = list(chain.from_iterable(row.top for row in rows))
    return pb.Scores(
        chosen=[row.chosen for row in rows],
        top_ids=[token_id for token_id, _ in top],
        top_values=[value for _, value in top],
    )


def _with_scores(event: TokenEvent, entry: pb.Scored) -> TokenEvent:
    logprobs = _rows(entry.token)[0] if entry.HasField("token") else None
    prompt = (None, *_rows(entry.prompt)) if entry.HasField("prompt") else None
    return replace(event, logprobs=logprobs, prompt_logprobs=prompt)


def _rows(scores: pb.Scores) -> list[Logprobs]:
    top = list(zip(scores.top_ids, scores.top_values, strict=True))
    num_top = len(top) // max(len(scores.chosen), 1)
    return [Logprobs(own, tuple(top[i * num_top : (i + 1) * num_top])) for i, own in enumerate(scores.chosen)]


def _end(number: int, event: TokenEvent, at_token: int | None) -> pb.End:
    assert event.finish_reason is not None
    assert event.usage is not None  # every last event has it
    timeline = {name: getattr(event.usage.timeline, name) for name in _TIMES}
    usage = pb.Usage(
        num_prompt_tokens=event.usage.num_prompt_tokens,
        num_cached_tokens=event.usage.num_cached_tokens,
        num_output_tokens=event.usage.num_output_tokens,
        timeline=pb.Timeline(**timeline),
    )
    reason = _REASONS[event.finish_reason]
    return pb.End(number=number, at_token=at_token, time_s=event.time_s, reason=reason, usage=usage)


def _ended(event: TokenEvent, end: pb.End) -> TokenEvent:
    sent = end.usage
    usage = Usage(sent.num_prompt_tokens, sent.num_cached_tokens, sent.num_output_tokens, _timeline(sent.timeline))
    return replace(event, finish_reason=_FINISH_REASONS[end.reason], usage=usage)


def _timeline(sent: pb.Timeline) -> Timeline:
    timeline = Timeline(sent.arrival_s)
    for descriptor in sent.DESCRIPTOR.fields:
        if not descriptor.has_presence or sent.HasField(descriptor.name):
            setattr(timeline, descriptor.name, getattr(sent, descriptor.name))
    return timeline


def _error(error: Exception) -> pb.Error:
    problem = _PROBLEMS.get(type(error), pb.PROBLEM_INTERNAL)
    known = problem != pb.PROBLEM_INTERNAL or isinstance(error, P99labError)
    return pb.Error(problem=problem, message=str(error) if known else "the engine has failed at it")
