"""A witness stands between an engine and its policy: it hears every question and answer, and checks each answer.

The policy object stays what it is (its class decides which queue the engine builds); only its hooks are replaced
on the instance by ones that go through the witness.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from servetwin.sim.policy import AdmissionState, SchedulingPolicy
from servetwin.sim.request import Request
from servetwin.sim.testing.story import raised_words

REQUIRED_HOOKS = {"order_key": "request, now", "choose_victim": "running, now", "may_admit": "request, state"}
ACCOUNT_HOOKS = ("on_queued", "on_scheduled", "on_ended")
LISTS = ("block_ids", "output_token_ids", "spec_token_ids")
FACTS = (*sorted(set(Request.__slots__) - {*LISTS, "_hashes"}), *LISTS)
"""What a hook may look at and must not change."""
_fixed, _growing = attrgetter(*FACTS[: -len(LISTS)]), attrgetter(*LISTS)

Decision = tuple[object, ...]
"""The hook, whom it was asked about, when (ns), and the answer."""


class MisconductError(Exception):
    """A policy broke the contract of `SchedulingPolicy`; the text says how."""


class Witness:
    """Everything that one policy object was asked and answered."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        """Raises MisconductError when the policy lacks a hook."""
        self.policy = policy
        self.keys: dict[str, tuple[Any, ...]] = {}
        """The latest key of each request."""
        self._last_asked: str | None = None
        self._decisions: list[Decision] = []
        self._asked: dict[str, Callable[..., Any]] = {}
        for hook, arguments in REQUIRED_HOOKS.items():
            if not callable(getattr(policy, hook, None)):
                raise MisconductError(f"the policy has no {hook}({arguments})")
        self._stand_between("order_key", self._order_key)
        self._stand_between("choose_victim", self._choose_victim)
        self._stand_between("may_admit", self._may_admit)
        for hook in ACCOUNT_HOOKS:
            if callable(getattr(policy, hook, None)):
                self._stand_between(hook, self._account_hook(hook))

    def take_decisions(self) -> list[Decision]:
        """The decisions since the last call."""
        decisions, self._decisions = self._decisions, []
        return decisions

    def _stand_between(self, hook: str, checked: Callable[..., Any]) -> None:
        self._asked[hook] = getattr(self.policy, hook)
        # A policy may be a frozen dataclass.
        object.__setattr__(self.policy, hook, checked)

    # ------------------------------------------------------------ the hooks

    def _order_key(self, request: Request, now: int) -> tuple[Any, ...]:
        key = self._ask("order_key", [request], request, now)
        if not isinstance(key, tuple):
            raise MisconductError(f"order_key gave {key!r} for {request.request_id}; wanted: a tuple")
        if self._last_asked not in (None, request.request_id):
            # Neighbours are enough: keys of two kinds meet somewhere.
            _check_order(request.request_id, key, self._last_asked, self.keys[self._last_asked])
        self._last_asked = request.request_id
        self.keys[request.request_id] = key
        self._decisions.append(("order_key", request.request_id, now, key))
        return key

    def _choose_victim(self, running: Sequence[Request], now: int) -> Request:
        before = list(running)
        victim = self._ask("choose_victim", before, running, now)
        if len(before) != len(running) or any(a is not b for a, b in zip(before, running, strict=True)):
            raise MisconductError("choose_victim changed the list of running requests")
        if not any(victim is r for r in running):
            raise MisconductError(
                f"choose_victim returned {_name(victim)}, which is not running; running: {_names(running)}"
            )
        self._decisions.append(("choose_victim", _names(running), now, victim.request_id))
        return victim  # type: ignore[no-any-return]

    def _may_admit(self, request: Request, state: AdmissionState) -> bool:
        answer = self._ask("may_admit", [request, *state.running], request, state)
        if not isinstance(answer, bool):
            raise MisconductError(
                f"may_admit gave {answer!r} for {request.request_id}; wanted: True or False"
            )
        self._decisions.append(("may_admit", request.request_id, state.now, answer))
        return answer

    def _account_hook(self, hook: str) -> Callable[..., None]:
        def checked(request: Request, *args: Any) -> None:
            self._ask(hook, [request], request, *args)

        return checked

    def _ask(self, hook: str, about: Sequence[Request], *args: Any) -> Any:
        """The policy's own answer, given without changing a request and without an exception."""
        before = [_facts(r) for r in about]
        try:
            answer = self._asked[hook](*args)
        except MisconductError:
            # One hook called another.
            raise
        except Exception as error:  # whatever a foreign policy raises is a finding
            raise MisconductError(f"{hook} raised {raised_words(error)}") from error
        for request, facts in zip(about, before, strict=True):
            if (after := _facts(request)) != facts:
                name, old, new = next(c for c in zip(FACTS, facts, after, strict=True) if c[1] != c[2])
                raise MisconductError(f"{hook} changed {request.request_id}.{name} from {old} to {new}")
        return answer


def _check_order(name: str, key: tuple[Any, ...], other: str, other_key: tuple[Any, ...]) -> None:
    both = f"order_key gave {key!r} for {name} and {other_key!r} for {other}"
    try:
        ordered = (key < other_key) is not (key > other_key) or key == other_key
    except TypeError as error:
        raise MisconductError(f"{both}, which cannot be compared: {error}") from error
    if not ordered:
        raise MisconductError(f"{both}, of which neither is smaller, equal or larger")


def _facts(request: Request) -> tuple[Any, ...]:
    return (*_fixed(request), *map(tuple, _growing(request)))


def _names(requests: Sequence[Request]) -> str:
    return ", ".join(r.request_id for r in requests) or "none"


def _name(value: object) -> str:
    return f"{value.request_id} ({value.status.name})" if isinstance(value, Request) else repr(value)
