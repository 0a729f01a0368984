"""The made-up datasets of `vllm bench serve`: `random` and `prefix_repetition`, by lengths and shared prefixes.

Parameters have vLLM's names and defaults. Source: vllm/benchmarks/datasets, RandomDataset and
PrefixRepetitionRandomDataset.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from servetwin.workloads.checks import check_between, check_count
from servetwin.workloads.lengths import Uniform
from servetwin.workloads.prompts import Columns, Prompts
from servetwin.workloads.spec import ArgumentError
from servetwin.workloads.streams import stream


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomDataset:
    """`--dataset-name random`: lengths uniform around a mean, after one random prefix that all prompts share.

    With L the input length less the special tokens, a prompt is prefix_len and a whole number of
    [floor(L (1 - r)), ceil(L (1 + r))] tokens (in floating point, as vLLM has it: 100 and 0.1 reach to 111), and the
    special tokens that the server adds again.
    """

    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    """r, 0 up to but not 1."""
    prefix_len: int = 0
    """On top of the input length."""
    num_special_tokens: int = 0
    """What the tokenizer adds to a prompt."""

    def __post_init__(self) -> None:
        check_count("input_len", self.input_len)
        check_count("output_len", self.output_len)
        check_between("range_ratio", self.range_ratio, 0, math.nextafter(1, 0), " (and not 1)")
        check_count("prefix_len", self.prefix_len, at_least=0)
        check_count("num_special_tokens", self.num_special_tokens, at_least=0)
        if self.prefix_len + self._input_range()[0] < 1:
            raise ArgumentError(
                "input_len",
                f"{self.input_len}: must be more, since with a range ratio of {self.range_ratio} and "
                f"{self.num_special_tokens} special tokens a prompt without prefix may be empty",
            )

    def _input_range(self) -> tuple[int, int]:
        return self._around(max(self.input_len - self.num_special_tokens, 0))

    def _around(self, mean: int) -> tuple[int, int]:
        return math.floor(mean * (1 - self.range_ratio)), math.ceil(mean * (1 + self.range_ratio))

    def draw(self, n: int, seed: int) -> Prompts:
        """`n` requests, from the streams `input_lengths` and `output_lengths` of the root `seed`."""
        low, high = self._input_range()
        shortest_output, longest_output = (max(tokens, 1) for tokens in self._around(self.output_len))
        # An input may have no tokens of its own, which lengths may not: shifted by one.
        own = Uniform(min_tokens=low + 1, max_tokens=high + 1).sample(n, stream(seed, "input_lengths")) - 1
        outputs = Uniform(min_tokens=shortest_output, max_tokens=longest_output)
        columns: dict[str, Any] = {
            "prompt_tokens": self.prefix_len + own + self.num_special_tokens,
            "output_tokens": outputs.sample(n, stream(seed, "output_lengths")),
        }
        if self.prefix_len:
            # One id for the whole prefix: an id is a run of tokens of any length.
            columns["prefix_ids"] = [(0,)] * n
            columns["prefix_block_tokens"] = np.full(n, self.prefix_len)
        return Prompts(columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRepetitionDataset:
    """`--dataset-name prefix_repetition`: the same number of prompts after each of several prefixes, shuffled.

    n // num_prefixes prompts per prefix: the remainder is dropped, as vLLM does, and `notes` says how many. The shuffle
    is one of all n, so a longer draw does not begin with a shorter one.
    """

    num_prefixes: int = 10
    prefix_len: int = 256
    suffix_len: int = 256
    output_len: int = 128

    def __post_init__(self) -> None:
        for name in ("num_prefixes", "prefix_len", "suffix_len", "output_len"):
            check_count(name, getattr(self, name))

    def draw(self, n: int, seed: int) -> Prompts:
        """n - n % num_prefixes requests, shuffled by the stream `prefixes` of the root `seed`."""
        per_prefix, dropped = divmod(n, self.num_prefixes)
        if per_prefix == 0:
            raise ArgumentError("n", f"{n}: must be {self.num_prefixes}, the number of prefixes, or more")
        prefixes = np.repeat(np.arange(self.num_prefixes), per_prefix)
        stream(seed, "prefixes").shuffle(prefixes)
        kept = len(prefixes)
        columns: Columns = {
            "prompt_tokens": np.full(kept, self.prefix_len + self.suffix_len),
            "output_tokens": np.full(kept, self.output_len),
            "prefix_ids": [(prefix,) for prefix in prefixes.tolist()],
            "prefix_block_tokens": np.full(kept, self.prefix_len),
        }
        if not dropped:
            return Prompts(columns)
        note = (
            f"prefix_repetition: {kept} of {n} requests; {dropped} dropped, as vLLM does, "
            f"to have {per_prefix} for each of {self.num_prefixes} prefixes"
        )
        return Prompts(columns, (note,))
