"""The roofline step model against vLLM measured on H100: errors of mean TTFT and TPOT, queueing simulated.

    python benchmarks/roofline_h100.py [TABLE.csv] [--json FILE]

Every row of the table (`profiles/vllm_measured_h100.csv` of the reference data) is served as it was measured, as far as
the table says: a closed loop of `batch_size` requests in flight, of equal lengths, prefix caching off. It says neither
how many requests were sent nor the engine's limits. Assumed, for all rows alike:

- 10 requests for every place in flight, of which the first rounds are simulated (ROUND_WEIGHTS): a first one that
  begins all at once, others, and at the end one after which nobody comes. The client sends the next request at once.
- Tokens a step by the rule of the project that measured (aiconfigurator's generator: input length + batch size + 1,500,
  in whole blocks), seats as requests in flight.
- Synchronous scheduling and 0.9 of the memory, as that release has them; an empty precision is bf16; K and V are bf16.

Nothing is fitted per row, model or card. But the efficiencies, round figures, were chosen with an eye on the TPOT of
this table, so its errors are no held-out errors; those are in `tests/test_roofline.py` (two other cards).

Three rows (Qwen3-32B in fp8, 4,000 + 1,000 tokens) show a TTFT of hardly more than one prefill at 24 to 144 requests in
flight, which one engine cannot do; they look like the load of several replicas. They are in all figures. Where the
requests in flight outgrow the pool, TTFT is the wait for blocks and hangs on the pool's size, which the table does not
say; so the last columns give TTFT over the rows with room for all.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from servetwin.sim.cards import find_card
from servetwin.sim.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from servetwin.sim.kv_sizing import KVSettings, cache_on
from servetwin.sim.model_shape import ModelShape
from servetwin.sim.quantization import Quantization
from servetwin.sim.steptime.roofline import RooflineStepModel
from servetwin.sim.validation.replay import simulated
from servetwin.workloads import RequestSpec

TABLE = Path(os.environ.get("SERVETWIN_DATA", "../shared")) / "profiles" / "vllm_measured_h100.csv"
SHAPES = {
    "Qwen/Qwen3-32B": {
        "num_layers": 64, "hidden_size": 5120, "num_heads": 64, "num_kv_heads": 8, "head_dim": 128,
        "intermediate_size": 25600, "vocab_size": 151936,
    },
    "meta-llama/Llama-3.1-70B": {
        "num_layers": 80, "hidden_size": 8192, "num_heads": 64, "num_kv_heads": 8, "head_dim": 128,
        "intermediate_size": 28672, "vocab_size": 128256,
    },
}  # fmt: skip
"""The dimensions in the published config.json of the models that were measured."""
EXTRA_TOKENS, BLOCK_SIZE, GPU_MEMORY_UTILIZATION = 1500, 16, 0.9
ROUND_WEIGHTS = {512: (1, 1, 1, 6, 1), 1024: (1, 8, 1), 8192: (1, 9)}
"""Output tokens at most -> the rounds of ten that each simulated round stands for; long outputs dilute prefills."""


@dataclass(frozen=True)
class Row:
    """One measured row."""

    model: str
    precision: str
    isl: int
    osl: int
    batch_size: int
    tp: int
    ttft_ms: float
    tpot_ms: float

    @property
    def round_weights(self) -> tuple[int, ...]:
        return next(weights for most, weights in ROUND_WEIGHTS.items() if self.osl <= most)

    @property
    def max_num_batched_tokens(self) -> int:
        return -(-(self.isl + self.batch_size + EXTRA_TOKENS) // BLOCK_SIZE) * BLOCK_SIZE

    @property
    def shape(self) -> ModelShape:
        quantization = Quantization("fp8", 8, fp8_matmul=True) if self.precision == "fp8" else None
        return ModelShape(name=self.model, quantization=quantization, **SHAPES[self.model])  # type: ignore[arg-type]


@dataclass(frozen=True)
class Result:
    """A row with what was simulated for it."""

    row: Row
    ttft_ms: float
    tpot_ms: float

    @property
    def ttft_error(self) -> float:
        return self.ttft_ms / self.row.ttft_ms - 1

    @property
    def waits_for_blocks(self) -> bool:
        """All places in flight at their longest do not fit into the pool."""
        row, cache = self.row, _engine(self.row).cache
        return row.batch_size * (row.isl + row.osl) > cache.usable_blocks * cache.block_size

    @property
    def tpot_error(self) -> float:
        return self.tpot_ms / self.row.tpot_ms - 1


def read_rows(path: Path) -> list[Row]:
    """All rows of the table."""
    with path.open(newline="") as file:
        return [
            Row(
                model=r["model_path"],
                precision=r["precision"] or "bf16",
                isl=int(r["isl"]),
                osl=int(r["osl"]),
                batch_size=int(r["batch_size"]),
                tp=int(r["tp_size"]),
                ttft_ms=float(r["silicon_ttft_ms"]),
                tpot_ms=float(r["silicon_tpot_ms"]),
            )
            for r in csv.DictReader(file)
        ]


def predict(row: Row) -> Result:
    """The row's closed loop, simulated."""
    engine = _engine(row)
    requests = [
        RequestSpec(request_id=f"r{i}", arrival_s=0.0, prompt_tokens=row.isl, output_tokens=row.osl)
        for i in range(len(row.round_weights) * row.batch_size)
    ]
    model = RooflineStepModel(row.shape, find_card("H100"), tensor_parallel_size=row.tp)
    return _means(row, simulated(requests, engine, model, max_concurrency=row.batch_size).requests)


