"""What a router is: it says which replica gets a request, from what the front door knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Protocol

from servetwin.sim.plugins import PluginError, load_attribute
from servetwin.workloads.spec import RequestSpec


@dataclass(slots=True)
class ReplicaView:
    """What the front door knows of a replica: what it sent there and has not seen end."""

    index: int
    """Its number in the run; what `Router.choose` returns."""
    kv_tokens: int
    """What its KV cache holds."""
    requests: int = 0
    """In flight there, waiting ones included."""
    tokens: int = 0
    """Prompt and max_tokens of these."""


class Router(Protocol):
    """Chooses replicas, for one run. May keep what it likes from call to call; randomness comes from its seed.

    A class, or anything else that is called with `seed` and returns a router, can be named as `module:attribute`.
    Optional: `gone(index)`, told when a replica has lost its cache.
    """

    def choose(self, spec: RequestSpec, replicas: Sequence[ReplicaView], now_ns: int) -> int:
        """The `index` of one of `replicas`, which are those that take requests now, in order of their index."""
        ...


BUILT_IN = {
    "random": "servetwin.sim.cluster.routers:Random",
    "round_robin": "servetwin.sim.cluster.routers:RoundRobin",
    "least_requests": "servetwin.sim.cluster.routers:LeastRequests",
    "least_tokens": "servetwin.sim.cluster.routers:LeastTokens",
    "power_of_two": "servetwin.sim.cluster.routers:PowerOfTwo",
    "prefix_affinity": "servetwin.sim.cluster.prefix_affinity:PrefixAffinity",
    "session": "servetwin.sim.cluster.routers:Session",
}


def load_router(name: str, seed: int) -> Router:
    """A new router by its built-in name or `module:attribute`. Raises PluginError with what is wrong."""
    if ":" not in name and name not in BUILT_IN:
        raise PluginError(
            f"router {name!r} is not known; allowed: {', '.join(BUILT_IN)}, or module:attribute"
        )
    build: Any = load_attribute(BUILT_IN.get(name, name))
    if not callable(build):
        raise PluginError(f"router {name!r} is a {type(build).__name__}; wanted: a class")
    try:
        router: Router = build(seed=seed)
    except Exception as e:
        raise PluginError(f"router {name!r} cannot be built with seed={seed}: {type(e).__name__}: {e}") from e
    choose = getattr(router, "choose", None)
    if not callable(choose):
        raise PluginError(f"router {name!r} has no method choose(spec, replicas, now_ns)")
    try:
        signature(choose).bind(None, (), 0)
    except TypeError as e:
        raise PluginError(f"router {name!r}: choose must take (spec, replicas, now_ns): {e}") from e
    return router


def choice(router: Router, spec: RequestSpec, views: Sequence[ReplicaView], now_ns: int) -> int:
    """What the router says. Raises PluginError for what is none of these."""
    try:
        index = router.choose(spec, views, now_ns)
    except Exception as e:
        raise PluginError(
            f"router {type(router).__name__} failed for request {spec.request_id!r}: {type(e).__name__}: {e}"
        ) from e
    if any(view.index == index for view in views):
        return index
    known = ", ".join(str(view.index) for view in views)
    raise PluginError(f"router {type(router).__name__} chose replica {index!r}; allowed now: {known}")
