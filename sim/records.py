"""What the engine says about its own decisions, beyond the plan: plain records for the log and for `decide`.

Nothing here feeds back into scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from servetwin.sim.contract import EngineCoreOutput, SchedulerOutput, StepResult


class WaitReason(StrEnum):
    """Why a request was not admitted in a step."""

    SEATS = "seats"
    """max_num_seqs requests run already."""
    BLOCKS = "blocks"
    """The blocks for its first chunk are not free."""
    GATE = "full-sequence gate"
    """The blocks for its whole known sequence are not free (scheduler_reserve_full_isl)."""
    BUDGET = "token budget"
    """This step's tokens are spent, or too few are left for an unchunked prompt."""
    HEAD_OF_LINE = "head of line"
    """Another request stands before it, and that one waits."""
    PREEMPTION = "preemption"
    """A request was preempted in this step, which closes admission for the step."""
    POLICY = "policy"
    """The scheduling policy did not let it in (`may_admit`)."""


@dataclass(slots=True)
class PrefixCacheStats:
    """Prefix-cache lookups of one schedule call, in tokens; requests preempted before are counted apart.

    A refused head of the queue is counted again in every step that tries it, as in vLLM.
    """

    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0


@dataclass(slots=True)
class Admission:
    """A request moved from waiting to running in this step."""

    request_id: str
    resumed: bool
    """It had run before and was preempted."""
    hit_tokens: int
    """Prompt (and output) tokens found in the prefix cache."""
    blocks: int
    """Blocks it holds after admission."""


@dataclass(slots=True)
class Preemption:
    """A running request that lost its blocks in this step."""

    request_id: str
    computed_tokens: int
    """Computed tokens it lost (some may be found again in the prefix cache)."""
    blocks: int
    """Blocks it gave back."""
    unscheduled: bool
    """It had been scheduled earlier in this same step."""


@dataclass(slots=True)
class ScheduleRecord:
    """One schedule call. Counts of requests and blocks are taken after it, before the update."""

    admitted: list[Admission] = field(default_factory=list)
    preempted: list[Preemption] = field(default_factory=list)
    prefix: PrefixCacheStats = field(default_factory=PrefixCacheStats)
    head: str | None = None
    """The waiting request that would be admitted next; None when nobody waits."""
    head_reason: WaitReason | None = None
    unfinished: dict[str, int] = field(default_factory=dict)
    """Per request that this step leaves with known tokens to compute: how many. It brings no token."""
    recomputed: dict[str, int] = field(default_factory=dict)
    """Per request: tokens of this step that it had computed before it was preempted (hits excluded)."""
    prefill_tokens: int = 0
    decode_tokens: int = 0
    decode_rows: int = 0
    running: int = 0
    waiting: int = 0
    used_blocks: int = 0
    cached_free_blocks: int = 0
    """Free blocks whose content can still be hit."""
    free_blocks: int = 0
    """Free blocks without content; used + cached_free + free = usable blocks."""
    evictions: int = 0
    """Cached contents dropped because their block was taken for something else."""


@dataclass(slots=True)
class BlockChange:
    """A change of one block's content or use, in the order of happening."""

    block_id: int
    kind: str
    """"take": handed to request_id with no content; "evict": its cached content is dropped (a take follows);
    "hash": its content became findable under `prefix_id`; "touch": request_id shares it or takes it back from
    the free queue; "release": one reference less, `references` are left; "forget": nothing finds its content."""
    request_id: str | None = None
    prefix_id: str | None = None
    references: int = 0
    """References after the change."""


class AnyFrame(Protocol):
    """A step between schedule and update."""

    start_ns: int
    record: ScheduleRecord

    @property
    def has_tokens(self) -> bool:
        """Something is computed in it."""
        ...

    @property
    def is_idle(self) -> bool:
        """Nothing scheduled and nothing to tell the worker: running such a step would not move anything."""
        ...


@dataclass(slots=True)
class Frame:
    """A step between schedule and update."""

    step: int
    """0-based number of the schedule call."""
    start_ns: int
    """Simulated instant of the schedule call."""
    plan: SchedulerOutput
    record: ScheduleRecord
    gone: set[str] = field(default_factory=set)
    """Requests of the plan that ended while it was in flight."""

    @property
    def has_tokens(self) -> bool:
        return bool(self.plan.num_scheduled_tokens)

    @property
    def is_idle(self) -> bool:
        """Nothing scheduled and nothing to tell the worker: running such a step would not move anything."""
        plan = self.plan
        return not plan.num_scheduled_tokens and not plan.finished_req_ids and not self.record.preempted


class Finish(NamedTuple):
    """How a request ended."""

    reason: str
    """"length", "stop", ..."""
    stop_reason: int | None
    """The stop token that ended it, if one did."""


@dataclass(slots=True)
class EngineCoreOutputs:
    """What one update gave out, in scheduling order: columns, since this is made for every row of every step."""

    new_token_ids: dict[str, list[int]] = field(default_factory=dict)
    """The tokens of each request that got some."""
    finished: dict[str, Finish] = field(default_factory=dict)
    """The requests that ended with them."""
    draft_rows: int = 0
    """Requests whose drafts were verified (of those that were still there, as vLLM counts)."""
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    """Before anything is dropped behind a stop."""

    @property
    def outputs(self) -> list[EngineCoreOutput]:
        """The same, request by request."""
        going_on = (None, None)
        return [
            EngineCoreOutput(request_id, tokens, *self.finished.get(request_id, going_on))
            for request_id, tokens in self.new_token_ids.items()
        ]


class StepObserver(Protocol):
    """Called after every step: progress, checks, recording of plans."""

    def __call__(self, frame: Frame, result: StepResult, outputs: EngineCoreOutputs) -> None: ...
