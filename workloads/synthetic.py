"""Made-up workloads: an arrival process and a model of prompts put together."""

from __future__ import annotations

from typing import Any

import numpy as np

from servetwin.workloads.arrivals import Arrivals, FloatArray, send_times_s
from servetwin.workloads.checks import check_requests
from servetwin.workloads.columns import RequestColumns, column_array
from servetwin.workloads.joint_lengths import Independent, JointLengths
from servetwin.workloads.lengths import Lengths
from servetwin.workloads.prompts import LengthsAndPrefixes, Prefixes, PromptModel, Prompts
from servetwin.workloads.spec import MAX_TOKENS, ListWorkload, WorkloadError


class Synthetic(ListWorkload):
    """`n` requests whose arrivals are independent of what they ask.

    What they ask comes from a model of prompts (`prompts`), or of lengths and prefixes: `lengths` of input and output
    together, or `input_lengths` and `output_lengths` of either, and optionally `prefixes`.

    `seed` is the root of one random stream per use (`arrivals`, `input_lengths`, `output_lengths`, `lengths`,
    `prefixes`): changing one part leaves the draws of the others alone. An arrival process that has its own
    seed keeps it. A longer workload begins with the shorter one unless a part says otherwise.
    """

    def __init__(
        self,
        *,
        arrivals: Arrivals,
        n: int,
        input_lengths: Lengths | None = None,
        output_lengths: Lengths | None = None,
        lengths: JointLengths | None = None,
        prefixes: Prefixes | None = None,
        prompts: PromptModel | None = None,
        seed: int = 0,
    ) -> None:
        """Input lengths are prompt tokens without the system prompt. A bad number raises WorkloadError."""
        check_requests("n", n)
        parts: dict[str, Any] = {"prompts": prompts, "lengths": lengths, "prefixes": prefixes}
        parts |= {"input_lengths": input_lengths, "output_lengths": output_lengths}
        drawn = _prompt_model(parts).draw(n, seed)
        times_s = send_times_s(arrivals, len(drawn), seed)
        about: dict[str, Any] = {
            "format": "synthetic",
            "requests": len(drawn),
            "seed": seed,
            "arrivals": repr(arrivals),
        }
        about |= {name: repr(part) for name, part in parts.items() if part is not None}
        if drawn.notes:
            about["notes"] = list(drawn.notes)
        super().__init__(_requests(times_s, drawn), about)


def _prompt_model(parts: dict[str, Any]) -> PromptModel:
    """The one model that the given parts make."""
    given = {name for name, part in parts.items() if part is not None}
    if given == {"prompts"}:
        model: PromptModel = parts["prompts"]
        return model
    if given - {"prefixes"} == {"lengths"}:
        return LengthsAndPrefixes(lengths=parts["lengths"], prefixes=parts["prefixes"])
    if given - {"prefixes"} == {"input_lengths", "output_lengths"}:
        lengths = Independent(input_lengths=parts["input_lengths"], output_lengths=parts["output_lengths"])
        return LengthsAndPrefixes(lengths=lengths, prefixes=parts["prefixes"])
    raise WorkloadError(
        f"{', '.join(sorted(given)) or 'no prompts and no lengths'}: must be either prompts, or lengths, or both "
        f"input_lengths and output_lengths; prefixes go with lengths only"
    )


def _requests(times_s: FloatArray, drawn: Prompts) -> RequestColumns:
    import pyarrow as pa

    prompt_tokens = np.asarray(drawn.columns["prompt_tokens"])
    # What a RequestSpec would refuse one by one.
    if prompt_tokens.max() > MAX_TOKENS:
        raise WorkloadError(f"prompt_tokens {prompt_tokens.max()}: must be at most {MAX_TOKENS:,}")
    columns = {
        "request_id": [f"req-{i:06d}" for i in range(len(drawn))],
        "arrival_s": times_s,
        **drawn.columns,
    }
    return RequestColumns(pa.table({name: column_array(name, values) for name, values in columns.items()}))
