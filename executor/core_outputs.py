"""What goes back to the front end: per request its new tokens, and what happened to it since it last had some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from servetwin.sim.contract import EngineCoreEvent, EngineCoreOutput, LogprobsLists
from servetwin.sim.records import EngineCoreOutputs, Frame


@dataclass(slots=True)
class _Untold:
    """What the next output of a request will tell."""

    events: list[EngineCoreEvent] = field(default_factory=list)
    num_cached_tokens: int = 0


class OutputWriter:
    """Keeps the events of every unfinished request until they are told."""

    def __init__(self) -> None:
        self._untold: dict[str, _Untold] = {}

    def queued(self, request_id: str, now_ns: int) -> None:
        self._untold[request_id] = _Untold([EngineCoreEvent("queued", now_ns)])

    def scheduled(self, frame: Frame) -> None:
        """Preemptions and admissions of a schedule call (never of one request in the same call)."""
        for lost in frame.record.preempted:
            self._untold[lost.request_id].events.append(EngineCoreEvent("preempted", frame.start_ns))
        for admission in frame.record.admitted:
            untold = self._untold[admission.request_id]
            untold.events.append(EngineCoreEvent("scheduled", frame.start_ns))
            if not admission.resumed:
                untold.num_cached_tokens = admission.hit_tokens

    def forget(self, request_id: str) -> None:
        """An aborted request, of which no output will tell."""
        self._untold.pop(request_id, None)

    def write(
        self, outputs: EngineCoreOutputs, logprobs: Mapping[str, LogprobsLists] | None
    ) -> list[EngineCoreOutput]:
        """The outputs of a step. Tokens behind a stop are dropped, and their log probabilities with them."""
        answers = outputs.outputs
        for answer in answers:
            untold = self._untold[answer.request_id]
            answer.events, untold.events = untold.events, []
            answer.num_cached_tokens = untold.num_cached_tokens
            if logprobs and (of_request := logprobs.get(answer.request_id)) is not None:
                answer.logprobs = of_request.first(len(answer.new_token_ids))
            if answer.finish_reason is not None:
                del self._untold[answer.request_id]
        return answers
