"""The proof kit finds every planted bug, names the rule it breaks in a short story, and lets good policies pass."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import mutants
import pytest
from hypothesis import find

from servetwin.sim.config import EngineConfig
from servetwin.sim.engine_core import EngineCore
from servetwin.sim.policy import BUILT_IN, FCFS
from servetwin.sim.request import Request
from servetwin.sim.testing import PolicyError, PolicyReport, check_policy
from servetwin.sim.testing.invariants import INVARIANTS
from servetwin.sim.testing.story import LINES_AT_EACH_END, Story, time_words
from servetwin.sim.testing.strategies import engine_configs

FEW_EXAMPLES = 15
EVENTS = {"steps", "preemptions", "resumptions", "prefix hits", "aborts"}


def story_of(policy: str | type[FCFS], engine: Callable[..., EngineCore] | None = None) -> list[str]:
    """The lines of the story that shows what is wrong."""
    with pytest.raises(PolicyError) as caught:
        check_policy(policy, engine=engine)
    return str(caught.value).splitlines()


def broken(story: Sequence[str]) -> str:
    """The name of the invariant in a story's first line."""
    return story[0].partition(" breaks ")[2].partition(", ")[2]


# ---------------------------------------------------------------- good policies


@pytest.mark.parametrize("policy", BUILT_IN)
def test_built_in_policies_pass(policy: str) -> None:
    """Each of them, in stories that contain everything worth seeing."""
    report = check_policy(policy, examples=FEW_EXAMPLES)
    assert isinstance(report, PolicyReport)
    assert report.failures == []
    assert report.examples >= FEW_EXAMPLES
    assert report.invariants == [i.name for i in INVARIANTS]
    assert {event for event, count in report.seen.items() if count} == EVENTS


@pytest.mark.nightly
@pytest.mark.parametrize("policy", BUILT_IN)
def test_built_in_policies_pass_for_long(policy: str) -> None:
    """No false alarm in thousands of stories."""
    assert check_policy(policy, examples=3000).failures == []


def test_a_policy_without_a_base_class_and_with_slots_passes() -> None:
    """The protocol is all that counts."""

    class Slotted:
        __slots__ = ()

        def order_key(self, request: Request, now: int) -> tuple[Any, ...]:
            return (request.arrival_ns, request.request_id)

        def choose_victim(self, running: Sequence[Request], now: int) -> Request:
            return running[-1]

        def may_admit(self, request: Request, state: object) -> bool:
            return True

    assert check_policy(Slotted, examples=3).policy.endswith("Slotted")


# ---------------------------------------------------------------- planted bugs


@pytest.mark.parametrize("policy", mutants.POLICIES, ids=lambda p: p.__name__)
def test_a_wrong_policy_is_found(policy: type[FCFS]) -> None:
    """With the rule that it breaks."""
    assert broken(story_of(policy)) == mutants.POLICIES[policy]


@pytest.mark.parametrize("kind", mutants.MANAGERS, ids=lambda k: k.__name__)
def test_a_wrong_manager_is_found(kind: type[Any]) -> None:
    """With the rule that it breaks, under a policy that is right."""
    assert broken(story_of("fcfs", mutants.manager(kind))) == mutants.MANAGERS[kind]


@pytest.mark.parametrize("engine", mutants.ENGINES, ids=lambda e: e.__name__)
def test_a_wrong_engine_is_found(engine: Callable[..., EngineCore]) -> None:
    """With the rule that it breaks, under a policy that is right."""
    assert broken(story_of("fcfs", engine)) == mutants.ENGINES[engine]


def test_every_invariant_is_broken_by_some_planted_bug() -> None:
    """None of them is there for show."""
    seen_broken = {*mutants.POLICIES.values(), *mutants.MANAGERS.values(), *mutants.ENGINES.values()}
    assert seen_broken == {i.name for i in INVARIANTS}
    assert [i.number for i in INVARIANTS] == list(range(1, len(INVARIANTS) + 1))


# ---------------------------------------------------------------- stories


def test_the_story_of_a_policy_that_never_admits_is_as_short_as_can_be() -> None:
    """One request, two steps in vain, the rule and the figures."""
    story = story_of(mutants.NeverAdmits)
    assert story[0] == "NeverAdmits breaks invariant 13, progress or refusal"
    assert story[1].startswith("engine: block_size 1, ")
    assert story[2:5] == [
        "1. request r0 arrives at 1 ns (prompt 1, max_tokens 1, priority 0)",
        "2. step 0 at 1 ns: nothing is scheduled, r0 waits (policy); output of step 0: none",
        "3. step 1 at 1000001 ns: nothing is scheduled, r0 waits (policy)",
    ]
    assert story[5].startswith(
        "rule: while something waits or runs, no two successive steps schedule nothing"
    )
    assert story[6:] == ["found: 2 successive steps scheduled nothing; waiting: r0; running: nothing"]


