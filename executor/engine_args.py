"""The engine's arguments in Python, named as in vLLM, and what they mean for the parts of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass

from servetwin.sim.config import EngineConfig, ExecutorOptions, ModelConfig, SpeculativeConfig
from servetwin.sim.engine_options import (
    EngineOptions,
    read_speculative_config,
    resolve_async_scheduling,
    why_synchronous,
)


@checked_dataclass(frozen=True, kw_only=True)
class EngineArgs(EngineOptions):
    """Arguments of `LLM` and `LLMEngine.from_engine_args`. One that is not here raises TypeError with its name."""

    tokenizer: Path | str | None = None
    """Folder of the tokenizer (default: the model's)."""
    skip_tokenizer_init: bool = False
    """Work with token ids only."""
    max_logprobs: Annotated[int, Field(ge=-1)] = 20
    """Most log probabilities that a request may ask for; -1: no limit."""

    def __post_init__(self) -> None:
        if self.model is None:
            raise ValueError("model is missing: give a local Hugging Face folder")

    def speculative(self) -> SpeculativeConfig | None:
        """Who drafts. Raises ValueError for a drafter that the executor has not got."""
        try:
            config = read_speculative_config(self.speculative_config).config
        except ValueError as e:
            raise ValueError(f"speculative_config {e}") from e
        if config is not None and config.method != "ngram":
            raise ValueError(
                f"speculative_config: method {config.method} needs a model that drafts; allowed: ngram"
            )
        return config

    def for_executor(self) -> ExecutorOptions:
        """What the executor is built from. Raises ValueError."""
        return self.executor_options(speculative=self.speculative())

    def for_engine(self, model: ModelConfig, num_gpu_blocks: int) -> EngineConfig:
        """The engine's configuration, once model and memory are known. Raises ValueError."""
        speculative = self.speculative()
        asynchronous = resolve_async_scheduling(self.async_scheduling, why_synchronous(speculative))
        return self.engine_config(model, num_gpu_blocks, speculative, asynchronous=asynchronous)
