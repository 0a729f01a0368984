"""`check_policy`: puts a scheduling policy through many made-up stories and tells the shortest one that goes wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from servetwin.sim.config import EngineConfig
from servetwin.sim.plugins import PluginError
from servetwin.sim.policy import SchedulingPolicy, load_policy
from servetwin.sim.testing.actions import Action
from servetwin.sim.testing.invariants import DETERMINISM, INVARIANTS
from servetwin.sim.testing.scene import EngineFactory
from servetwin.sim.testing.shorten import Shortener
from servetwin.sim.testing.story import PolicyError
from servetwin.sim.testing.trial import Trial, plain_engine

DEFAULT_EXAMPLES = 60
ACTIONS = 12
"""Actions of a story at most, the draining of the engine apart."""
_UNREPEATABLE = "told again, the same story went otherwise: the policy is not deterministic"


@dataclass(frozen=True)
class PolicyReport:
    """What was tried without a failure."""

    policy: str
    examples: int
    """Stories told."""
    invariants: list[str]
    """Names of what was checked after each action."""
    seen: dict[str, int]
    """What the stories contained: steps, preemptions, resumptions, prefix hits, aborts."""
    failures: list[str] = field(default_factory=list)
    """Empty: a failure is raised."""

    def __str__(self) -> str:
        seen = ", ".join(f"{count:,} {what}" for what, count in self.seen.items())
        return f"{self.policy} passed: {self.examples} stories ({seen}), {len(self.invariants)} invariants"


def check_policy(
    target: str | type[SchedulingPolicy],
    *,
    examples: int = DEFAULT_EXAMPLES,
    engine: EngineFactory | None = None,
) -> PolicyReport:
    """Tries a policy in `examples` stories on small engines, and checks every invariant after each action.

    `target`: a built-in name, `module:Class`, or a class. `engine`: builds an engine of a configuration and a policy,
    for those who want to try a changed engine. The same call tells the same stories.

    Raises PolicyError with the shortest story found when an invariant breaks; PluginError (a ValueError) when the
    policy is not found or Hypothesis is missing; ValueError when examples < 1.
    """
    __tracebackhide__ = True  # pytest shows the story, not the search for it
    if examples < 1:
        raise ValueError(f"examples must be 1 or more, got {examples}")
    search = _Search(*_named(target), engine or plain_engine)
    story = search.first_failure(examples)
    if story is not None:
        raise PolicyError(story)
    return PolicyReport(search.name, search.stories, [i.name for i in INVARIANTS], dict(search.seen))


def _named(target: str | type[SchedulingPolicy]) -> tuple[str, type[SchedulingPolicy]]:
    """A policy's name for the story, and its class. Raises PluginError when there is no such policy."""
    if isinstance(target, str):
        return target, _watchable(type(load_policy(target)))
    return target.__qualname__, _watchable(target)


def _watchable(policy: type[SchedulingPolicy]) -> type[SchedulingPolicy]:
    """The class, or one like it whose objects take the hooks of a witness (those with `__slots__` would not)."""
    return policy if policy.__dictoffset__ else type(policy.__name__, (policy,), {})


@dataclass
class _Search:
    """The stories told of one policy."""

    name: str
    policy: type[SchedulingPolicy]
    engine: EngineFactory
    stories: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    latest: Trial | None = None

    def first_failure(self, examples: int) -> str | None:
        """The first story that goes wrong, shortened; None when none does."""
        try:
            from hypothesis.errors import Flaky

            from servetwin.sim.testing.machine import run_machine
        except ModuleNotFoundError as e:
            if (e.name or "").partition(".")[0] != "hypothesis":
                raise
            raise PluginError("check_policy needs hypothesis: pip install 'servetwin[test]'") from e
        try:
            run_machine(self._begin, examples=examples, actions=ACTIONS)
        except PolicyError as error:
            return self._shortened(str(error))
        except Flaky:
            return f"{self.name} breaks {DETERMINISM}\nfound: {_UNREPEATABLE}"
        return None

    def _begin(self, config: EngineConfig) -> Trial:
        self.stories += 1
        trial = Trial(self.name, config, self.policy, self.engine, self.seen)
        self.latest = trial
        return trial

    def _shortened(self, story: str) -> str:
        if self.latest is None or self.latest.broken is None:
            # Nothing to leave out: not even the engine could be built.
            return story
        return Shortener(self.latest, self._replay).run().text

    def _replay(self, config: EngineConfig, actions: Sequence[Action]) -> Trial:
        trial = Trial(self.name, config, self.policy, self.engine)
        with suppress(PolicyError):
            for action in actions:
                trial.perform(action)
            trial.drain()
        return trial
