"""A router that sends a request where most of its prompt is likely to be in the prefix cache already."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from servetwin.sim.cluster.router import ReplicaView
from servetwin.sim.cluster.routers import LeastRequests
from servetwin.workloads.spec import RequestSpec

TOKENS_PER_HASH = 64
"""Of prompts that are given by their tokens."""
LOAD_CAP = 1.5
"""A replica is passed over while it has more requests in flight than this times the mean, and than MIN_CAP."""
MIN_CAP = 4
MIN_SHARE = 0.1
"""Of the prompt that must be known: what all prompts begin with would draw all of them to one place."""


class PrefixAffinity:
    """The replica to which the longest prefix of the prompt was sent before, the one with fewest requests among equals.

    What was sent is all that it knows: names of leading runs of tokens (`prefix_ids`, the session of a turn), or hashes
    of tokens; as much of it for each replica, the last used first, as the KV cache there holds. A replica with more
    than LOAD_CAP times the mean number of requests in flight gets none for this reason, and a prefix of less than
    MIN_SHARE of the prompt counts for nothing.
    """

    def __init__(self, seed: int = 0) -> None:
        self._sent: dict[int, _Sent] = {}
        self._fewest = LeastRequests(seed)

    def choose(self, spec: RequestSpec, replicas: Sequence[ReplicaView], now_ns: int) -> int:
        keys = [*_prefixes(spec)]
        cap = max(LOAD_CAP * sum(view.requests for view in replicas) / len(replicas), MIN_CAP)
        known: dict[int, int] = {}
        for view in replicas:
            sent = self._sent.get(view.index)
            if sent is not None and view.requests <= cap:
                known[view.index] = sent.known(keys)
        longest = max(known.values(), default=0)
        best = replicas
        if longest > MIN_SHARE * spec.prompt_tokens:
            best = [view for view in replicas if known.get(view.index) == longest]
        index = self._fewest.choose(spec, best, now_ns)
        view = next(view for view in replicas if view.index == index)
        self._sent.setdefault(index, _Sent()).add(keys, view.kv_tokens)
        return index

    def gone(self, index: int) -> None:
        """A replica that comes back has nothing left."""
        self._sent.pop(index, None)


class _Sent:
    """Prefixes that one replica has seen."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[int, int] = OrderedDict()
        self._total = 0

    def known(self, keys: Sequence[tuple[int, int]]) -> int:
        """Leading tokens of a prompt that are here."""
        length = 0
        for key, tokens in keys:
            if key not in self._tokens:
                break
            length += tokens
        return length

    def add(self, keys: Sequence[tuple[int, int]], most_tokens: int) -> None:
        """The last part of a prompt is the first to be forgotten, as in the engine."""
        for key, tokens in reversed(keys):
            if key not in self._tokens:
                self._total += tokens
            self._tokens[key] = tokens
            self._tokens.move_to_end(key)
        while self._total > most_tokens and len(self._tokens) > 1:
            self._total -= self._tokens.popitem(last=False)[1]


def _prefixes(spec: RequestSpec) -> Iterator[tuple[int, int]]:
    """The leading parts of a prompt: the hash of each together with all before it, and its tokens."""
    chain = hash(spec.cache_salt)
    if spec.prefix_ids is not None:
        run = spec.prefix_block_tokens or 1
        for i, prefix_id in enumerate(spec.prefix_ids):
            chain = hash((chain, prefix_id))
            yield chain, min(run, spec.prompt_tokens - i * run)
    elif spec.prompt_token_ids is not None:
        ids = spec.prompt_token_ids
        for start in range(0, len(ids) - TOKENS_PER_HASH + 1, TOKENS_PER_HASH):
            chain = hash((chain, ids[start : start + TOKENS_PER_HASH]))
            yield chain, TOKENS_PER_HASH
    elif spec.session_id is not None:
        yield hash((chain, spec.session_id)), spec.context_tokens or spec.prompt_tokens
