"""Each rule that matters is guarded: change it in a copy of the code, and the tests that stand for it fail.

A mutation is one exact textual change to one file of a copy. The named fast tests run on the copy in a process of
their own, and at least one of them must fail by its own verdict: an error while importing, collecting or setting up
proves nothing. Without a change all of them pass.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("torch", reason="needs the extra `executor`")

pytestmark = pytest.mark.full

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

RULES = "test_scheduler_rules.py"
PROCESS = "test_engine_process.py"
RUNNER = "test_executor_runner.py"


@dataclass(frozen=True)
class Mutation:
    """One change and the tests that must notice it."""

    name: str
    path: str
    """Of the file, from the root of the repository."""
    old: str
    """Stands there exactly once."""
    new: str
    tests: tuple[str, ...]
    """file::name in `tests`."""


MUTATIONS = (
    # ------------------------------------------------------------ admission and preemption
    Mutation(
        "the full-sequence gate is gone",
        "sim/scheduler.py",
        "if self.config.scheduler.scheduler_reserve_full_isl and not self.kv.full_sequence_fits(",
        "if False and not self.kv.full_sequence_fits(",
        (
            f"{RULES}::test_05_the_gate_asks_for_the_whole_prompt",
            f"{RULES}::test_05_the_gate_counts_the_outputs_of_a_resumed_request",
            "test_reports_scheduler.py::test_02_a_long_prompt_waits_for_its_whole_sequence",
        ),
    ),
    Mutation(
        "a preemption leaves admission open",
        "sim/scheduler.py",
        "        if step.record.preempted:\n",
        "        if False:\n",
        (f"{RULES}::test_01_a_preemption_closes_admission_for_the_step",),
    ),
    Mutation(
        "FCFS victims go to the back of the queue",
        "sim/policy.py",
        "self._queue.appendleft(request)",
        "self._queue.append(request)",
        (f"{RULES}::test_11_victims_of_one_step_keep_their_order_and_their_outputs",),
    ),
    Mutation(
        "the last of equal victims goes",
        "sim/policy.py",
        "return max(running, key=",
        "return max(reversed(running), key=",
        (f"{RULES}::test_12_the_first_of_equal_victims_goes",),
    ),
    Mutation(
        "a scheduled victim gives no tokens back",
        "sim/scheduler.py",
        "self.budget += self.num_scheduled_tokens.pop(request.request_id)",
        "self.num_scheduled_tokens.pop(request.request_id)",
        (f"{RULES}::test_13_tokens_given_back_go_to_those_behind",),
    ),
    Mutation(
        "min_tokens does not hold an end back",
        "sim/scheduler.py",
        "if request.num_output_tokens < params.min_tokens:",
        "if False:",
        (f"{RULES}::test_17_the_order_of_the_stop_rules",),
    ),
    # ------------------------------------------------------------ blocks
    Mutation(
        "a hit may cover the last token",
        "sim/kv_cache_manager.py",
        "(request.num_tokens - 1) // self.block_size",
        "request.num_tokens // self.block_size",
        (
            f"{RULES}::test_04_the_last_token_is_never_hit",
            "test_reports_blocks.py::test_14_a_full_hit_still_computes_the_last_token",
        ),
    ),
    Mutation(
        "a table is freed from its beginning",
        "sim/kv_cache_manager.py",
        "self.pool.release(reversed(table), request.request_id)",
        "self.pool.release(table, request.request_id)",
        (
            f"{RULES}::test_08_a_table_is_freed_from_its_end",
            f"{RULES}::test_08_requests_that_end_together_are_freed_in_scheduling_order",
            "test_reports_blocks.py::test_13_the_end_of_a_chain_is_evicted_first",
            "test_reports_blocks.py::test_22_the_free_queue_takes_a_table_back_from_its_end",
        ),
    ),
    Mutation(
        "blocks are findable only after the step that fills them",
        "sim/kv_cache_manager.py",
        "self._hash_full_blocks(request, min(computed + num_new_tokens, request.num_tokens), table)",
        "self._hash_full_blocks(request, computed, table)",
        (f"{RULES}::test_03_a_block_is_found_in_the_step_that_fills_it",),
    ),
    Mutation(
        "the null block is handed out",
        "sim/block_pool.py",
        "self._queue = list(range(1, num_gpu_blocks))",
        "self._queue = list(range(num_gpu_blocks))",
        (
            f"{RULES}::test_10_the_first_block_handed_out_is_block_1",
            "test_block_pool.py::test_the_null_block_is_never_handed_out",
        ),
    ),
    # ------------------------------------------------------------ time and the log
    Mutation(
        "host time does not move the clock",
        "sim/engine_process.py",
        "self.env.timeout(host_ns + result.prepare_ns + result.device_ns)",
        "self.env.timeout(result.prepare_ns + result.device_ns)",
        (
            f"{PROCESS}::test_the_synchronous_period_is_the_sum_of_its_parts",
            f"{PROCESS}::test_host_time_counts_rows_and_new_requests",
        ),
    ),
    Mutation(
        "aborts come after the update",
        "sim/engine_process.py",
        "        self._abort_due()\n        outputs = self.core.complete(frame, result.output)\n",
        "        outputs = self.core.complete(frame, result.output)\n",
        (
            f"{PROCESS}::test_at_one_instant_aborts_come_before_the_update",
            f"{PROCESS}::test_the_whole_order_at_one_instant",
        ),
    ),
    Mutation(
        "the first token has an inter-token latency",
        "sim/events.py",
        "                if before := request.output_ns:\n                    gap_ns = end_ns - before[-1]\n",
        "                before = request.output_ns\n"
        "                if request.queued_ns != NEVER:\n"
        "                    gap_ns = end_ns - (before[-1] if before else request.queued_ns)\n",
        ("test_events.py::test_a_preempted_request_keeps_its_first_times",),
    ),
    Mutation(
        "a head without a seat has no reason to wait",
        "sim/scheduler.py",
        "return self._note_wait(step, WaitReason.SEATS)",
        "return None",
        ("test_reports_scheduler.py::test_10_a_more_urgent_arrival_waits_for_a_seat",),
    ),
    Mutation(
        "a head without blocks has no reason to wait",
        "sim/scheduler.py",
        "return self._note_wait(step, WaitReason.BLOCKS)",
        "return None",
        ("test_reports_blocks.py::test_11_hit_blocks_in_the_free_queue_count_as_taken",),
    ),
    Mutation(
        "a new reason does not end the old wait",
        "sim/waits.py",
        "if wait.reason is not reason:",
        "if False:",
        ("test_events.py::test_waits_have_one_interval_per_reason",),
    ),
    # ------------------------------------------------------------ execution
    Mutation(
        "attention reads before K/V is written",
        "executor/attention.py",
        "    written = write_kv(_packed(key), _packed(value), layer_index)\n"
        "    output = attend(_packed(query), written, layer_index, scaling, sliding_window, softcap)\n",
        "    written = query.new_empty(0)\n"
        "    output = attend(_packed(query), written, layer_index, scaling, sliding_window, softcap)\n"
        "    write_kv(_packed(key), _packed(value), layer_index)\n",
        (
            f"{RUNNER}::test_a_prompt_in_chunks_and_decode_steps_equal_one_forward[llama]",
            f"{RUNNER}::test_a_hit_on_blocks_computed_in_the_same_step[llama]",
        ),
    ),
    Mutation(
        "one request reads before the next has written",
        "executor/attention.py",
        "    written = write_kv(_packed(key), _packed(value), layer_index)\n"
        "    output = attend(_packed(query), written, layer_index, scaling, sliding_window, softcap)\n",
        "    context = get_forward_context()\n"
        "    metadata, cache = context.attention_metadata, context.kv_caches[layer_index]\n"
        "    starts, parts = metadata.query_start_loc.tolist(), []\n"
        "    for rows in (slice(*bounds) for bounds in zip(starts, starts[1:])):\n"
        "        new = _packed(key)[rows], _packed(value)[rows]\n"
        "        ops.reshape_and_cache(*new, cache.key, cache.value, metadata.slot_mapping[rows])\n"
        "        written = query.new_empty(0)\n"
        "        all_rows = attend(_packed(query), written, layer_index, scaling, sliding_window, softcap)\n"
        "        parts.append(all_rows[rows])\n"
        "    output = torch.cat(parts)\n",
        (f"{RUNNER}::test_a_hit_whatever_the_order_of_rows_in_the_step",),
    ),
    Mutation(
        "a compiler may reorder write and attention",
        "executor/attention.py",
        "output = attend(_packed(query), written, layer_index,",
        "output = attend(_packed(query), query.new_empty(0), layer_index,",
        ("test_executor_attention.py::test_a_compiler_cannot_read_before_it_writes",),
    ),
    Mutation(
        "slot -1 is written",
        "kernels/cpu_torch.py",
        "written = slot_mapping >= 0",
        "written = slot_mapping >= -1",
        (
            "test_kernels_cache.py::test_padding_slots_write_nothing",
            "test_executor_input_batch.py::test_the_warm_up_batch_writes_nothing",
        ),
    ),
    Mutation(
        "a chunk that ends early is sampled",
        "executor/input_batch.py",
        "logits_rows = np.flatnonzero(layout.seq_lens == num_tokens)",
        "logits_rows = np.arange(num_reqs)",
        (
            f"{RUNNER}::test_unscheduled_and_partial_rows_have_no_sampled_token",
            f"{RUNNER}::test_a_seed_does_not_depend_on_chunking",
        ),
    ),
    Mutation(
        "the sampler does not know min_tokens",
        "executor/sampler.py",
        "if row.num_output_tokens < row.params.min_tokens",
        "if False",
        ("test_executor_sampler.py::test_min_tokens_holds_back_every_token_that_could_end_the_request",),
    ),
)


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
        pytest.fail(
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
        pytest.fail(f"no end after {LIMIT_S} s: {', '.join(tests)}")
    cases = ElementTree.parse(report).findall(".//testcase") if report.exists() else []
    failures = {c.attrib["name"]: f.attrib["message"] for c in cases for f in c.findall("failure")}
    errors = [c.attrib["name"] for c in cases if c.find("error") is not None]
    return Outcome(done.returncode, failures, errors, done.stdout + done.stderr)


def test_without_a_change_the_tests_pass(tmp_path: Path) -> None:
    """All tests that any mutation names, on an unchanged copy."""
    tests = dict.fromkeys(test for mutation in MUTATIONS for test in mutation.tests)
    outcome = run_tests([*tests], copy_of_the_code(tmp_path))
    assert outcome.exit_code == pytest.ExitCode.OK, outcome.said


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_change_is_noticed(mutation: Mutation, tmp_path: Path) -> None:
    """Every named test fails on the changed copy, and none because the change broke the code as such."""
    copy = copy_of_the_code(tmp_path)
    apply(mutation, copy)
    outcome = run_tests([*mutation.tests], copy)
    assert outcome.exit_code == pytest.ExitCode.TESTS_FAILED, outcome.said
    assert outcome.failures, outcome.said
    assert not outcome.errors, outcome.said
    broken = {name: said for name, said in outcome.failures.items() if said.startswith(BROKEN)}
    assert not broken, outcome.said
    for test in mutation.tests:
        name = test.partition("::")[2]
        assert any(failed.startswith(name) for failed in outcome.failures), f"{test} passes:\n{outcome.said}"
