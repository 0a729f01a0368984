"""Turns the small trained model of the package glassllm into a Hugging Face folder.

`python -m servetwin.executor.glassllm OUT [--language en|pt]`. The model (852,608 parameters, trained on up
to 128 positions) is a Llama in all but layout: its matrices act from the right, and its rotary pairs are
neighbours (0, 1), (2, 3), ... where Llama pairs the halves of a head (0, d/2), (1, d/2 + 1), ...
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import glassllm
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from transformers import LlamaConfig

from servetwin.executor.converted_folder import write_folder
from servetwin.executor.rope import halves_from_neighbours

FloatArray = npt.NDArray[np.float32]
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
SPACE_MARK = "▁"
UNKNOWN_TEXT = "⁇"


def convert(out: Path, language: str = "en") -> Path:
    """Writes the folder `out` and gives it back; a complete one is reused as it is.

    Nothing is visible at `out` before everything is written. Raises ValueError for an unknown language and
    for an `out` that exists and is something else.
    """
    if language not in glassllm.LANGUAGES:
        raise ValueError(f"language must be one of {', '.join(sorted(glassllm.LANGUAGES))}, got {language!r}")
    return write_folder(out, FILES, lambda folder: _write(folder, language))


def _write(folder: Path, language: str) -> None:
    model, tokenizer = glassllm.load_pretrained(language)
    llama_config(model.cfg).save_pretrained(folder)
    save_file(llama_weights(model), folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder, tokenizer)


# ---------------------------------------------------------------- model


def llama_config(cfg: glassllm.Config) -> LlamaConfig:
    """The same model in Llama's terms. Special tokens: pad 0, unknown 1, begin 2, end 3."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=cfg.vocab_size,
        hidden_size=cfg.d_model,
        intermediate_size=int(8 * cfg.d_model / 3),
        num_hidden_layers=cfg.n_layers,
        num_attention_heads=cfg.n_heads,
        num_key_value_heads=cfg.n_kv_heads,
        max_position_embeddings=cfg.max_len,
        rms_norm_eps=cfg.eps,
        rope_parameters={"rope_type": "default", "rope_theta": cfg.rope_base},
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
        dtype="float32",
    )


def llama_weights(model: glassllm.GlassLM) -> dict[str, FloatArray]:
    """Llama's names -> float32 weights, `[out, in]`; the head is tied to the embedding and left out."""
    weights = {"model.embed_tokens.weight": model.E.data, "model.norm.weight": model.norm_f.gamma.data}
    for index, block in enumerate(model.blocks):
        for name, weight in _layer_weights(block, model.cfg).items():
            weights[f"model.layers.{index}.{name}.weight"] = weight
    return {name: np.ascontiguousarray(weight, dtype=np.float32) for name, weight in weights.items()}


def _layer_weights(block: Any, cfg: glassllm.Config) -> dict[str, FloatArray]:
    attention, mlp = block.attn, block.ffn
    return {
        "input_layernorm": block.norm1.gamma.data,
        "self_attn.q_proj": halves_from_neighbours(attention.W_Q.data.T, cfg.n_heads),
        "self_attn.k_proj": halves_from_neighbours(attention.W_K.data.T, cfg.n_kv_heads),
        "self_attn.v_proj": attention.W_V.data.T,
        "self_attn.o_proj": attention.W_O.data.T,
        "post_attention_layernorm": block.norm2.gamma.data,
        "mlp.gate_proj": mlp.W1.data.T,
        "mlp.up_proj": mlp.W3.data.T,
        "mlp.down_proj": mlp.W2.data.T,
    }


# ---------------------------------------------------------------- tokenizer


def write_tokenizer(folder: Path, tokenizer: glassllm.Tokenizer) -> None:
    """The package's tokenizer in the form of `tokenizers`, with equal encoding and decoding.

    No special token is declared to transformers: declared ones would be recognised inside a text, which the
    package does not do. Decoding leaves pad, begin and end out by itself.
    """
    fast_tokenizer(tokenizer).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def fast_tokenizer(tokenizer: glassllm.Tokenizer) -> FastTokenizer:
    """Byte-pair encoding of characters: NFC, spaces as marks, merges within chunks of word or line."""
    fast = FastTokenizer(
        models.BPE(vocab=dict(tokenizer.token_to_id), merges=list(tokenizer.merges), unk_token="<unk>")
    )
    fast.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", SPACE_MARK)])
    chunk = Regex(rf"\n|{SPACE_MARK}*[^{SPACE_MARK}\n]+|{SPACE_MARK}+")
    fast.pre_tokenizer = pre_tokenizers.Split(chunk, behavior="isolated")
    silent = [decoders.Replace(token, "") for token in ("<pad>", "<bos>", "<eos>")]
    fast.decoder = decoders.Sequence(
        [*silent, decoders.Replace("<unk>", UNKNOWN_TEXT), decoders.Replace(SPACE_MARK, " "), decoders.Fuse()]
    )
    return fast


def main(arguments: list[str] | None = None) -> int:
    """The command line; 0 when the folder is there, 1 with one line on stderr when not (2: wrong usage)."""
    parser = argparse.ArgumentParser(
        prog="python -m servetwin.executor.glassllm",
        description="Convert the trained model of the package glassllm into a Hugging Face folder.",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; a complete one is reused")
    parser.add_argument("--language", choices=sorted(glassllm.LANGUAGES), default="en", help="default: en")
    options = parser.parse_args(arguments)
    try:
        folder = convert(options.out, options.language)
    except (ValueError, OSError) as e:
        sys.stderr.write(f"error: {e}\n")
        return 1
    sys.stdout.write(f"{folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
