"""Each rule that matters is guarded: change it in a copy of the code, and the tests that stand for it fail.

All of them must fail by their own verdict: an error while importing, collecting or setting up proves nothing.
Without a change all of them pass. The changes are in mutations.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from mutation import Mutation
from mutation_runner import check_noticed, copy_of_the_code, run_tests
from mutations import MUTATIONS, SCHEDULING

pytest.importorskip("torch", reason="needs the extra `executor`")

RULES = range(1, 21)
"""The numbers of the points that implementers of this scheduler get wrong."""


def test_every_rule_has_a_mutation() -> None:
    """And every mutation stands for a change that is there, with tests that notice it."""
    assert {m.rule for m in SCHEDULING} >= set(RULES)
    assert len(SCHEDULING) >= 40
    assert not [m.name for m in MUTATIONS if not m.tests]
    assert len({m.name for m in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.full
def test_without_a_change_the_tests_pass(tmp_path: Path) -> None:
    """All tests that any mutation names, on an unchanged copy."""
    tests = dict.fromkeys(test for mutation in MUTATIONS for test in mutation.tests)
    outcome = run_tests([*tests], copy_of_the_code(tmp_path))
    assert outcome.exit_code == pytest.ExitCode.OK, outcome.said


@pytest.mark.full
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_change_is_noticed(mutation: Mutation, tmp_path: Path) -> None:
    """Every named test fails on the changed copy."""
    check_noticed(mutation, copy_of_the_code(tmp_path))
