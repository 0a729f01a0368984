"""What happened to each request, written down from plans and outputs alone, apart from the engine's own counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from servetwin.sim.records import EngineCoreOutputs, Frame
from servetwin.sim.request import Request
from servetwin.sim.testing.arrival import Arrival
from servetwin.sim.units import NS_PER_S

PATIENCE_NS = 600 * NS_PER_S
"""From here on a request that gets nothing counts who is let in before it."""


@dataclass(slots=True)
class Entry:
    """One request, from its receipt on."""

    request: Request
    arrival: Arrival
    received: int
    """Its place in the order of receipt."""
    received_ns: int
    first_admitted_ns: int | None = None
    admitted_ns: int | None = None
    """The latest admission."""
    hit_tokens: int = 0
    """Prefix hits at the first admission."""
    scheduled_tokens: int = 0
    most_computed_tokens: int = 0
    preemptions: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    """As given out."""
    end: str | None = None
    """The finish reason."""
    served_ns: int = 0
    """When it last got something it never had: its receipt, or a step that computed new tokens for it."""
    earlier_tokens: int = 0
    """New tokens that all requests had been given by then, and since then those received before it."""
    overtaking_tokens: int = 0
    """Since it lost patience: new tokens for requests received later, of equal or lower urgency, let in since."""
    longest_overtaking_tokens: int = 0
    """The most tokens that one of these can need."""


@dataclass(slots=True)
class Ledger:
    """All requests that were received, and what the engine did lately."""

    entries: dict[str, Entry] = field(default_factory=dict)
    """In order of receipt."""
    new_tokens: int = 0
    """Tokens computed for the first time for their request."""
    tokens_since_sign: int = 0
    """Tokens computed since the last output, receipt or end."""
    idle_steps: int = 0
    """Successive steps that scheduled nothing, with something unfinished and no other step in flight."""
    given_after_end: list[str] = field(default_factory=list)
    """Requests that were given tokens after their end."""
    to_tell: set[str] = field(default_factory=set)
    """What the latest plan had to report as finished."""
    _untold: set[str] = field(default_factory=set)

    @property
    def arrivals(self) -> dict[str, Arrival]:
        return {request_id: e.arrival for request_id, e in self.entries.items()}

    @property
    def requests(self) -> list[Request]:
        """Everything ever received."""
        return [e.request for e in self.entries.values()]

    @property
    def unfinished(self) -> list[str]:
        return [request_id for request_id, e in self.entries.items() if e.end is None]

    # ------------------------------------------------------------ what happens

    def received(self, request: Request, arrival: Arrival, now: int) -> None:
        self.entries[request.request_id] = Entry(
            request,
            arrival,
            received=len(self.entries),
            received_ns=now,
            served_ns=now,
            earlier_tokens=self.new_tokens,
        )
        self.tokens_since_sign = 0

    def ended(self, request_id: str, reason: str) -> None:
        self.entries[request_id].end = reason
        self._untold.add(request_id)
        self.tokens_since_sign = 0

    def scheduled(self, frame: Frame, *, alone: bool) -> None:
        """One schedule call; `alone`: no other step is in flight."""
        self.to_tell, self._untold = self._untold, set()
        for preemption in frame.record.preempted:
            self.entries[preemption.request_id].preemptions += 1
        for admission in frame.record.admitted:
            entry = self.entries[admission.request_id]
            entry.admitted_ns = frame.start_ns
            if entry.first_admitted_ns is None:
                entry.first_admitted_ns = frame.start_ns
                entry.hit_tokens = admission.hit_tokens
        self._served(frame)
        self.tokens_since_sign += frame.plan.total_num_scheduled_tokens
        idle = alone and not frame.plan.num_scheduled_tokens and self.unfinished
        self.idle_steps = self.idle_steps + 1 if idle else 0

    def delivered(self, outputs: EngineCoreOutputs) -> None:
        """One update's outputs and ends."""
        for request_id, tokens in outputs.new_token_ids.items():
            entry = self.entries[request_id]
            if entry.end is not None:
                self.given_after_end.append(request_id)
            entry.output_token_ids += tokens
            self.tokens_since_sign = 0
        for request_id, finish in outputs.finished.items():
            self.ended(request_id, finish.reason)

    # ------------------------------------------------------------ who was served

    def _served(self, frame: Frame) -> None:
        new_tokens: dict[str, int] = {}
        for request_id, count in frame.plan.num_scheduled_tokens.items():
            entry = self.entries[request_id]
            entry.scheduled_tokens += count
            new = entry.request.num_computed_tokens - entry.most_computed_tokens
            if new > 0:
                new_tokens[request_id] = min(new, count)
                entry.most_computed_tokens += new
        self.new_tokens += sum(new_tokens.values())
        for request_id, entry in self.entries.items():
            if request_id in new_tokens:
                entry.served_ns, entry.earlier_tokens = frame.start_ns, self.new_tokens
                entry.overtaking_tokens = entry.longest_overtaking_tokens = 0
            elif entry.end is None:
                self._passed_over(entry, new_tokens, frame.start_ns)

    def _passed_over(self, waiting: Entry, new_tokens: dict[str, int], now: int) -> None:
        out_of_patience_ns = waiting.served_ns + PATIENCE_NS
        for request_id, count in new_tokens.items():
            other = self.entries[request_id]
            if other.received < waiting.received:
                waiting.earlier_tokens += count
            elif (
                now >= out_of_patience_ns
                and other.arrival.priority >= waiting.arrival.priority
                and other.admitted_ns is not None
                and other.admitted_ns >= out_of_patience_ns
            ):
                waiting.overtaking_tokens += count
                whole = other.request.num_prompt_tokens + other.request.max_tokens
                waiting.longest_overtaking_tokens = max(waiting.longest_overtaking_tokens, whole)
