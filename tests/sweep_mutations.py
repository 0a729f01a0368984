"""Mutations of sweeps (see mutations.py)."""

from __future__ import annotations

from mutation import Mutation

SWEEP, SPEC = "test_sweep.py", "test_run_spec.py"

SWEEPS = (
    Mutation(
        "the bytes of the files a run names are not in its hash",
        0,
        "sim/planning/spec.py",
        '"files": self.file_digests(known),',
        '"files": {},',
        (
            f"{SPEC}::test_the_hash_goes_with_the_bytes_of_the_workload",
            f"{SPEC}::test_the_hash_goes_with_profile_model_recorded_run_and_own_module",
            f"{SWEEP}::test_sweeps_share_a_store",
        ),
    ),
    Mutation(
        "vllm_args are left to be merged when the run begins",
        0,
        "sim/planning/spec.py",
        'return spec._with_group("engine", replace(engine, vllm_args=None))',
        "return spec",
        (f"{SPEC}::test_vllm_args_are_merged_once_so_that_a_field_set_later_wins",),
    ),
    Mutation(
        "a sweep does not look into its store",
        0,
        "sim/planning/sweep.py",
        "            record = self._store.get(run.spec_hash)\n            if record is not None:\n",
        "            record = None\n            if record is not None:\n",
        (
            f"{SWEEP}::test_what_has_ended_is_not_done_again",
            f"{SWEEP}::test_sweeps_share_a_store",
        ),
    ),
    Mutation(
        "a run whose process was killed is taken as ended for good",
        0,
        "sim/planning/sweep.py",
        "            if record.final:\n",
        "            if True:\n",
        (f"{SWEEP}::test_a_run_that_kills_its_process_is_told_and_the_others_go_on",),
    ),
    Mutation(
        "processes outlive a sweep that is killed",
        0,
        "sim/planning/backends.py",
        "        reader.poll(None)\n        os._exit(1)\n",
        "        reader.poll(None)\n",
        (f"{SWEEP}::test_processes_end_with_a_sweep_that_is_killed",),
    ),
    Mutation(
        "rows stand in the order in which runs end",
        0,
        "sim/planning/sweep.py",
        "        for run in self._planned:\n            record = self._records.get(run.spec_hash)\n",
        "        for run in sorted(self._planned, key=lambda r: [*self._records].index(r.spec_hash)):\n"
        "            record = self._records.get(run.spec_hash)\n",
        (f"{SWEEP}::test_what_has_ended_is_not_done_again",),
    ),
    Mutation(
        "every point has seeds of its own",
        0,
        "sim/planning/definition.py",
        "for i in range(self.seeds)]",
        "for i in range(len(str(point)), len(str(point)) + self.seeds)]",
        (
            f"{SWEEP}::test_seeds_are_common_to_all_points",
            f"{SWEEP}::test_one_row_a_run_in_the_order_of_the_plan",
        ),
    ),
    Mutation(
        "another sweep in the folder is gone on with",
        0,
        "sim/planning/folder.py",
        "if different := differences(",
        "if different := () and differences(",
        (f"{SWEEP}::test_a_folder_of_something_else_is_refused",),
    ),
)
