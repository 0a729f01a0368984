"""Which beginnings the prompts of a run share: runs of blocks as a tree, with what became of them in the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from servetwin.dashboard.residencies import EVICTED, Residencies
from servetwin.dashboard.run_data import RunData
from servetwin.sim.block_hash import BlockHashes
from servetwin.sim.run_files import read_json_lines
from servetwin.sim.token_source import TokenSource
from servetwin.workloads import RequestSpec

REQUESTS_AT_MOST, BLOCKS_AT_MOST = 20_000, 200_000
"""Prompts that are read, and blocks of them; the rest of the run is left out and said to be."""
FIELDS = (
    "request_id", "arrival_s", "prompt_tokens", "output_tokens", "prefix_ids", "prefix_block_tokens", "session_id",
    "context_tokens", "cache_salt",
)  # fmt: skip


@dataclass
class Node:
    """A run of blocks that all of its requests have in common, after those of its parent."""

    requests: int
    contents: list[str] = field(default_factory=list)
    """prefix_id of each block."""
    children: list[Node] = field(default_factory=list)


@dataclass(frozen=True)
class PrefixTree:
    """`roots`: what prompts begin with. Only what at least two requests share is there."""

    roots: list[Node]
    requests_read: int


@dataclass
class _Branch:
    requests: int = 0
    next: dict[str, _Branch] = field(default_factory=dict)


def prefix_tree(data: RunData) -> PrefixTree:
    """From workload.jsonl.zst, in blocks of the engine."""
    engine = data.run.config["engine"]
    block_size, vocabulary = engine["cache"]["block_size"], engine["model"]["vocab_size"]
    top, read, blocks = _Branch(), 0, 0
    tokens = TokenSource(vocabulary, data.run.config.get("seed", 0))
    for spec in _specs(data):
        chain = _contents(tokens, spec, block_size)
        blocks += len(chain)
        if blocks > BLOCKS_AT_MOST:
            break
        read += 1
        branch = top
        for content in chain:
            branch = branch.next.setdefault(content, _Branch())
            branch.requests += 1
    return PrefixTree(_joined(top), read)


def _specs(data: RunData) -> Iterator[RequestSpec]:
    for row in islice(read_json_lines(data.run.path / "workload.jsonl.zst"), REQUESTS_AT_MOST):
        yield _spec(row)


def _spec(row: dict[str, Any]) -> RequestSpec:
    known = {name: row[name] for name in FIELDS if row.get(name) is not None}
    for name in ("prefix_ids", "prompt_token_ids"):
        if row.get(name) is not None:
            known[name] = tuple(row[name])
    if "prompt_token_ids" in known:
        known["prompt_tokens"] = len(known["prompt_token_ids"])
    return RequestSpec(**known)


def _contents(tokens: TokenSource, spec: RequestSpec, block_size: int) -> list[str]:
    """The identity of each full block of the prompt that somebody else could have."""
    hashes = BlockHashes(spec.request_id, tokens.prompt(spec), [], block_size, spec.cache_salt)
    chain = hashes.upto(spec.prompt_tokens // block_size)
    return [content.hex() for content in chain if isinstance(content, bytes)]


def _joined(branch: _Branch) -> list[Node]:
    """Branches that at least two requests take; a block whose only successor has all of them is joined with it."""
    nodes: list[Node] = []
    work = [(nodes, content, b) for content, b in branch.next.items() if b.requests > 1]
    while work:
        siblings, content, here = work.pop()
        node = Node(here.requests, [content])
        siblings.append(node)
        while len(here.next) == 1 and (only := next(iter(here.next.items())))[1].requests == here.requests:
            node.contents.append(only[0])
            here = only[1]
        work += [(node.children, c, b) for c, b in here.next.items() if b.requests > 1]
    return sorted(nodes, key=lambda n: -n.requests)


def computed_and_evicted(data: RunData, res: Residencies, contents: Sequence[str]) -> tuple[int, int]:
    """How often the blocks with these contents were computed, and how often their contents were evicted."""
    import pyarrow as pa
    import pyarrow.compute as pc

    texts = data.columns.coded("blocks", "prefix_id").texts
    numbers = pc.index_in(pa.array(contents, pa.string()), texts).drop_null().to_numpy()
    mine = np.isin(res.content, numbers)
    return int((mine & ~res.taken_back).sum()), int((mine & (res.ended == EVICTED)).sum())
