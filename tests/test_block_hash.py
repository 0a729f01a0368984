"""Hashes of blocks: chains over what prompts consist of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from servetwin.sim import block_hash
from servetwin.sim.block_hash import BlockHashes, KnownRuns
from servetwin.sim.token_source import TokenSource
from servetwin.workloads import RequestSpec


def hashes(ids: tuple[int, ...], run_tokens: int, block_size: int, *, salt: str | None = None) -> BlockHashes:
    """Of a prompt of named runs and five tokens more."""
    prompt_tokens = len(ids) * run_tokens + 5
    spec = RequestSpec(
        request_id="r",
        arrival_s=0,
        prompt_tokens=prompt_tokens,
        output_tokens=1,
        prefix_ids=ids,
        prefix_block_tokens=run_tokens,
    )
    return BlockHashes("r", TokenSource(1000).prompt(spec), [], block_size, salt)


@pytest.mark.parametrize(("run_tokens", "block_size"), [(16, 16), (16, 4), (16, 8), (6, 4), (2, 4)])
def test_named_runs_are_hashed_once(run_tokens: int, block_size: int) -> None:
    """Those that are known are what they would be if they were made anew, wherever they stand."""
    known = KnownRuns()
    for ids in [(1, 2, 3), (2, 1), (1, 3, 2), (1, 2, 4, 3), (1, 2), ()]:
        for salt in (None, "salt"):
            fresh = hashes(ids, run_tokens, block_size, salt=salt)
            fresh.prepare(100)
            remembered = hashes(ids, run_tokens, block_size, salt=salt)
            remembered.prepare_runs(known)
            remembered.prepare(100)
            assert (remembered.known, remembered.private) == (fresh.known, fresh.private)


@pytest.mark.parametrize(("prompt_tokens", "block_size"), [(5, 16), (16, 16), (37, 16), (32, 16)])
def test_what_follows_a_prompt_of_nobody_else_is_private(prompt_tokens: int, block_size: int) -> None:
    """Known on arrival, also where no block of it is full; a prompt of given tokens goes on with what is sampled."""
    own = RequestSpec(request_id="r", arrival_s=0, prompt_tokens=prompt_tokens, output_tokens=1)
    given = replace(own, prompt_token_ids=tuple(range(prompt_tokens)))
    for spec, private in ((own, True), (given, False)):
        found = BlockHashes("r", TokenSource(1000).prompt(spec), [], block_size)
        found.prepare_prompt()
        assert (found.private, len(found.known)) == (private, 0 if private else prompt_tokens // block_size)


def test_runs_of_other_lengths_are_other_runs() -> None:
    """The same name stands for a run of so many tokens."""
    known = KnownRuns()
    for run_tokens in (4, 8):
        remembered = hashes((1,), run_tokens, 4)
        remembered.prepare_runs(known)
        assert len(remembered.known) == run_tokens // 4


def test_known_runs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is forgotten is made anew."""
    monkeypatch.setattr(block_hash, "MANY_HASHES", 8)
    known = KnownRuns()
    for first in range(20):
        remembered, fresh = hashes((first, 1), 16, 4), hashes((first, 1), 16, 4)
        remembered.prepare_runs(known)
        fresh.prepare(8)
        assert remembered.known == fresh.known
        assert known.num_hashes <= 8 + 4