def _means(row: Row, requests: pd.DataFrame) -> Result:
    """Over all rounds; TTFT from the sending, TPOT after the first token."""
    weights = np.array(row.round_weights)[requests.request_id.str[1:].astype(int) // row.batch_size]
    ttft_s = np.average(requests.first_token_s - requests.sent_s, weights=weights)
    tpot_s = np.average((requests.last_token_s - requests.first_token_s) / (row.osl - 1), weights=weights)
    return Result(row, float(ttft_s) * 1e3, float(tpot_s) * 1e3)


def _engine(row: Row) -> EngineConfig:
    settings = KVSettings(
        max_num_batched_tokens=row.max_num_batched_tokens,
        max_num_seqs=row.batch_size,
        tensor_parallel_size=row.tp,
        gpu_memory_utilization=GPU_MEMORY_UTILIZATION,
        graphs=False,
    )
    return EngineConfig(
        model=ModelConfig(max_model_len=row.isl + row.osl, vocab_size=row.shape.vocab_size),
        cache=CacheConfig(
            num_gpu_blocks=cache_on(row.shape, find_card("H100"), settings).num_gpu_blocks,
            enable_prefix_caching=False,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=row.batch_size, max_num_batched_tokens=row.max_num_batched_tokens
        ),
    )


def groups(results: Iterable[Result]) -> list[dict[str, object]]:
    """Errors by model, precision and tensor-parallel size, and over all rows."""
    kinds: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        row = result.row
        for key in ((row.model, row.precision, str(row.tp)), ("all", "", "")):
            kinds.setdefault(key, []).append(result)
    return [_errors(key, kinds[key]) for key in sorted(kinds, key=lambda k: (k[0] == "all", k))]


def _errors(key: tuple[str, str, str], found: Sequence[Result]) -> dict[str, object]:
    ttft, tpot = [r.ttft_error for r in found], [r.tpot_error for r in found]
    roomy = [r.ttft_error for r in found if not r.waits_for_blocks]
    return {
        "model": key[0],
        "precision": key[1],
        "tp": key[2],
        "rows": len(found),
        "tpot_mape_percent": _percent(map(abs, tpot)),
        "tpot_bias_percent": _percent(tpot),
        "ttft_mape_percent": _percent(map(abs, ttft)),
        "ttft_bias_percent": _percent(ttft),
        "roomy_rows": len(roomy),
        "roomy_ttft_mape_percent": _percent(map(abs, roomy)),
    }


def _percent(errors: Iterable[float]) -> float:
    return round(100 * statistics.fmean(errors), 1)


def table(rows: Sequence[dict[str, object]]) -> str:
    """As text, a group a line; MAPE and bias in %."""
    head = (
        f"{'model':<26}{'precision':<11}{'TP':>3}{'rows':>6}{'TPOT MAPE':>11}{'bias':>8}{'TTFT MAPE':>11}{'bias':>8}"
        f"{'room: rows':>12}{'TTFT MAPE':>11}"
    )
    return "\n".join([head, *map(_line, rows)])


def _line(r: dict[str, object]) -> str:
    return (
        f"{r['model']!s:<26}{r['precision']!s:<11}{r['tp']!s:>3}{r['rows']!s:>6}{r['tpot_mape_percent']:>11}"
        f"{r['tpot_bias_percent']:>+8}{r['ttft_mape_percent']:>11}{r['ttft_bias_percent']:>+8}"
        f"{r['roomy_rows']:>12}{r['roomy_ttft_mape_percent']:>11}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", nargs="?", type=Path, default=TABLE)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = []
    rows = read_rows(arguments.table)
    for i, row in enumerate(rows, start=1):
        results.append(predict(row))
        print(f"{i} of {len(rows)} rows", end="\r", file=sys.stderr)
    found = groups(results)
    print(table(found))
    if arguments.json is not None:
        told = [
            asdict(r.row)
            | {"simulated_ttft_ms": round(r.ttft_ms, 2), "simulated_tpot_ms": round(r.tpot_ms, 3)}
            for r in results
        ]
        text = json.dumps({"errors": found, "rows": told}, indent=1)
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
