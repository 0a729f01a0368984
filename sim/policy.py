"""Who is served first, who has to go, who may come in: scheduling policies.

`FCFS` and `Priority` follow `vllm/v1/core/sched/request_queue.py` and the victim choice of `scheduler.py`, 0.22.0.
Anybody's own policy is a class with the same three hooks, named `module:Class`; subclassing `FCFS` saves the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from servetwin.sim.plugins import PluginError, load_attribute
from servetwin.sim.request import Request


@dataclass(frozen=True, slots=True)
class AdmissionState:
    """What an engine looks like when the head of its queue asks to come in."""

    now: int
    """Simulated time in ns."""
    running: Sequence[Request]
    """In running order, those admitted in this step included."""
    num_waiting: int
    """The one that asks included."""
    free_blocks: int
    """Blocks nobody holds (cached content counts as free)."""
    token_budget: int
    """Tokens left in this step."""


class SchedulingPolicy(Protocol):
    """The decisions a policy takes. Built without arguments, once for each engine.

    Optional, looked for by name: `dynamic_order = True` (keys are taken anew whenever the queue is looked at), and
    the hooks `on_queued(request, now)`, `on_scheduled(request, num_tokens, now)`, `on_ended(request)`, for a
    policy that keeps accounts. Hooks must not change requests.

    `leaps = True` in the class itself declares that its decisions stay what they are while the same requests decode
    and nobody comes or goes, so that a simulation need not ask it in every step; without it, and with a `may_admit` or
    hooks of its own, it is asked.
    """

    def order_key(self, request: Request, now: int) -> tuple[Any, ...]:
        """Waiting requests are admitted in ascending order of this key, taken when they are queued (`now`, ns)."""
        ...

    def choose_victim(self, running: Sequence[Request], now: int) -> Request:
        """Which running request gives up its blocks when another cannot grow (it may be that one itself)."""
        ...

    def may_admit(self, request: Request, state: AdmissionState) -> bool:
        """Whether the head of the queue may come in now; if not, nobody does in this step."""
        ...


class FCFS:
    """First come, first served: admission in order of receipt, the latest admitted is preempted first."""

    leaps = True

    def order_key(self, request: Request, now: int) -> tuple[Any, ...]:
        """Order of receipt needs no key: the queue keeps it, and preempted requests return to its front."""
        return ()

    def choose_victim(self, running: Sequence[Request], now: int) -> Request:
        return running[-1]

    def may_admit(self, request: Request, state: AdmissionState) -> bool:
        return True


class Priority(FCFS):
    """Lower priority value first, then earlier arrival, then the id as a string; the reverse is preempted first."""

    leaps = True

    def order_key(self, request: Request, now: int) -> tuple[Any, ...]:
        return (request.priority, request.arrival_ns, request.request_id)

    def choose_victim(self, running: Sequence[Request], now: int) -> Request:
        """The first in running order with the largest (priority, arrival): the id breaks no tie here, as in vLLM."""
        return max(running, key=lambda r: (r.priority, r.arrival_ns))


BUILT_IN: dict[str, str] = {
    "fcfs": "servetwin.sim.policy:FCFS",
    "priority": "servetwin.sim.policy:Priority",
    "sjf": "servetwin.sim.shortest_job_first:ShortestJobFirst",
    "fair": "servetwin.sim.fair_share:FairShare",
}


def inherits(policy: SchedulingPolicy, hook: str) -> bool:
    """The policy has this hook from FCFS as it is there."""
    return getattr(getattr(policy, hook, None), "__func__", None) is getattr(FCFS, hook)


HOOKS = ("on_queued", "on_scheduled", "on_ended")


def may_leap(policy: SchedulingPolicy) -> bool:
    """The policy declares that it need not be asked in every step, and nothing in it says otherwise."""
    return (
        bool(type(policy).__dict__.get("leaps"))
        and inherits(policy, "may_admit")
        and not any(hasattr(policy, hook) for hook in HOOKS)
    )


def load_policy(name: str) -> SchedulingPolicy:
    """A new policy by its built-in name (fcfs, priority, sjf, fair) or `module:Class`.

    Raises ValueError with what is allowed, what is missing in the class, or why it cannot be built.
    """
    if ":" not in name and name not in BUILT_IN:
        raise PluginError(
            f"scheduling policy {name!r} is not known; allowed: {', '.join(BUILT_IN)}, or module:Class"
        )
    found = load_attribute(BUILT_IN.get(name, name))
    if not isinstance(found, type):
        raise PluginError(f"scheduling policy {name!r} is a {type(found).__name__}; wanted: a class")
    missing = [
        h for h in ("order_key", "choose_victim", "may_admit") if not callable(getattr(found, h, None))
    ]
    if missing:
        raise PluginError(
            f"scheduling policy {name!r} lacks {', '.join(missing)}; subclass servetwin.sim.policy.FCFS to inherit them"
        )
    try:
        policy: SchedulingPolicy = found()
    except Exception as e:
        raise PluginError(
            f"scheduling policy {name!r} cannot be built without arguments: {type(e).__name__}: {e}"
        ) from e
    return policy
