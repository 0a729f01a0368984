"""Who gets which request: the built-in routers by hand, and routers of one's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from engines import spec

from servetwin.sim.cluster.prefix_affinity import LOAD_CAP, MIN_CAP
from servetwin.sim.cluster.router import BUILT_IN, ReplicaView, choice, load_router
from servetwin.sim.plugins import PluginError


def views(*loads: int, kv_tokens: int = 10_000) -> list[ReplicaView]:
    """Replicas with so many requests in flight, of 10 tokens each."""
    return [ReplicaView(i, kv_tokens, n, 10 * n) for i, n in enumerate(loads)]


def chosen(name: str, replicas: Sequence[ReplicaView], count: int, **rest: Any) -> list[int]:
    """What a router says to as many requests, none of which it counts itself."""
    router = load_router(name, 7)
    return [router.choose(spec(str(i), 8, 4, **rest), replicas, 0) for i in range(count)]


def test_round_robin_goes_on_behind_a_replica_that_is_missing() -> None:
    """In order of the index, whoever is there."""
    router = load_router("round_robin", 0)
    three = views(0, 0, 0)
    picks = [router.choose(spec("r", 8, 4), v, 0) for v in (three, three, [three[0], three[2]], three, three)]
    assert picks == [0, 1, 2, 0, 1]


def test_random_is_even_and_seeded() -> None:
    """Nearly a third each; the seed is all the luck there is."""
    counts = Counter(chosen("random", views(9, 0, 5), 3000))
    assert set(counts) == {0, 1, 2} and all(900 < n < 1100 for n in counts.values())
    assert chosen("random", views(0, 0, 0), 50) == chosen("random", views(0, 0, 0), 50)


def test_the_least_loaded_by_requests_and_by_tokens() -> None:
    """Among equals each in turn."""
    assert chosen("least_requests", views(3, 1, 2), 2) == [1, 1]
    assert chosen("least_requests", views(1, 2, 1), 4) == [0, 2, 0, 2]
    few_but_long = [ReplicaView(0, 100, 1, 500), ReplicaView(1, 100, 3, 60)]
    assert chosen("least_tokens", few_but_long, 1) == [1]
    assert chosen("least_requests", few_but_long, 1) == [0]


def test_power_of_two_never_takes_the_most_loaded_and_looks_at_two() -> None:
    """Of three replicas the most loaded loses every pair; the least loaded is in two pairs of three."""
    counts = Counter(chosen("power_of_two", views(5, 1, 3), 3000))
    assert counts[0] == 0
    assert 1900 < counts[1] < 2100
    assert chosen("power_of_two", views(4), 2) == [0, 0]


def test_a_session_stays_while_its_replica_is_there() -> None:
    """The first turn goes to the fewest requests; so do requests without a session."""
    router, replicas = load_router("session", 0), views(2, 0, 1)
    turn = spec("t", 8, 4, session_id="s")
    assert router.choose(turn, replicas, 0) == 1
    replicas[1].requests = 50
    assert router.choose(turn, replicas, 0) == 1
    assert router.choose(spec("x", 8, 4), replicas, 0) == 2
    assert router.choose(turn, [replicas[0], replicas[2]], 0) == 2
    assert router.choose(turn, replicas, 0) == 2


def with_prefix(*ids: int) -> Any:
    return spec("p", 100, 4, prefix_ids=ids, prefix_block_tokens=16)


def test_the_longest_known_prefix_wins() -> None:
    """What was sent there, from the first run of tokens on; an equal run behind another prefix is another one."""
    router, replicas = load_router("prefix_affinity", 0), views(0, 0, 0)
    assert router.choose(with_prefix(1, 2, 3), replicas, 0) == 0
    assert router.choose(with_prefix(1, 9), [replicas[1]], 0) == 1
    assert router.choose(with_prefix(1, 2, 4), replicas, 0) == 0
    assert router.choose(with_prefix(1, 9, 5), replicas, 0) == 1
    # Nobody knows it: the fewest requests.
    replicas[0].requests = replicas[1].requests = 1
    assert router.choose(with_prefix(2, 3), replicas, 0) == 2


def test_prefixes_of_tokens_and_of_sessions_count_too() -> None:
    """By 64 tokens, and by the session of a turn; another salt is another prompt."""
    router, replicas = load_router("prefix_affinity", 0), views(0, 0, 0)
    ids = tuple(range(130))

    def prompt(salt: str | None = None) -> Any:
        return spec("p", 130, 4, prompt_token_ids=ids, cache_salt=salt)

    assert router.choose(prompt(), [replicas[2]], 0) == 2
    assert router.choose(prompt(), replicas, 0) == 2
    replicas[2].requests = 1
    assert router.choose(prompt("salt"), replicas, 0) != 2
    assert router.choose(spec("t", 8, 4, session_id="s"), [replicas[1]], 0) == 1
    replicas[1].requests = 1
    assert router.choose(spec("t2", 20, 4, session_id="s", context_tokens=12), replicas, 0) == 1


def test_affinity_ends_at_the_cap_and_with_the_replica() -> None:
    """Too many requests in flight, or an empty cache after a failure: the fewest requests again."""
    router, replicas = load_router("prefix_affinity", 0), views(0, 0)
    assert router.choose(with_prefix(1), replicas, 0) == 0
    replicas[0].requests = MIN_CAP
    assert router.choose(with_prefix(1), replicas, 0) == 0
    replicas[0].requests = MIN_CAP + 1
    assert router.choose(with_prefix(1), replicas, 0) == 1
    replicas[0].requests, replicas[1].requests = 30, 18
    assert LOAD_CAP * 24 >= 30
    router, replicas[0].requests = load_router("prefix_affinity", 0), 0
    assert router.choose(with_prefix(1), replicas, 0) == 0
    replicas[0].requests = 2
    router.gone(0)  # type: ignore[attr-defined]
    replicas[1].requests = 1
    assert router.choose(with_prefix(1), replicas, 0) == 1


def test_affinity_forgets_what_the_cache_cannot_hold() -> None:
    """A cache of 64 tokens: after four other runs of 16 nothing of the first is known, the newest are."""
    router, replicas = load_router("prefix_affinity", 0), views(0, 0, kv_tokens=64)
    router.choose(with_prefix(1), [replicas[0]], 0)
    for i in range(4):
        router.choose(with_prefix(10 + i), [replicas[0]], 0)
    replicas[0].requests = 1
    assert router.choose(with_prefix(13), replicas, 0) == 0
    assert router.choose(with_prefix(1), replicas, 0) == 1


def test_what_all_prompts_begin_with_draws_nobody() -> None:
    """A run of 16 tokens of a prompt of 400 is known at replica 0, and counts for nothing there."""
    router, replicas = load_router("prefix_affinity", 0), views(1, 0)
    first = spec("p", 400, 4, prefix_ids=(1, 2), prefix_block_tokens=16)
    assert router.choose(first, [replicas[0]], 0) == 0
    assert router.choose(spec("q", 400, 4, prefix_ids=(1, 3), prefix_block_tokens=16), replicas, 0) == 1
    assert router.choose(spec("r", 100, 4, prefix_ids=(1, 2), prefix_block_tokens=16), replicas, 0) == 0


# ---------------------------------------------------------------- one's own


def test_a_router_of_one_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class beside the data, with a state of its own."""
    (tmp_path / "routers_of_a_test.py").write_text(
        "class Last:\n"
        "    def __init__(self, seed): self.seed = seed\n"
        "    def choose(self, spec, replicas, now_ns): return replicas[-1].index\n"
        "class Silent:\n"
        "    def __init__(self, seed): pass\n"
        "class Seedless:\n"
        "    def choose(self, spec, replicas, now_ns): return 0\n"
        "class Short:\n"
        "    def __init__(self, seed): pass\n"
        "    def choose(self, spec): return 0\n"
        "word = 'x'\n"
    )
    monkeypatch.chdir(tmp_path)
    assert load_router("routers_of_a_test:Last", 3).choose(spec("r", 1, 1), views(0, 0), 0) == 1
    for name, problem in {
        "routers_of_a_test:Silent": "has no method choose",
        "routers_of_a_test:Seedless": "cannot be built with seed=0: TypeError",
        "routers_of_a_test:Short": "choose must take",
        "routers_of_a_test:word": "is a str; wanted: a class",
        "routers_of_a_test:nothing": "has no attribute 'nothing'",
        "fastest": "is not known; allowed: random, round_robin",
    }.items():
        with pytest.raises(PluginError, match=problem):
            load_router(name, 0)


def test_what_a_router_says_is_checked() -> None:
    """Only replicas that are there; what it raises is told with its name."""

    class Wrong:
        def choose(self, spec: Any, replicas: Any, now_ns: int) -> int:
            return 5

    class Breaks:
        def choose(self, spec: Any, replicas: Any, now_ns: int) -> int:
            raise KeyError("gone")

    with pytest.raises(PluginError, match="router Wrong chose replica 5; allowed now: 0, 1"):
        choice(Wrong(), spec("r", 1, 1), views(0, 0), 0)
    with pytest.raises(PluginError, match="router Breaks failed for request 'r': KeyError: 'gone'"):
        choice(Breaks(), spec("r", 1, 1), views(0, 0), 0)


def test_all_built_in_routers_load() -> None:
    """By the names of the command line."""
    assert [*BUILT_IN] == [
        *("random", "round_robin", "least_requests", "least_tokens"),
        *("power_of_two", "prefix_affinity", "session"),
    ]
    for name in BUILT_IN:
        assert load_router(name, 0).choose(spec("r", 1, 1), views(0), 0) == 0
