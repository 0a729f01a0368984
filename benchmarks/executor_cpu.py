"""The executor on a CPU against transformers: one model, one batch, the same threads, in one run.

    python benchmarks/executor_cpu.py [--rounds 3] [--threads N] [-o FILE] [--toy]

A random Llama of 43.8 million parameters (12 layers, hidden size 512) continues 16 prompts of 128 tokens by 64 tokens
each, greedily. The engines are transformers' `generate` (a static batch, SDPA), its continuous batching
(`generate_batch`) and `LLM` in one process. Each has a process of its own; after a run to warm up they take turns. The
figures are medians over the rounds, of output tokens per second and of the ratio of two engines in one round: what else
the machine does changes from round to round, and strikes both. In float32 the tokens of each sequence must be those of
`generate`; in bfloat16 rounding differs between engines, and the number of equal sequences is for information.

Then one more run of ours is taken apart: host time inside linear layers, attention, norms and so on, as seen by timers
around them. What no timer covers within the forward pass is transformers' own code and small operations; "between
steps" is the engine: scheduling, packing, tokens back and forth.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.utils import logging as transformers_logging

from servetwin.executor import LLM, SamplingParams
from servetwin.executor.cpu_threads import set_threads, usable_cores
from servetwin.executor.model_runner import ModelRunner
from servetwin.executor.packed_linear import PackedLinear
from servetwin.kernels import cpu_native, ops

Tokens = list[list[int]]
Run = Callable[[], Tokens]
ENGINES = ("generate", "generate_batch", "servetwin")
TARGETS = {"float32": {"generate": 1.1}, "bfloat16": {"generate": 1.5, "generate_batch": 2.5}}
"""Part of the product's promise: at least so many times the tokens per second of that engine."""
CPU_FLAGS = ("avx2", "avx512_f", "avx512_bf16", "amx_bf16")
BLOCK_SIZE = 16
WAIT_POLICY = "OMP_WAIT_POLICY"


@dataclass(frozen=True)
class Shape:
    """The model and the load."""

    layers: int = 12
    hidden: int = 512
    intermediate: int = 1408
    heads: int = 8
    kv_heads: int = 4
    vocabulary: int = 8192
    batch: int = 16
    prompt_tokens: int = 128
    output_tokens: int = 64

    def prompts(self) -> Tokens:
        draw = random.Random(1)
        return [draw.choices(range(3, self.vocabulary), k=self.prompt_tokens) for _ in range(self.batch)]

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=self.prompt_tokens + self.output_tokens,
        )


TOY = Shape(2, 64, 96, 4, 2, 160, 3, 8, 5)


# ---------------------------------------------------------------- engines


def hide_progress_bars() -> None:
    switch: Any = transformers_logging
    switch.disable_progress_bar()


def transformers_model(folder: Path, dtype: str) -> Any:
    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").train(False)


def greedy(shape: Shape, eos_token_id: int | None) -> Any:
    """So many tokens, whatever they are; how "no end token" is written differs."""
    config: Any = GenerationConfig
    return config(
        max_new_tokens=shape.output_tokens, do_sample=False, eos_token_id=eos_token_id, pad_token_id=0
    )


def static_batch(folder: Path, dtype: str, shape: Shape) -> Run:
    """Greedy `generate` over the whole batch."""
    model, prompts = transformers_model(folder, dtype), torch.tensor(shape.prompts())
    config = greedy(shape, eos_token_id=None)
    mask = torch.ones_like(prompts)

    def run() -> Tokens:
        output = model.generate(prompts, attention_mask=mask, generation_config=config)
        tokens: Tokens = output[:, shape.prompt_tokens :].tolist()
        return tokens

    return run


