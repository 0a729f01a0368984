"""Made-up workloads: arrivals, lengths and shared prefixes put together."""

from __future__ import annotations

from typing import NamedTuple

from servetwin.workloads.arrivals import Arrivals
from servetwin.workloads.checks import check_count
from servetwin.workloads.lengths import Lengths
from servetwin.workloads.prefixes import SystemPrompts
from servetwin.workloads.spec import ListWorkload, RequestSpec
from servetwin.workloads.streams import stream


class Synthetic(ListWorkload):
    """`n` requests whose arrivals, input, output and system prompt are independent of each other.

    `seed` is the root of one random stream per use (`arrivals`, `input_lengths`, `output_lengths`,
    `prefixes`): changing one part leaves the draws of the others alone, and a longer workload begins with the
    shorter one. An arrival process that has its own seed keeps it.
    """

    def __init__(
        self,
        *,
        arrivals: Arrivals,
        input_lengths: Lengths,
        output_lengths: Lengths,
        n: int,
        prefixes: SystemPrompts | None = None,
        seed: int = 0,
    ) -> None:
        """`input_lengths` are prompt tokens without the system prompt. A bad number raises WorkloadError."""
        check_count("n", n)
        times_s = arrivals.times_s(n, stream(seed, "arrivals")).tolist()
        inputs = input_lengths.sample(n, stream(seed, "input_lengths")).tolist()
        outputs = output_lengths.sample(n, stream(seed, "output_lengths")).tolist()
        heads = _heads(prefixes, n, seed)
        requests = [
            RequestSpec(
                request_id=f"req-{i:06d}",
                arrival_s=times_s[i],
                prompt_tokens=heads[i].tokens + inputs[i],
                output_tokens=outputs[i],
                prefix_ids=heads[i].ids,
                prefix_block_tokens=heads[i].block_tokens,
            )
            for i in range(n)
        ]
        about = {
            "format": "synthetic",
            "requests": n,
            "seed": seed,
            "arrivals": repr(arrivals),
            "input_lengths": repr(input_lengths),
            "output_lengths": repr(output_lengths),
            "prefixes": repr(prefixes),
        }
        super().__init__(requests, about)


class _Head(NamedTuple):
    """The shared part of a prompt."""

    tokens: int = 0
    ids: tuple[int, ...] | None = None
    block_tokens: int | None = None


def _heads(prefixes: SystemPrompts | None, n: int, seed: int) -> list[_Head]:
    if prefixes is None:
        return [_Head()] * n
    kinds = [
        _Head(prefixes.tokens, prefixes.prefix_ids(i), prefixes.block_tokens)
        for i in range(len(prefixes.weights))
    ]
    return [kinds[i] for i in prefixes.sample(n, stream(seed, "prefixes")).tolist()]
