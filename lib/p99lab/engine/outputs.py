"""What clients get: each request's tokens in the order in which they come, and its end with its usage."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from p99lab.engine.events import TokenEvent, Usage
from p99lab.engine.output_text import NoText, OutputText
from p99lab.engine.plan import StepPlan
from p99lab.engine.request import FinishReason, Request, TimeShare
from p99lab.engine.scheduler_output import SampledToken
from p99lab.engine.timekeeping import book_end

LOGGER = logging.getLogger(__name__)

OnEvent = Callable[[TokenEvent], None]


class Outbox:
    """Events from when they happen until somebody is given them.

    `listeners` are called after every delivery, also of nothing; they must not raise.
    """

    def __init__(self) -> None:
        self.listeners: list[Callable[[], None]] = []
        self._unclaimed: list[TokenEvent] = []  # for the next `step`
        self._addressed: deque[tuple[OnEvent, TokenEvent]] = deque()

    @property
    def has_unclaimed(self) -> bool:
        return bool(self._unclaimed)

    def post(self, on_event: OnEvent | None, event: TokenEvent) -> None:
        """Keep an event for `deliver`; one that has no `on_event`, for `take_unclaimed`."""
        if on_event is None:
            self._unclaimed.append(event)
        else:
            self._addressed.append((on_event, event))

    def take_unclaimed(self) -> list[TokenEvent]:
        """The events since the last call that nobody is called with."""
        events, self._unclaimed = self._unclaimed, []
        return events

    def deliver(self, cancel: Callable[[str], object]) -> None:
        """Call back with what has happened, in its order; callbacks may make more happen.

        `cancel(request_id)` ends the request of a callback that raises.
        """
        while self._addressed:
            on_event, event = self._addressed.popleft()
            try:
                on_event(event)
            except Exception:
                LOGGER.exception("on_event of '%s' has raised: the request is cancelled", event.request_id)
                cancel(event.request_id)
        for listener in self.listeners:
            listener()


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """A request between `add` and its last event."""

    request: Request
    text: OutputText | NoText
    on_event: OnEvent | None


class LiveRequests:
    """The requests whose last event is still to come, each with its text so far. Posts their events to `outbox`."""

    def __init__(self, outbox: Outbox, clock: Callable[[], float]) -> None:
        self._outbox = outbox
        self._clock = clock
        self._live: dict[str, LiveRequest] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Request]:
        """Over those of now: they may end meanwhile."""
        return iter([live.request for live in self._live.values()])

    def get(self, request_id: str) -> Request | None:
        live = self._live.get(request_id)
        return None if live is None else live.request

    def add(self, request: Request, text: OutputText | NoText, on_event: OnEvent | None) -> None:
        self._live[request.request_id] = LiveRequest(request, text, on_event)

    def emit(self, sampled: SampledToken, finish: Callable[[Request, FinishReason], None]) -> None:
        """Turn a sampled token into an event, ending the request with `finish` where a stop string is complete."""
        request = sampled.request
        live = self._live[request.request_id]
        now_s = self._clock()
        if request.timeline.first_token_s is None:
            request.timeline.first_token_s = now_s
        text = live.text.add(sampled.token_id, request.finish_reason)
        if live.text.stopped:
            finish(request, FinishReason.STOP)
        reason = FinishReason.STOP if live.text.stopped else request.finish_reason
        event = TokenEvent(request.request_id, sampled.token_id, text, now_s, sampled.logprobs)
        if request.num_output_tokens == 1 and request.prompt_logprobs:
            event = replace(event, prompt_logprobs=tuple(request.prompt_logprobs))
        if reason is None:
            self._outbox.post(live.on_event, event)
        else:
            request.timeline.book(TimeShare.SCHEDULING, now_s)
            self._end(live, event, reason)

    def abort(self, request: Request, reason: FinishReason, running: StepPlan | None) -> None:
        """Emit a request's end outside a step, to its client alone. `running`: the step in flight meanwhile."""
        now_s = self._clock()
        book_end(request, running, now_s)
        self._end(self._live[request.request_id], TokenEvent(request.request_id, None, "", now_s), reason)

    def _end(self, live: LiveRequest, event: TokenEvent, reason: FinishReason) -> None:
        """Post a request's last event, with its usage."""
        request = live.request
        timeline = request.timeline
        timeline.finished_s = timeline.accounted_s
        usage = Usage(request.num_prompt_tokens, request.num_cached_tokens, request.num_output_tokens, timeline)
        del self._live[request.request_id]
        self._outbox.post(live.on_event, replace(event, time_s=timeline.finished_s, finish_reason=reason, usage=usage))