def continuous_batching(folder: Path, dtype: str, shape: Shape) -> Run:
    """transformers' own continuous batching, with a pool and a token budget that hold the whole batch."""
    model, prompts = transformers_model(folder, dtype), shape.prompts()
    config = greedy(shape, eos_token_id=-1)
    blocks_each = -(-(shape.prompt_tokens + shape.output_tokens) // BLOCK_SIZE) + 1
    batching = ContinuousBatchingConfig(
        page_size=BLOCK_SIZE,
        num_blocks=shape.batch * blocks_each,
        max_batch_tokens=shape.batch * shape.prompt_tokens,
    )

    def run() -> Tokens:
        outputs = model.generate_batch(
            prompts, generation_config=config, continuous_batching_config=batching, warmup=False
        )
        # Named in the order of the prompts, and given in the order in which they end.
        by_prompt = {tuple(output.prompt_ids): output.generated_tokens for output in outputs.values()}
        return [list(by_prompt[tuple(prompt)]) for prompt in prompts]

    return run


def our_engine(folder: Path, dtype: str, shape: Shape) -> Run:
    """`LLM` in this process; prefix caching is off, or the second run would skip its prompts."""
    os.environ["SERVETWIN_ENABLE_MULTIPROCESSING"] = "0"
    longest = shape.prompt_tokens + shape.output_tokens
    llm = LLM(
        model=folder,
        dtype=dtype,
        skip_tokenizer_init=True,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=shape.batch * (longest // BLOCK_SIZE + 1) + 1,
        max_num_seqs=shape.batch,
        enable_prefix_caching=False,
    )
    params = SamplingParams(temperature=0, max_tokens=shape.output_tokens, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in shape.prompts()]

    def run() -> Tokens:
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]

    return run


BUILDERS = dict(zip(ENGINES, (static_batch, continuous_batching, our_engine), strict=True))


def serve(pipe: Connection, engine: str, folder: Path, dtype: str, shape: Shape, threads: int) -> None:
    """A process: runs once to warm up, then once per message, and answers (seconds, tokens); None ends it."""
    set_threads(threads)
    hide_progress_bars()
    run = BUILDERS[engine](folder, dtype, shape)
    run()
    pipe.send(None)
    while (message := pipe.recv()) is not None:
        if message == "profile":
            pipe.send(profile(run))
            continue
        start = perf_counter()
        tokens = run()
        pipe.send((perf_counter() - start, tokens))


# ---------------------------------------------------------------- where the time goes

PHASES = {"prepare": "prepare the batch", "forward": "forward", "sample": "sample", "finish": "fetch tokens"}
OPERATIONS = {
    "paged_attention": "attention",
    "rotary_and_cache": "rotary and KV write",
    "rms_norm": "norms",
    "silu_and_mul": "SiLU",
}


def profile(run: Run) -> dict[str, float]:
    """Seconds of one run by part; they add up to the whole."""
    spent: dict[str, float] = {}
    with ExitStack() as stack:
        for owner, names in ((ModelRunner, PHASES), (ops, OPERATIONS), (PackedLinear, {"forward": "linear"})):
            for name, label in names.items():
                timed = patch.object(owner, name, with_timer(getattr(owner, name), label, spent))
                stack.enter_context(timed)
        start = perf_counter()
        run()
        whole = perf_counter() - start
    inside = sum(spent.get(label, 0) for label in (*OPERATIONS.values(), "linear"))
    spent["between steps"] = whole - sum(spent[label] for label in PHASES.values())
    spent["rest of the forward pass"] = spent.pop("forward") - inside
    return spent


def with_timer(function: Callable[..., Any], label: str, spent: dict[str, float]) -> Callable[..., Any]:
    """The function, adding the seconds it takes to `spent[label]`."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        result = function(*args, **kwargs)
        spent[label] = spent.get(label, 0.0) + perf_counter() - start
        return result

    return timed


# ---------------------------------------------------------------- the race


@contextmanager
def engines(folder: Path, dtype: str, shape: Shape, threads: int) -> Iterator[dict[str, Connection]]:
    """One process per engine, warmed up one after the other, with a pipe to each."""
    context, pipes, processes = multiprocessing.get_context("spawn"), {}, []
    try:
        for engine in ENGINES:
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, engine, folder, dtype, shape, threads))
            process.start()
            theirs.close()
            processes.append(process)
            pipes[engine] = ours
            ours.recv()
        yield pipes
        for pipe in pipes.values():
            pipe.send(None)
    finally:
        for process in processes:
            process.join(timeout=10)
            process.terminate()


def race(folder: Path, dtype: str, shape: Shape, rounds: int, threads: int) -> dict[str, Any]:
    """The figures of one data type."""
    seconds: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    tokens: dict[str, Tokens] = {}
    with engines(folder, dtype, shape, threads) as pipes:
        for _ in range(rounds):
            for engine, pipe in pipes.items():
                pipe.send("run")
                spent, tokens[engine] = pipe.recv()
                seconds[engine].append(spent)
        pipes["servetwin"].send("profile")
        profiled: dict[str, float] = pipes["servetwin"].recv()
    made = shape.batch * shape.output_tokens
    return {
        "output_tokens_per_s": {e: made / statistics.median(times) for e, times in seconds.items()},
        "rounds_s": seconds,
        "times_generate": {e: times_as_fast(times, seconds["generate"]) for e, times in seconds.items()},
        "ours_times": {e: times_as_fast(seconds["servetwin"], times) for e, times in seconds.items()},
        "sequences_equal_to_generate": {
            engine: sum(a == b for a, b in zip(rows, tokens["generate"], strict=True))
            for engine, rows in tokens.items()
        },
        "profile_s": dict(sorted(profiled.items(), key=lambda item: -item[1])),
    }


def times_as_fast(one: list[float], other: list[float]) -> float:
    """How many times as fast as the other: the median of the ratios in each round."""
    return statistics.median(b / a for a, b in zip(one, other, strict=True))


def show(dtype: str, shape: Shape, figures: dict[str, Any], targets: dict[str, float]) -> None:
    print(f"{dtype}, output tokens/s, times generate, sequences equal to generate of {shape.batch}")
    for engine, rate in figures["output_tokens_per_s"].items():
        ratio, equal = figures["times_generate"][engine], figures["sequences_equal_to_generate"][engine]
        print(f"  {engine:16} {rate:8.1f} {ratio:8.2f} x {equal:8}")
    for engine, target in targets.items():
        reached = figures["ours_times"][engine]
        verdict = "reached" if reached >= target else "missed"
        print(f"  ours against {engine}: {reached:.2f} x (target {target:g} at least: {verdict})")
    whole = sum(figures["profile_s"].values())
    print(f"  one run of ours, {whole:.2f} s:")
    for part, spent in figures["profile_s"].items():
        print(f"    {part:26} {spent / whole:6.1%}")


def header(shape: Shape, threads: int) -> dict[str, Any]:
    """What the figures depend on."""
    capabilities = torch.cpu.get_capabilities()
    packages = ("torch", "transformers", "servetwin")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "cpu": capabilities.get("cpu_name"),
        "cpu_kernels": cpu_native.status(),
        "cpu_flags": [flag for flag in CPU_FLAGS if capabilities.get(flag)],
        "threads": threads,
        WAIT_POLICY.lower(): os.environ[WAIT_POLICY],
        "load_average_before": os.getloadavg(),
        "versions": {"python": sys.version.split()[0], **{name: version(name) for name in packages}},
        "shape": asdict(shape),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="timed runs of each engine (default 3)")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="default: one per physical core")
    parser.add_argument("--dtype", choices=sorted(TARGETS), help="only this one (default: both)")
    parser.add_argument("--toy", action="store_true", help="a tiny model: says nothing about speed")
    parser.add_argument("-o", "--out", type=Path, help="also write the figures to this file, as JSON")
    args = parser.parse_args()
    for name in ("rounds", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: must be 1 or more")
    if args.out and not args.out.parent.is_dir():
        parser.error(f"-o {args.out}: its folder does not exist")
    # As `servetwin` does, for all engines alike: threads that spin get in each other's way on a busy machine.
    os.environ.setdefault(WAIT_POLICY, "PASSIVE")
    shape = TOY if args.toy else Shape()
    results = header(shape, args.threads)
    with tempfile.TemporaryDirectory() as folder:
        hide_progress_bars()
        torch.manual_seed(0)
        LlamaForCausalLM(shape.config()).save_pretrained(folder)
        for dtype in [args.dtype] if args.dtype else ["float32", "bfloat16"]:
            results[dtype] = race(Path(folder), dtype, shape, args.rounds, args.threads)
            show(dtype, shape, results[dtype], {} if args.toy else TARGETS[dtype])
    results["load_average_after"] = os.getloadavg()
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
