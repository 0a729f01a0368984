"""What differs between releases of vLLM, and between what a release does and what it should do: data, not forks.

The scheduler asks this object wherever another release decides otherwise. `Rules.exact()` is 0.22.0 to the letter;
`Rules.safe()` is the same with its known defects corrected.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict


class FreeOrder(StrEnum):
    """Where a freed table's blocks go in the free queue."""

    ALL_AT_THE_BACK = "all at the back"
    """0.22.0: the whole table, last block first, behind everything that is free already."""
    UNHASHED_IN_FRONT = "unhashed in front"
    """Later releases: blocks without reusable content go to the front, so they are taken before cached ones."""


class StopCheck(StrEnum):
    """One reason to end a request with the token it just got."""

    EOS = "eos"
    STOP_TOKEN = "stop token"
    LENGTH = "length"


class Rules(BaseModel):
    """The rules of one release. Defaults are those of 0.22.0 (source: its `v1/core` package)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    release: str = "0.22.0"

    # ------------------------------------------------ rules that another release may set otherwise
    free_order: FreeOrder = FreeOrder.ALL_AT_THE_BACK
    stop_order: tuple[StopCheck, ...] = (StopCheck.EOS, StopCheck.STOP_TOKEN, StopCheck.LENGTH)
    """The first that applies gives the finish reason; none is asked below min_tokens."""
    lookahead_at_admission: bool = False
    """Reserve the drafter's slots already when a request is admitted."""
    threshold_before_chunk_check: bool = True
    """long_prefill_token_threshold shortens a prompt before it is asked whether an unchunked prompt fits."""
    count_refused_lookups: bool = True
    """Prefix-cache statistics count every look-up, also in steps that do not admit the request."""

    # ------------------------------------------------ corrections of defects (all off: exact)
    forget_uncomputed_blocks: bool = False
    """A victim that had been scheduled in the same step leaves blocks in the prefix cache that nobody will compute;
    with this switch they are taken out of it."""
    keep_cursor: bool = False
    """Removing a victim that stands before the request being placed, and had not been scheduled, makes the running
    pass skip one request; with this switch it does not."""
    length_outranks_min_tokens: bool = False
    """Below min_tokens nothing ends a request, not even the end of its context window: it stalls for ever. With this
    switch length limits always count."""
    null_block_is_no_room: bool = False
    """The check that a request of max_model_len fits counts the reserved block 0, which serves nobody; with this
    switch it does not."""

    @classmethod
    def exact(cls) -> Rules:
        """0.22.0 as it is."""
        return cls()

    @classmethod
    def safe(cls) -> Rules:
        """0.22.0 with every correction on."""
        return cls().model_copy(update=dict.fromkeys(CORRECTIONS, True))

    @classmethod
    def named(cls, text: str) -> Rules:
        """What `--vllm-compat TEXT` stands for. Raises ValueError with what is allowed."""
        release, _, mode = text.partition(":")
        if text in ("exact", "safe"):
            release, mode = RELEASES[0], text
        if release not in RELEASES or mode not in ("", "exact", "safe"):
            raise ValueError(
                f"{text!r} is not known; allowed: exact, safe, 0.22, 0.22:exact, 0.22:safe "
                "(0.22.0 is the only release whose rules are here)"
            )
        return cls.safe() if mode == "safe" else cls.exact()

    @property
    def corrections(self) -> tuple[str, ...]:
        """The names of the corrections that are on."""
        return tuple(name for name in CORRECTIONS if getattr(self, name))


RELEASES = ("0.22", "0.22.0")
CORRECTIONS = (
    "forget_uncomputed_blocks",
    "keep_cursor",
    "length_outranks_min_tokens",
    "null_block_is_no_room",
)
"""The switches that make `safe` out of `exact`."""