@pytest.mark.parametrize("policy", [mutants.NeverResumes, mutants.ForeignVictim])
def test_stories_are_short_and_the_same_every_time(policy: type[FCFS]) -> None:
    """Fewer than 15 lines, word for word."""
    story = story_of(policy)
    assert len(story) < 15
    assert story == story_of(policy)


def test_an_exception_of_a_policy_is_told_with_its_place() -> None:
    """The hook, the exception and the line; the step that was being made is the last of the story."""
    story = story_of(mutants.RaisesOnTies)
    assert "a step begins at" in story[-3]
    assert story[-1].startswith("found: choose_victim raised StopIteration")
    assert "(mutants.py, line " in story[-1]


def test_a_policy_that_cannot_be_built_is_told() -> None:
    """No line precedes it."""

    class NeedsAnArgument(FCFS):
        def __init__(self, size: int) -> None:
            self.size = size

    story = story_of(NeedsAnArgument)
    assert broken(story) == "no exception"
    assert "missing 1 required positional argument" in story[-1]
    assert not any(line.startswith("1.") for line in story)


def test_a_missing_hook_is_named() -> None:
    """With its arguments."""

    class KeyOnly:
        def order_key(self, request: Request, now: int) -> tuple[Any, ...]:
            return ()

    story = story_of(KeyOnly)  # type: ignore[arg-type]
    assert story[-1] == "found: the policy has no choose_victim(running, now)"


def test_what_goes_wrong_only_once_is_told_as_such() -> None:
    """A failure that the same story does not show again is itself a finding."""

    class FailsAtFirst(FCFS):
        asked = 0

        def order_key(self, request: Request, now: int) -> tuple[Any, ...]:
            type(self).asked += 1
            return (1 // min(self.asked - 1, 1), request.arrival_ns, request.request_id)

    story = story_of(FailsAtFirst)
    assert broken(story) == "determinism"
    assert "told again, the same story went otherwise" in story[-1]


def test_the_middle_of_a_long_story_is_left_out() -> None:
    """Both ends stay, with their numbers."""
    story, left_out = Story("some policy", EngineConfig()), 7
    for i in range(2 * LINES_AT_EACH_END + left_out):
        story.tell(f"line {i}")
    lines = story.ending("a rule", "the rule", "something").splitlines()[2:-2]
    assert lines[LINES_AT_EACH_END] == "   (7 lines left out)"
    assert lines[0] == "1. line 0"
    assert lines[-1] == f"{2 * LINES_AT_EACH_END + left_out}. line {2 * LINES_AT_EACH_END + left_out - 1}"


@pytest.mark.parametrize(
    ("now", "words"),
    [(0, "0 ns"), (1_000_001, "1000001 ns"), (600 * 10**9, "600 s"), (10**9 + 2, "1.000000002 s")],
)
def test_times_are_told_exactly(now: int, words: str) -> None:
    """In seconds from one second on."""
    assert time_words(now) == words


# ---------------------------------------------------------------- use


def test_policies_are_named_or_given() -> None:
    """A built-in name, module:Class and a class are all the same to it."""
    texts = ["\n".join(story_of(target)[1:]) for target in ("mutants:NeverAdmits", mutants.NeverAdmits)]
    assert texts[0] == texts[1]
    assert check_policy("servetwin.sim.policy:FCFS", examples=1).failures == []


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("nobody", {}, r"'nobody' is not known; allowed: fcfs, priority"),
        ("mutants:Nobody", {}, r"no attribute 'Nobody'"),
        ("fcfs", {"examples": 0}, r"examples must be 1 or more, got 0"),
    ],
)
def test_wrong_arguments_are_refused(target: str, options: dict[str, int], message: str) -> None:
    """Before anything is tried."""
    with pytest.raises(ValueError, match=message):
        check_policy(target, **options)  # type: ignore[arg-type]


def test_without_hypothesis_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module itself can still be imported."""
    monkeypatch.setitem(sys.modules, "hypothesis.errors", None)
    with pytest.raises(ValueError, match=r"check_policy needs hypothesis: pip install 'servetwin\[test\]'"):
        check_policy("fcfs")


def test_importing_the_kit_needs_no_hypothesis() -> None:
    """`servetwin.sim.testing` is light; the search is imported when it starts."""
    code = "import sys, servetwin.sim.testing; sys.exit('hypothesis' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_it_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither for a good policy nor for a bad one."""
    check_policy("fcfs", examples=2)
    story_of(mutants.NeverAdmits)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "wanted",
    [
        lambda c: c.scheduler.async_scheduling,
        lambda c: not c.scheduler.async_scheduling,
        lambda c: c.cache.enable_prefix_caching,
        lambda c: not c.scheduler.enable_chunked_prefill,
        lambda c: not c.scheduler.scheduler_reserve_full_isl,
        lambda c: c.rules.corrections,
    ],
)
def test_engines_of_every_kind_are_drawn(wanted: Callable[[Any], bool]) -> None:
    """Each switch in both positions."""
    assert wanted(find(engine_configs(), wanted))
