"""`servetwin execute`: recorded plans on the executor, without any scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from servetwin.sim.commands.flag_kinds import whole_number


def execute(
    plans: Annotated[Path, Parameter(help="plans.jsonl.zst of a run, or the run folder that holds it.")],
    /,
    *,
    model: Annotated[Path, Parameter(help="Local Hugging Face folder.")],
    out: Annotated[Path, Parameter(help="Folder to write the measured steps (and tokens) to.")],
    overwrite: Annotated[
        bool, Parameter(negative=(), help="Replace the run in the folder of --out.")
    ] = False,
    save_tokens: Annotated[
        bool, Parameter(negative=(), help="Write tokens/: every output token with its time.")
    ] = False,
    executor: Annotated[str, Parameter(help="torch, or module:attribute.")] = "torch",
    load_format: Annotated[
        Literal["auto", "dummy"],
        Parameter(help="dummy: random weights for the configuration in the model folder."),
    ] = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Parameter(help="auto: as in the recorded run, else the model's."),
    ] = "auto",
    block_size: Annotated[
        int | None,
        Parameter(converter=whole_number, help="Tokens per KV block (default: the recorded run's)."),
    ] = None,
    num_gpu_blocks_override: Annotated[
        int | None,
        Parameter(converter=whole_number, help="Blocks in the pool (default: the recorded run's)."),
    ] = None,
    max_model_len: Annotated[
        int | None,
        Parameter(
            converter=whole_number, help="Longest prompt + output, in tokens (default: the recorded run's)."
        ),
    ] = None,
    threads: Annotated[
        int | None,
        Parameter(
            converter=whole_number,
            help="CPU threads that torch computes with (default: one per physical core that the process may use; fewer "
            "if OMP_NUM_THREADS says so).",
        ),
    ] = None,
    seed: Annotated[
        int, Parameter(converter=whole_number, help="Seed of random weights (--load-format dummy).")
    ] = 0,
    json: Annotated[bool, Parameter(negative=(), help="Print the totals as one JSON object.")] = False,
) -> int:
    """Run recorded plans on the executor, without any scheduler.

    Limits that are not given are read from the run.json beside the plans. Times in the written tables follow one
    another without gaps: only the executor's own time passes.
    """
    from servetwin.sim.commands.executing import ExecuteRequest, carry_out

    return carry_out(
        ExecuteRequest(
            plans=plans,
            model=model,
            out=out,
            overwrite=overwrite,
            save_tokens=save_tokens,
            executor=executor,
            load_format=load_format,
            dtype=dtype,
            block_size=block_size,
            num_gpu_blocks=num_gpu_blocks_override,
            max_model_len=max_model_len,
            threads=threads,
            seed=seed,
            json=json,
        )
    )
