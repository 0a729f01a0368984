"""Small made-up folders of per-kernel tables, from formulas that a test can work out itself."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

CHUNKS, HISTORIES, ROWS, CONTEXTS = (16, 64, 256), (0, 64, 512), (1, 4, 16), (16, 128, 1024)
TOKENS = (*range(1, 17), *range(32, 513, 16))
LAYER = ("qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj", "layernorm")


def attention_us(chunk: float, history: float, rows: float, context: float) -> float:
    """A made-up card: a launch, the pairs of a chunk, and the KV that decode rows read; more when they share a call."""
    together = 2.0 if chunk and rows else 0.0
    return (
        8 + together + 1e-3 * chunk * (history + chunk / 2) + 5e-3 * (history + chunk) + 4e-3 * rows * context
    )


def dense_us(tokens: int) -> float:
    """Tiles of 64 tokens, each computed whole."""
    return 40.0 + 10.0 * -(-tokens // 64)


def attention_rows() -> Iterable[tuple[int, int, int, int, float]]:
    decode = [(0, 0, n, k) for n, k in product(ROWS, CONTEXTS)]
    prefill = [(c, h, 0, 0) for c, h in product(CHUNKS, HISTORIES)]
    mixed = list(product(CHUNKS, HISTORIES, ROWS, CONTEXTS))
    return [(*point, attention_us(*point)) for point in (*decode, *prefill, *mixed)]


def write_csv(path: Path, header: str, rows: Iterable[Iterable[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header.split(","))
        writer.writerows(rows)


def write_tables(folder: Path) -> Path:
    """A folder of LLMServingSim's layout; what it holds says that it is made up."""
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(
        folder / "attention.csv", "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us", attention_rows()
    )
    dense = [(layer, t, dense_us(t)) for layer in LAYER for t in TOKENS]
    once = [(layer, t, 2.0 + t / 100) for layer in ("embedding", "final_layernorm") for t in TOKENS]
    write_csv(folder / "dense.csv", "layer,tokens,time_us", [*dense, *once])
    heads = [(layer, n, 100.0 + n) for layer in ("lm_head", "sampler") for n in (1, 2, 4, 8, 16, 32)]
    write_csv(folder / "per_sequence.csv", "layer,sequences,time_us", heads)
    (folder / "meta.yaml").write_text("gpu: made up\nmodel: made up\n", encoding="utf-8")
    return folder


def write_skew(folder: Path, alpha: float = 0.25) -> None:
    """Unequal rows cost this part of the way from the mean to the longest."""
    rows: list[tuple[object, ...]] = [(n, 1 / n, pc, alpha) for n in (8, 16) for pc in (0, 64)]
    rows.append((8, 1 / 8, 0, "nan"))
    write_csv(folder / "skew.csv", "n,ratio,pc,alpha", rows)


def write_model(folder: Path, **changes: Any) -> Path:
    """The configuration of a small made-up Llama."""
    import json

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    return folder
