"""One prompt, n outputs: each is a request of its own for the engine, which shares the prompt by its prefix cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

from servetwin.sim.contract import EngineCoreRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class ParentRequest:
    """A request as its user made it, checked and in tokens (`InputProcessor.process`)."""

    request_id: str
    prompt: str | None
    """As it was given, if it was a text."""
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float
    """Wall clock, seconds since the epoch."""
    arrival_ns: int
    """The same instant on the monotonic clock."""
    priority: int = 0
    cache_salt: str | None = None
    client_id: str | None = None
    predicted_output_tokens: int | None = None

    def children(self) -> list[EngineCoreRequest]:
        """What the engine gets, by index of the output. A single child has the id of its parent."""
        return [self._child(index) for index in range(self.params.n)]

    def _child(self, index: int) -> EngineCoreRequest:
        return EngineCoreRequest(
            request_id=self.request_id if self.params.n == 1 else f"{index}_{self.request_id}",
            prompt_token_ids=self.prompt_token_ids,
            sampling_params=self.child_params(index),
            arrival_ns=self.arrival_ns,
            priority=self.priority,
            cache_salt=self.cache_salt,
            client_id=self.client_id,
            predicted_output_tokens=self.predicted_output_tokens,
        )

    def child_params(self, index: int) -> SamplingParams:
        """Sampling parameters of one output: a seed is counted up, so that no two outputs are the same by it."""
        if self.params.n == 1:
            return self.params
        seed = None if self.params.seed is None else self.params.seed + index
        return replace(self.params, n=1, seed=seed)
