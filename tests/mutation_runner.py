"""Makes a mutation on a copy of the code, and runs the tests that must notice it there, in a process of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from mutations import Mutation

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("sim", "executor", "kernels", "workloads", "dashboard")
LIMIT_S = 300
"""A change can make the code run in circles; the tests themselves take seconds."""
BROKEN = ("ImportError", "ModuleNotFoundError", "NameError", "AttributeError", "TypeError", "SyntaxError")
"""Failures that say that the changed code is no code, not that it does something else."""

ORIGIN_CHECK = f'''
"""Stops a test session that would test another servetwin than the copy that holds this file."""

import importlib
import pathlib

import pytest


def pytest_configure(config):
    copy = pathlib.Path(__file__).resolve().parent.parent
    for name in {FOLDERS}:
        found = importlib.import_module(f"servetwin.{{name}}").__file__
        if not pathlib.Path(found).resolve().is_relative_to(copy):
            raise pytest.UsageError(f"servetwin.{{name}} comes from {{found}}, not from {{copy}}")
'''


class MutationError(AssertionError):
    """A mutation that cannot be made, or that is not noticed; the message says how to mend it."""


@dataclass(frozen=True)
class Outcome:
    """What a test session came to."""

    exit_code: int
    failures: dict[str, str]
    """Message of every failed test, by its name."""
    errors: list[str]
    """Tests that could not be set up or collected."""
    said: str


def copy_of_the_code(folder: Path) -> Path:
    """The five folders, the tests and pyproject.toml as they lie in the repository; `packages` makes them servetwin."""
    without_caches = shutil.ignore_patterns("__pycache__")
    (folder / "packages" / "servetwin").mkdir(parents=True)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=without_caches)
        (folder / "packages" / "servetwin" / name).symlink_to(folder / name)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=without_caches)
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "packages" / "origin_check.py").write_text(ORIGIN_CHECK)
    return folder


def apply(mutation: Mutation, copy: Path) -> None:
    """Changes the copy. Fails when the text to change is not there exactly once."""
    path = copy / mutation.path
    text = path.read_text()
    count = text.count(mutation.old)
    if count != 1:
        raise MutationError(
            f"{mutation.name}: the text to change stands {count} times in {mutation.path}, not once; "
            f"bring the mutation up to date with the code:\n{mutation.old}"
        )
    path.write_text(text.replace(mutation.old, mutation.new))


def run_tests(tests: list[str], copy: Path) -> Outcome:
    """Runs tests of the copy on the code of the copy, in a process that knows nothing of this test session."""
    report = copy / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "origin_check", f"--junitxml={report}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(copy / "packages"), "OMP_NUM_THREADS": "1"}
    environment |= {"SERVETWIN_HYPOTHESIS_PROFILE": "mutations"}
    try:
        done = subprocess.run(
            [*command, *(f"tests/{test}" for test in tests)],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise MutationError(f"no end after {LIMIT_S} s: {', '.join(tests)}") from None
    cases = ElementTree.parse(report).findall(".//testcase") if report.exists() else []
    failures = {c.attrib["name"]: f.attrib["message"] for c in cases for f in c.findall("failure")}
    errors = [c.attrib["name"] for c in cases if c.find("error") is not None]
    return Outcome(done.returncode, failures, errors, done.stdout + done.stderr)


def check_noticed(mutation: Mutation, copy: Path) -> None:
    """Raises MutationError unless every named test fails on the changed copy, and none because it is no code any more.

    The copy is as before afterwards.
    """
    original = (copy / mutation.path).read_text()
    apply(mutation, copy)
    try:
        outcome = run_tests([*mutation.tests], copy)
    finally:
        (copy / mutation.path).write_text(original)
    broken = {name: said for name, said in outcome.failures.items() if said.startswith(BROKEN)}
    if outcome.errors or broken:
        raise MutationError(f"{mutation.name}: the change broke the code as such:\n{outcome.said}")
    for test in mutation.tests:
        name = test.partition("::")[2]
        if not any(failed.startswith(name) for failed in outcome.failures):
            raise MutationError(f"{mutation.name}: {test} passes all the same:\n{outcome.said}")
