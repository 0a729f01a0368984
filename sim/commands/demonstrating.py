"""What `servetwin demo` does: prepare the model, run the shipped workload, read one answer aloud."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from servetwin.sim.commands.flags import EngineFlags, LoadFlags, RunFlags, SamplingFlags
from servetwin.sim.commands.loading import Load
from servetwin.sim.commands.running import RunRequest, show
from servetwin.sim.commands.running import carry_out as run
from servetwin.sim.commands.show import command_name, say
from servetwin.sim.commands.trace_flags import TraceFlags
from servetwin.sim.plugins import load
from servetwin.sim.runs import HEADER, Run, read_run
from servetwin.workloads import read_trace

CONVERT = "servetwin.executor.glassllm:convert"
LOAD_TOKENIZER = "servetwin.executor.tokenizer:load_tokenizer"

USABLE_BLOCKS = 123
"""Fewer blocks of 8 tokens than the requests of a burst would like to have."""


@dataclass(frozen=True)
class DemoRequest:
    """One command line of `demo`, as typed."""

    out: Path
    models: Path
    temperature: float
    seed: int


def carry_out(request: DemoRequest) -> int:
    """Runs it and returns the exit code."""
    say(f"model: glassllm en (852,608 parameters, float32) in {request.models}")
    model = load("servetwin.executors", CONVERT)(request.models / "glassllm-en")
    with as_file(files("servetwin.workloads") / "data" / "demo.jsonl") as workload:
        code = run(
            RunRequest(
                Load(str(workload), LoadFlags(ignore_eos=False), TraceFlags()),
                RunFlags(
                    executor="torch",
                    out=request.out,
                    overwrite=(request.out / HEADER).is_file(),
                    save_tokens=True,
                    seed=request.seed,
                ),
                EngineFlags(
                    model=model,
                    dtype="float32",
                    block_size=8,
                    num_gpu_blocks_override=USABLE_BLOCKS + 1,
                    max_num_seqs=24,
                    max_num_batched_tokens=256,
                ),
                SamplingFlags(temperature=request.temperature, top_p=0.95),
                quiet=True,
            )
        )
        prompts = {r.request_id: r.prompt_token_ids or () for r in read_trace(workload)}
    if code == 0:
        _show(read_run(request.out), prompts, load("servetwin.executors", LOAD_TOKENIZER)(model))
    return code


def _show(run: Run, prompts: dict[str, tuple[int, ...]], tokenizer: Any) -> None:
    """The results, one generated text, and where to go from here."""
    show(run.summary)
    request = _most_eventful(run)
    tokens = run.tokens
    answer = tokens[tokens.request_id == request.request_id].sort_values("index").token_id.tolist()
    prompt = [*prompts[request.request_id]]
    told = tokenizer.decode(prompt)
    text = Text.assemble((told, "dim"), (tokenizer.decode(prompt + answer)[len(told) :], "bold"))
    title = (
        f"{request.request_id}: {request.num_prompt_tokens} + {request.num_output_tokens} tokens, "
        f"{request.cached_tokens} from the prefix cache, {request.preemptions} preemptions"
    )
    console = Console()
    console.print(Panel(text, title=title, title_align="left"))
    console.print(f"run folder   {run.path}", soft_wrap=True)
    console.print(f"dashboard    {command_name()} dash {run.path}", soft_wrap=True)


def _most_eventful(run: Run) -> Any:
    """The finished request with the most preemptions, then the most prefix hits: its text survived them all."""
    done = run.requests[run.requests.finish_reason.isin(("length", "stop"))]
    order = ["preemptions", "cached_tokens", "num_output_tokens"]
    return done.sort_values(order, ascending=False, kind="stable").iloc[0]
