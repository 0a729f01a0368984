"""The real executor as a step timer: runs each plan on the model and measures how long it took."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from servetwin.executor.compilation import CompiledModel, compile_model
from servetwin.executor.cpu_threads import set_threads
from servetwin.executor.cuda_graphs import CudaGraphCapture, capture_sizes
from servetwin.executor.eager_model import eager_model
from servetwin.executor.engine_log import logger
from servetwin.executor.input_batch import InputBatch, build_warm_up_batch
from servetwin.executor.kv_budget import choose_num_blocks
from servetwin.executor.memory_errors import memory_errors_told
from servetwin.executor.model_loader import load_model
from servetwin.executor.model_runner import ModelRunner
from servetwin.executor.packed_linear import linear_dtypes
from servetwin.executor.stopwatch import stopwatch_for
from servetwin.kernels import cpu_native
from servetwin.sim.config import ExecutorOptions, ModelConfig
from servetwin.sim.contract import ModelRunnerOutput, SchedulerOutput, StepResult

WARM_UP_PROMPT_TOKENS = 512
WARM_UP_DECODE_ROWS = 16


class TorchStepTimer:
    """Runs plans on a model (the `sim.plugins.Executor` protocol).

    Times: `prepare_ns` is host time for updating the request states and packing; `device_ns` is forward and
    sampling, by events on a GPU and by wall time on a CPU, and then drafting, by wall time. Fetching the tokens belongs
    to none of them.
    """

    def __init__(self, runner: ModelRunner, model_config: ModelConfig, num_gpu_blocks: int) -> None:
        self.runner = runner
        self.model_config = model_config
        self.num_gpu_blocks = num_gpu_blocks
        self._clock = stopwatch_for(runner.loaded.device, num_marks=3)

    def run(self, plan: SchedulerOutput) -> StepResult:
        """Runs one plan; plans come in order. Raises PlanError for one that cannot be run."""
        start_ns = time.perf_counter_ns()
        batch = self.runner.prepare(plan)
        if batch is None:
            return StepResult(0, 0, ModelRunnerOutput([], {}, []), "measured")
        prepare_ns = time.perf_counter_ns() - start_ns
        graph_tokens = self.runner.graph_tokens(batch)
        output, parts = self._run_batch(batch)
        start_ns = time.perf_counter_ns()
        drafts = self.runner.propose_draft_token_ids(output)
        if drafts is not None:
            parts["draft_ns"] = time.perf_counter_ns() - start_ns
        device_ns = sum(parts.values())
        return StepResult(
            prepare_ns,
            device_ns,
            output,
            "measured",
            graph_tokens=graph_tokens,
            draft_token_ids=drafts,
            parts=parts,
        )

    def _run_batch(self, batch: InputBatch) -> tuple[ModelRunnerOutput, dict[str, int]]:
        clock = self._clock
        clock.mark(0)
        logits = self.runner.forward(batch)
        clock.mark(1)
        sampled = self.runner.sample(batch, logits)
        clock.mark(2)
        # Copying the tokens waits for the device, so the marks can be read without another wait.
        output = self.runner.finish(batch, sampled)
        return output, {"forward_ns": clock.between_ns(0, 1), "sample_ns": clock.between_ns(1, 2)}

    def warm_up(self, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        """Runs one prompt and one decode batch outside of any measurement; the cache stays as it is."""
        table = self.runner.states.block_table
        prompt = min(max_num_batched_tokens, self.model_config.max_model_len, WARM_UP_PROMPT_TOKENS)
        for query_lens in ([prompt], [1] * min(max_num_seqs, WARM_UP_DECODE_ROWS)):
            batch = build_warm_up_batch(query_lens, table.block_size, self.runner.loaded.device)
            self.runner.forward(batch).argmax(dim=-1).tolist()

    def describe(self) -> dict[str, Any]:
        """Hardware, versions and model for `run.json`."""
        loaded, spec = self.runner.loaded, self.runner.loaded.kv_cache_spec
        graphs = self.runner.decode_graphs
        num_slots = self.num_gpu_blocks * self.runner.states.block_table.block_size
        described = {
            "device": device_name(loaded.device),
            "device_type": loaded.device.type,
            "threads": torch.get_num_threads(),
            "load_average": list(os.getloadavg()),
            "dtype": str(spec.dtype).removeprefix("torch."),
            "versions": {name: installed_version(name) for name in ("torch", "transformers", "triton")},
            "model": loaded.name,
            "num_parameters": loaded.num_parameters,
            "kv_bytes_per_token": spec.bytes_per_token,
            "kv_cache_bytes": num_slots * spec.bytes_per_token,
            "compiled": isinstance(self.runner.model, CompiledModel),
            "cudagraph_capture_sizes": [] if graphs is None else list(graphs.sizes),
        }
        if loaded.device.type == "cpu":
            described["cpu_kernels"] = cpu_native.status()
            described["linear_dtypes"] = linear_dtypes(loaded.model)
        if loaded.sliding_window is not None:
            described["note"] = (
                f"sliding window of {loaded.sliding_window} tokens: attention honours it, but the scheduler "
                "treats every layer as full attention, so the real engine's block accounting differs"
            )
        return described

    def close(self) -> None:
        """Gives the cache's memory back; the executor is not usable afterwards."""
        self.runner.decode_graphs = None
        self.runner.kv_caches.clear()


