"""Decode steps from captured graphs against the same steps run eagerly: logits of random batches over a random cache.

Contexts are of every order of magnitude: one wrong token of the cache shows among few, and those of another request
among many. Batches are as large as a captured size and, most of them between two sizes, one request smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gpu_checks.models import BLOCK_SIZE, Served
from gpu_checks.session import Row, Session
from servetwin.executor.input_batch import InputBatch, build_warm_up_batch

MAX_CONTEXT, TOY_MAX_CONTEXT = 2048, 128
HUGE = 1e30
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 1e-1}
"""Of the largest logit of a row: rounding through all layers, in products that add in another order."""


def compare(session: Session, served: Served) -> Row:
    """The worst batch: its largest difference in a row of logits relative to the row's largest logit.

    `apart`: the smallest such difference between neighbouring requests, what a row of another request would differ by.
    """
    graphs = served.runner.decode_graphs
    if graphs is None:
        raise ValueError("nothing was captured")
    generator = session.generator(1)
    longest = TOY_MAX_CONTEXT if session.toy else MAX_CONTEXT
    limit = LIMITS[served.runner.loaded.kv_cache_spec.dtype]
    differences, apart = {}, []
    for num_reqs in compared_batches(graphs.sizes):
        batch = _random_batch(served, num_reqs, longest, generator)
        # First from the graph: what it fails to write of keys and values must not lie there already.
        replayed = _logits(served, batch)
        served.runner.decode_graphs = None
        try:
            eager = _logits(served, batch)
        finally:
            served.runner.decode_graphs = graphs
        differences[num_reqs] = _difference(replayed, eager).amax().item()
        if num_reqs > 1:
            apart.append(_difference(eager.roll(1, 0), eager).amin().item())
    worst = max(differences, key=lambda num_reqs: differences[num_reqs])
    return {
        "difference": differences[worst],
        "limit": limit,
        "ok": differences[worst] <= limit,
        "worst_batch": worst,
        "batches": list(differences),
        "apart": min(apart, default=None),
    }


def compared_batches(sizes: Sequence[int]) -> list[int]:
    """At the smallest, the largest and some other sizes, and one request below each of them."""
    chosen = {sizes[i] for i in (0, len(sizes) // 4, len(sizes) // 2, 3 * len(sizes) // 4, -1)}
    return sorted({batch for size in chosen for batch in (size - 1, size) if batch})


def _logits(served: Served, batch: InputBatch) -> Tensor:
    """A copy: the next forward pass overwrites them."""
    return served.runner.forward(batch).float().clone()


def _difference(actual: Tensor, expected: Tensor) -> Tensor:
    """[rows]; NaN on either side is a huge difference."""
    difference = (actual - expected).abs().nan_to_num(nan=HUGE, posinf=HUGE)
    return difference.amax(1) / expected.nan_to_num().abs().amax(1).clamp(min=1e-6)


def _random_batch(served: Served, num_reqs: int, longest: int, generator: torch.Generator) -> InputBatch:
    """Decode rows of random tokens and contexts, as many short as long ones; every block belongs to one request."""
    runner, device = served.runner, generator.device
    num_blocks = len(runner.kv_caches[0].key)
    width = min(longest // BLOCK_SIZE, (num_blocks - 1) // num_reqs)
    exponents = torch.rand(num_reqs, generator=generator, device=device)
    positions = (width * BLOCK_SIZE) ** exponents
    positions = positions.long().clamp(max=width * BLOCK_SIZE - 1)
    # Block 0 belongs to nobody.
    blocks = torch.randperm(num_blocks - 1, generator=generator, device=device)[: num_reqs * width] + 1
    table = blocks.view(num_reqs, width)
    last_blocks = table.gather(1, (positions // BLOCK_SIZE)[:, None])[:, 0]
    tokens = torch.randint(runner.loaded.vocab_size, (num_reqs,), generator=generator, device=device)
    return replace(
        build_warm_up_batch([1] * num_reqs, BLOCK_SIZE, device),
        input_ids=tokens,
        positions=positions,
        seq_lens=(positions + 1).int(),
        block_table=table.int(),
        slot_mapping=last_blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
    )
