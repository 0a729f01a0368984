"""Engine cores on the wall clock for tests: arguments, requests, an executor that answers without a model, a listener
that writes down what it is told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from servetwin.executor.core_loop import CoreLoop
from servetwin.executor.engine_args import EngineArgs
from servetwin.executor.engine_core_client import EngineCoreClient
from servetwin.sim.config import ExecutorOptions, ModelConfig
from servetwin.sim.contract import (
    EngineCoreOutput,
    EngineCoreRequest,
    ModelRunnerOutput,
    SamplingParams,
    SchedulerOutput,
    StepResult,
)
from servetwin.sim.records import BlockChange, EngineCoreOutputs, Frame
from servetwin.sim.steptime.plan_rows import PlanReader
from servetwin.sim.timeline import StepTimes

VOCAB_SIZE = 160
MAX_MODEL_LEN = 64

OnRun = Callable[[SchedulerOutput], None]


def engine_args(model: Path | str = "a-model", **options: Any) -> EngineArgs:
    """A small engine of four seats."""
    small: dict[str, Any] = {
        "dtype": "float32",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "block_size": 8,
        "num_gpu_blocks_override": 40,
        "max_model_len": MAX_MODEL_LEN,
    }
    return EngineArgs(model=model, **{**small, **options})


def request(
    request_id: str, prompt: int | list[int] = 5, max_tokens: int = 8, **sampling: Any
) -> EngineCoreRequest:
    """A greedy request; a prompt given by its length begins with its own token."""
    tokens = [(len(request_id) * 31 + ord(request_id[-1]) + i) % VOCAB_SIZE for i in range(prompt)] \
        if isinstance(prompt, int) else prompt  # fmt: skip
    params = SamplingParams(**{"temperature": 0, "ignore_eos": True, "max_tokens": max_tokens, **sampling})
    return EngineCoreRequest(request_id, tokens, params, time.monotonic_ns())


class AnsweringExecutor:
    """Answers every row with the length of the sequence before it; `on_run` is called in the midst of every step."""

    def __init__(self, options: ExecutorOptions, on_run: OnRun | None = None) -> None:
        self.model_config = ModelConfig(max_model_len=options.max_model_len or 0, vocab_size=VOCAB_SIZE)
        self.num_gpu_blocks = options.num_gpu_blocks or 0
        self.plans: list[SchedulerOutput] = []
        self.closed = False
        self._reader = PlanReader()
        self._on_run = on_run

    def run(self, plan: SchedulerOutput) -> StepResult:
        self.plans.append(plan)
        rows = self._reader.rows(plan)
        if self._on_run is not None:
            self._on_run(plan)
        ids = [row.request_id for row in rows]
        tokens = [[row.num_output_tokens] if row.samples else [] for row in rows]
        output = ModelRunnerOutput(ids, {i: place for place, i in enumerate(ids)}, tokens)
        return StepResult(1, 1, output, "answers") if rows else StepResult(0, 0, output, "answers")

    def describe(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self.closed = True


@dataclass
class Told:
    """A `CoreListener` that keeps the calls."""

    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)

    def arrived(self, request_id: str, now_ns: int) -> None:
        self.calls.append(("arrived", (request_id, now_ns)))

    def refused(self, request_id: str, now_ns: int, reason: str) -> None:
        self.calls.append(("refused", (request_id, now_ns, reason)))

    def aborted(self, request_id: str, now_ns: int, computed_tokens: int, blocks: int) -> None:
        self.calls.append(("aborted", (request_id, now_ns, computed_tokens, blocks)))

    def scheduled(self, frame: Frame) -> None:
        self.calls.append(("scheduled", (frame,)))

    def stepped(
        self, frame: Frame, result: StepResult, times: StepTimes, end_ns: int, outputs: EngineCoreOutputs
    ) -> None:
        self.calls.append(("stepped", (frame, result, times, end_ns, outputs)))

    def sat_out(self, frame: Frame) -> None:
        self.calls.append(("sat_out", (frame,)))

    def block_changes(self, changes: list[BlockChange], now_ns: int) -> None:
        self.calls.append(("block_changes", (changes, now_ns)))

    def of(self, name: str) -> list[tuple[Any, ...]]:
        """The arguments of the calls of one name."""
        return [arguments for called, arguments in self.calls if called == name]


def answering_loop(
    args: EngineArgs | None = None, *, listener: Told | None = None, on_run: OnRun | None = None
) -> tuple[CoreLoop, AnsweringExecutor]:
    """An engine core whose executor runs no model; close it."""
    built: list[AnsweringExecutor] = []

    def build(options: ExecutorOptions) -> AnsweringExecutor:
        built.append(AnsweringExecutor(options, on_run))
        return built[0]

    return CoreLoop(args or engine_args(), listener=listener, build=build), built[0]


def run_to_end(loop: CoreLoop) -> list[EngineCoreOutput]:
    """Steps until nothing is left to do; everything that came out."""
    outputs = []
    while loop.has_work():
        outputs += loop.step()
    return outputs


def fetch(client: EngineCoreClient, request_ids: Iterable[str]) -> dict[str, list[EngineCoreOutput]]:
    """All outputs of these requests, until each has ended."""
    got: dict[str, list[EngineCoreOutput]] = {request_id: [] for request_id in request_ids}
    left = set(got)
    while left:
        for output in client.get_outputs():
            got[output.request_id].append(output)
            if output.finish_reason is not None:
                left.remove(output.request_id)
    return got


def tokens_of(outputs: Iterable[EngineCoreOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]
