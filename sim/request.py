"""One request inside the engine: what is known, what is computed, where it stands."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from servetwin.sim.block_hash import BlockHash, BlockHashes, KnownRuns, Prompt
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


NOT_PRIVATE = 2**62
"""More than any request has blocks."""
_NO_TOKENS: frozenset[int] = frozenset()


class Request:
    """A request known to the scheduler. Progress is one number: computed tokens catch up with known tokens."""

    __slots__ = (
        "_block_size",
        "_cache_salt",
        "_known_hashes",
        "arrival_ns",
        "asleep",
        "base",
        "block_ids",
        "client_id",
        "counted",
        "eos_token_id",
        "fills_blocks",
        "first_private",
        "is_plain",
        "is_prefill_chunk",
        "joined_step",
        "keeps_tokens",
        "last_step",
        "length_limit",
        "max_tokens",
        "max_total_tokens",
        "num_computed_tokens",
        "num_external_tokens",
        "num_hashed_blocks",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens",
        "num_tokens_ever_computed",
        "output_token_ids",
        "place",
        "predicted_output_tokens",
        "priority",
        "prompt",
        "quiet_until",
        "request_id",
        "sampling_params",
        "since_step",
        "spec_token_ids",
        "status",
        "stop_reason",
        "stop_tokens",
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
        cache_salt: str | None = None,
        client_id: str | None = None,
        predicted_output_tokens: int | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.num_prompt_tokens = prompt.num_tokens
        self.sampling_params = sampling_params
        self.arrival_ns = arrival_ns
        self.priority = priority
        self.eos_token_id = None if sampling_params.ignore_eos else eos_token_id
        self.max_tokens = sampling_params.max_tokens or max_model_len - prompt.num_tokens
        self.max_total_tokens = prompt.num_tokens + self.max_tokens
        """Prompt and outputs at most, as far as the request itself says."""
        self.length_limit = min(self.max_total_tokens, max_model_len)
        """Known tokens at which it ends by length."""
        self.client_id = client_id
        """Who sent it (for policies that share between clients)."""
        self.predicted_output_tokens = predicted_output_tokens
        """What a predictor says of its output length (for policies that go by length)."""
        self.output_token_ids: list[int] = []
        self.num_tokens = prompt.num_tokens
        """Known tokens: prompt and outputs."""
        self.num_computed_tokens = 0
        """Tokens with K/V in the cache, those of the steps in flight included."""
        self.num_external_tokens = 0
        """Leading tokens whose K/V another engine has computed and sent; they need blocks here, and no step."""
        self.spec_token_ids: list[int] = []
        """Drafts to be verified in its next step (-1 where only the worker knows them)."""
        self.num_output_placeholders = 0
        """Asynchronous scheduling: tokens that steps in flight will at most bring."""
        self.is_prefill_chunk = False
        """Its last scheduled step left known tokens to compute, so it brings no token."""
        self.num_tokens_ever_computed = 0
        """Most tokens it had computed when it was preempted: what lies below is recomputed."""
        self.num_preemptions = 0
        self.status = RequestStatus.WAITING
        self.stop_reason: int | None = None
        self.stop_tokens = (
            frozenset(sampling_params.stop_token_ids) if sampling_params.stop_token_ids else _NO_TOKENS
        )
        if self.eos_token_id is not None:
            self.stop_tokens |= {self.eos_token_id}
        self._block_size, self._cache_salt = block_size, cache_salt
        self._known_hashes: BlockHashes | None = None
        # Kept by the KV-cache manager alone.
        self.block_ids: list[int] = []
        """Its block table."""
        self.num_hashed_blocks = 0
        """Leading blocks of the table that are in the prefix cache."""
        self.first_private = NOT_PRIVATE
        """From this block on nobody else can have its content (known from its prompt)."""
        self.quiet_until = 0
        """With fewer computed tokens than this it has one token to compute, room for it, and no limit near."""
        # Kept by the calendar of decodes and its scheduler (`sim/leaping_scheduler.py`).
        self.asleep = False
        """A plain decode: its computed and known tokens follow from the number of the step."""
        self.counted = False
        """It is a row of the next step."""
        self.base = 0
        """Computed tokens are `base` + the number of the next step while it sleeps."""
        self.fills_blocks = False
        """Blocks that it fills in its sleep are to be entered into the prefix cache."""
        self.joined_step = 0
        """It sleeps since this step ..."""
        self.since_step = 0
        """... and samples a token in every step since this one."""
        self.last_step = 0
        """The step that brings its last token."""
        self.is_plain = False
        """It will be a plain decode from its first token to its last, if its prompt is computed whole."""
        self.place = 0
        """Running order is the order of this number."""
        self.keeps_tokens = True
        """Somebody may want to know its output tokens."""

    @property
    def _hashes(self) -> BlockHashes:
        """Made when they are asked for the first time: without prefix caching nobody does."""
        if self._known_hashes is None:
            self._known_hashes = BlockHashes(
                self.request_id, self.prompt, self.output_token_ids, self._block_size, self._cache_salt
            )
        return self._known_hashes

    @property
    def num_output_tokens(self) -> int:
        """Known outputs (`output_token_ids` may lag behind where nobody reads them)."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def finished(self) -> bool:
        return self.status.finished

    @property
    def finish_reason(self) -> str | None:
        return FINISH_REASONS.get(self.status)

    @property
    def is_decoding(self) -> bool:
        """All its known tokens but the last sampled one are computed: what it computes next is that and drafts."""
        sampled = self.num_tokens + self.num_output_placeholders > self.num_prompt_tokens
        return sampled and self.num_computed_tokens >= self.num_tokens - 1

    def all_token_ids(self) -> list[int]:
        return self.prompt.token_ids() + self.output_token_ids

    def hash_prompt(self, known: KnownRuns) -> None:
        """Makes the hashes of the prompt's full blocks, as far as anybody else can have the same content."""
        hashes = self._hashes
        hashes.prepare_runs(known)
        hashes.prepare_prompt()
        if hashes.private:
            self.first_private = len(hashes.known)

    @property
    def is_private(self) -> bool:
        """Nobody else can have the content of its further blocks, whatever its outputs are."""
        return self.first_private < NOT_PRIVATE

    @property
    def known_hashes(self) -> Sequence[BlockHash]:
        """The hashes of its leading blocks that have been made (not to be changed)."""
        return self._hashes.known

    def block_hash(self, place: int) -> BlockHash:
        """The hash of one full block of known tokens."""
        return self._hashes.of(place)

    def block_hashes(self, num_blocks: int) -> list[BlockHash]:
        """The hashes of at least the first `num_blocks` full blocks of known tokens."""
        return self._hashes.upto(num_blocks)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, computed={self.num_computed_tokens})"
        )
