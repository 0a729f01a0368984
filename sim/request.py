"""One request inside the engine: what is known, what is computed, where it stands."""

from __future__ import annotations

from enum import IntEnum

from servetwin.sim.block_hash import BlockHash, BlockHashes, Prompt
from servetwin.sim.contract import SamplingParams


class RequestStatus(IntEnum):
    """vLLM's numbering; every status after PREEMPTED is final."""

    WAITING = 1
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = 2
    WAITING_FOR_REMOTE_KVS = 3
    WAITING_FOR_STREAMING_REQ = 4
    RUNNING = 5
    PREEMPTED = 6
    FINISHED_STOPPED = 7
    FINISHED_LENGTH_CAPPED = 8
    FINISHED_ABORTED = 9
    FINISHED_IGNORED = 10
    FINISHED_ERROR = 11
    FINISHED_REPETITION = 12

    @property
    def finished(self) -> bool:
        return self > RequestStatus.PREEMPTED


FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_IGNORED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
    RequestStatus.FINISHED_REPETITION: "repetition",
}


class Request:
    """A request known to the scheduler. Progress is one number: computed tokens catch up with known tokens."""

    __slots__ = (
        "_hashes",
        "arrival_ns",
        "eos_token_id",
        "max_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_tokens",
        "num_tokens_ever_computed",
        "output_token_ids",
        "priority",
        "prompt",
        "request_id",
        "sampling_params",
        "status",
        "stop_reason",
    )

    def __init__(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams,
        *,
        block_size: int,
        max_model_len: int,
        arrival_ns: int = 0,
        priority: int = 0,
        eos_token_id: int | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.sampling_params = sampling_params
        self.arrival_ns = arrival_ns
        self.priority = priority
        self.eos_token_id = None if sampling_params.ignore_eos else eos_token_id
        self.max_tokens = sampling_params.max_tokens or max_model_len - prompt.num_tokens
        self.output_token_ids: list[int] = []
        self.num_tokens = prompt.num_tokens
        """Known tokens: prompt and outputs."""
        self.num_computed_tokens = 0
        """Tokens with K/V in the cache, those of the step in flight included."""
        self.num_tokens_ever_computed = 0
        """Most tokens it had computed when it was preempted: what lies below is recomputed."""
        self.num_preemptions = 0
        self.status = RequestStatus.WAITING
        self.stop_reason: int | None = None
        self._hashes = BlockHashes(request_id, prompt, self.output_token_ids, block_size)

    @property
    def num_prompt_tokens(self) -> int:
        return self.prompt.num_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def finished(self) -> bool:
        return self.status.finished

    @property
    def finish_reason(self) -> str | None:
        return FINISH_REASONS.get(self.status)

    @property
    def is_decoding(self) -> bool:
        """Only its last sampled token is left to compute."""
        return bool(self.output_token_ids) and self.num_computed_tokens >= self.num_tokens - 1

    def all_token_ids(self) -> list[int]:
        return self.prompt.token_ids() + self.output_token_ids

    def block_hashes(self, num_blocks: int) -> list[BlockHash]:
        """The hashes of at least the first `num_blocks` full blocks of known tokens."""
        return self._hashes.upto(num_blocks)

    def append_output_token(self, token_id: int) -> None:
        self.output_token_ids.append(token_id)
        self.num_tokens += 1

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, computed={self.num_computed_tokens})"
        )
