"""What goes between gateway and engine arrives as it was sent."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p99lab.engine.events import TokenEvent, Usage
from p99lab.engine.request import FinishReason, Logprobs, SamplingParams, Timeline
from p99lab.errors import (
    AccountingError,
    BadParameterError,
    EngineClosedError,
    EngineFailedError,
    P99labError,
    QueueFullError,
)
from p99lab.serving import protocol
from p99lab.serving.protocol import engine_pb2 as pb
from p99lab.serving.protocol.messages import EngineRequest, read_add, read_error, read_events, write_add, write_events

TIMES = st.floats(0, 1e9)
LOGPROBS = st.floats(-1e4, 0)
ANSWERED = [FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED]


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    timeline = Timeline(draw(TIMES))
    for name in ("accounted_s", "queue_s", "prefill_s", "decode_s", "stalled_s", "scheduling_s"):
        setattr(timeline, name, draw(TIMES))
    for name in ("admitted_s", "first_token_s", "finished_s"):
        setattr(timeline, name, draw(st.none() | TIMES))
    timeline.num_preemptions = draw(st.integers(0, 99))
    return timeline


@st.composite
def scores(draw: st.DrawFn, num_top: int) -> Logprobs:
    top = draw(st.lists(st.tuples(st.integers(0, 2**31 - 1), LOGPROBS), min_size=num_top, max_size=num_top))
    return Logprobs(draw(LOGPROBS), tuple(top))


@st.composite
def events(draw: st.DrawFn) -> TokenEvent:
    token_id = draw(st.none() | st.integers(0, 2**31 - 1))
    ends = token_id is None or draw(st.booleans())
    usage = Usage(*draw(st.tuples(*[st.integers(0, 2**40)] * 3)), draw(timelines()))
    num_top = draw(st.integers(0, 3))
    is_scored = token_id is not None and draw(st.booleans())
    prompt = draw(st.none() | st.lists(scores(num_top), max_size=3)) if is_scored else None
    return TokenEvent(
        "",
        token_id,
        "",
        draw(TIMES),
        logprobs=draw(scores(num_top)) if is_scored else None,
        finish_reason=draw(st.sampled_from(ANSWERED)) if ends else None,
        usage=usage if ends else None,
        prompt_logprobs=None if prompt is None else (None, *prompt),
    )


@given(st.lists(events(), max_size=6))
def test_a_steps_events_arrive_as_they_were(items: list[TokenEvent]) -> None:
    numbered = list(enumerate(items))
    sent = write_events(numbered, None).SerializeToString()
    arrived = list(read_events(pb.FromEngine.FromString(sent)))
    assert sorted(arrived, key=lambda item: item[0]) == numbered


def test_tokens_of_one_request_keep_their_order() -> None:
    items = [(7, TokenEvent("", token_id, "", float(token_id))) for token_id in (3, 1, 2)]
    assert list(read_events(write_events(items))) == items


@given(
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=50),
    st.none() | st.integers(-(2**70), 2**70),
    st.none() | st.integers(0, 20),
    st.lists(st.integers(0, 2**31 - 1), max_size=4),
)
def test_a_request_arrives_as_it_was(ids: list[int], seed: int | None, logprobs: int | None, stops: list[int]) -> None:
    sampling = SamplingParams(
        max_tokens=7,
        temperature=0.1,
        top_k=5,
        top_p=0.3,
        min_p=0.2,
        seed=seed,
        stop_token_ids=tuple(stops),
        ignore_eos=True,
        logprobs=logprobs,
        prompt_logprobs=logprobs,
    )
    request = EngineRequest(9, np.array(ids, np.int32), sampling, 1.25, "name", -3, 2.5)
    sent = write_add(request).SerializeToString()
    arrived = read_add(pb.FromGateway.FromString(sent).add)
    np.testing.assert_array_equal(arrived.token_ids, request.token_ids)
    assert arrived.token_ids.dtype == np.int32
    for name in ("number", "sampling", "arrival_s", "request_id", "priority", "deadline_s"):
        assert getattr(arrived, name) == getattr(request, name)


def test_stop_strings_stay_behind_and_impossible_stop_ids_too() -> None:
    sampling = SamplingParams(stop=("x",), stop_token_ids=(-1, 4, 2**31))
    arrived = read_add(write_add(EngineRequest(0, np.array([1], np.int32), sampling, 0.0)).add)
    assert (arrived.sampling.stop, arrived.sampling.stop_token_ids) == ((), (4,))
    assert (arrived.request_id, arrived.deadline_s) == (None, None)


def test_a_number_that_no_field_holds_is_refused() -> None:
    with pytest.raises(BadParameterError, match="out of range"):
        write_add(EngineRequest(0, np.array([1], np.int32), SamplingParams(), 0.0, priority=2**70))


@pytest.mark.parametrize("kind", [BadParameterError, QueueFullError, EngineClosedError, EngineFailedError, P99labError])
def test_an_error_is_raised_again_as_what_it_was(kind: type[P99labError]) -> None:
    ((number, error),) = read_events(write_events([(3, kind("why"))]))
    assert (number, type(error), str(error)) == (3, kind, "why")
    error = read_error(write_events([], failure=kind("why")).failure)
    assert (type(error), str(error)) == (kind, "why")
    assert not write_events([]).HasField("failure")


def test_a_defects_details_stay_behind() -> None:
    ((_, error),) = read_events(write_events([(3, ZeroDivisionError("secret"))]))
    assert type(error) is P99labError
    assert "secret" not in str(error)


def test_ragged_rows_are_no_message() -> None:
    event = TokenEvent("", 1, "", 0.0, prompt_logprobs=(None, Logprobs(-1.0), Logprobs(-1.0, ((1, -1.0),))))
    with pytest.raises(AccountingError, match="differ in length"):
        write_events([(0, event)])


def declared(text: str, kind: str) -> dict[str, dict[str, int]]:
    """Names and numbers of a .proto file's messages or enums, by their names."""
    code = re.sub(r"//.*", "", text).replace("{}", "{\n}")
    blocks = re.findall(rf"^{kind} (\w+) {{(.*?)^}}", code, re.MULTILINE | re.DOTALL)
    return {name: {key: int(n) for key, n in re.findall(r"(\w+) = (\d+);", body)} for name, body in blocks}


def test_the_generated_code_is_that_of_the_file() -> None:
    text = Path(*protocol.__path__, "engine.proto").read_text()
    known: Any = pb.DESCRIPTOR
    messages = {name: {f.name: f.number for f in m.fields} for name, m in known.message_types_by_name.items()}
    enums = {name: {v.name: v.number for v in e.values} for name, e in known.enum_types_by_name.items()}
    assert declared(text, "message") == messages
    assert declared(text, "enum") == enums