@memory_errors_told()
def build_torch_executor(options: ExecutorOptions) -> TorchStepTimer:
    """The executor named `torch`. ValueError for options that the machine or the model cannot serve."""
    if options.model is None:
        raise ValueError("executor torch needs a model: give --model FOLDER (a local Hugging Face folder)")
    set_threads(options.threads)
    device = default_device()
    loaded = load_model(
        options.model,
        load_format=options.load_format,
        dtype=options.dtype,
        device=device,
        seed=options.seed,
        max_model_len=options.max_model_len,
    )
    model = compile_model(loaded) if options.compile else eager_model(loaded)
    num_blocks = choose_num_blocks(options, loaded, model)
    runner = ModelRunner(
        loaded,
        num_blocks=num_blocks,
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        max_model_len=loaded.max_model_len,
        seed=options.seed,
        speculative=options.speculative,
        model=model,
    )
    model_config = ModelConfig(
        name=loaded.name,
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.vocab_size,
        eos_token_id=loaded.eos_token_ids[0] if loaded.eos_token_ids else None,
        extra_eos_token_ids=loaded.eos_token_ids[1:],
    )
    executor = TorchStepTimer(runner, model_config, num_blocks)
    executor.warm_up(options.max_num_batched_tokens, options.max_num_seqs)
    if sizes := _graph_sizes(options, loaded.device):
        runner.capture_decode_graphs(sizes, CudaGraphCapture())
    return executor


def _graph_sizes(options: ExecutorOptions, device: torch.device) -> tuple[int, ...]:
    """Sizes of decode batches to capture; none on a CPU, where an explicit wish is answered with a line."""
    wanted = options.cudagraph_capture_sizes
    if device.type != "cuda":
        if wanted is not None or options.max_cudagraph_capture_size is not None:
            logger.warning("CUDA graph sizes have no effect on a CPU, where every step runs eagerly")
        return ()
    if options.enforce_eager:
        return ()
    sizes = capture_sizes(
        options.max_num_seqs, options.max_num_batched_tokens, wanted, options.max_cudagraph_capture_size
    )
    if wanted is not None and (unused := sorted({*wanted}.difference(sizes))):
        logger.warning(
            "CUDA graph sizes %s are not captured: they are above max_num_batched_tokens (%d), or above the first size "
            "that holds max_num_seqs (%d)",
            unused,
            options.max_num_batched_tokens,
            options.max_num_seqs,
        )
    return sizes


def default_device() -> torch.device:
    """The current GPU where there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = torch.cpu.get_capabilities().get("cpu_name") or platform.processor() or platform.machine()
    return f"{name} ({os.cpu_count()} logical CPUs)"


def installed_version(package: str) -> str | None:
    """None where the package is not installed (triton is optional on a CPU)."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
