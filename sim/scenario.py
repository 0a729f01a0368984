"""Scenarios: small, fully determined inputs for the scheduler, and the functions that make their tokens.

Every token is a CRC-32 of an ASCII text, so any implementation in any language can produce the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, Self
from zlib import crc32

from pydantic import Field, ValidationError, model_validator

from servetwin.sim.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    explain,
)
from servetwin.sim.config_base import Config, NotNegative, Positive
from servetwin.sim.rules import Rules
from servetwin.workloads.spec import MAX_TOKEN_ID


class ScenarioError(ValueError):
    """A scenario that cannot be run; the message names the file, the field, the value and what is allowed."""


Name = Annotated[str, Field(pattern=r"^[ -~]+$")]
"""Printable ASCII: tokens are made from the bytes of names."""
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
Segment = tuple[Literal["p", "o"], Name, NotNegative, NotNegative]


class ScenarioDrafting(Config):
    """The drafter of a scenario and how often it is right."""

    method: Literal["ngram", "eagle", "draft_model"]
    num_speculative_tokens: Positive
    accept_percent: Annotated[int, Field(ge=0, le=100)] = 100
    """Share of drafts that equal the token they guess."""
    variable_length: bool = False
    """Draft between 0 and num_speculative_tokens tokens."""


class ScenarioConfig(Config):
    """The engine of a scenario. Defaults are the format's, not the command line's."""

    max_num_seqs: Positive = 16
    max_num_batched_tokens: Positive = 256
    max_num_scheduled_tokens: NotNegative | None = None
    block_size: Positive = 16
    num_gpu_blocks: Annotated[int, Field(ge=2)] = 1000
    max_model_len: Positive = 512
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    long_prefill_token_threshold: NotNegative = 0
    scheduler_reserve_full_isl: bool = True
    async_scheduling: bool = False
    use_v2_model_runner: bool = False
    spec: ScenarioDrafting | None = None


class ScenarioModel(Config):
    """The "model" whose tokens the scenario's requests produce."""

    seed: int
    vocab_size: Positive
    eos_token_id: int | None = None


class StepTime(Config):
    """Duration of a step in ns: base + per token + per scheduled request; an empty step takes `empty_ns`."""

    base_ns: NotNegative
    per_token_ns: NotNegative = 0
    per_req_ns: NotNegative = 0
    empty_ns: NotNegative = 0

    def duration_ns(self, num_tokens: int, num_requests: int) -> int:
        if num_tokens == 0:
            return self.empty_ns
        return self.base_ns + self.per_token_ns * num_tokens + self.per_req_ns * num_requests


class ScenarioRequest(Config):
    """One request of a scenario; times in steps or ns, as the scenario's time_mode says."""

    id: Name
    prompt_token_ids: tuple[TokenId, ...] | None = None
    prompt_segments: tuple[Segment, ...] | None = None
    max_tokens: Positive
    arrival_step: NotNegative | None = None
    arrival_ns: NotNegative | None = None
    abort_step: NotNegative | None = None
    abort_ns: NotNegative | None = None
    abort_phase: Literal["before", "during"] = "before"
    priority: int = 0
    min_tokens: NotNegative = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    out_key: Name | None = None

    @property
    def num_prompt_tokens(self) -> int:
        if self.prompt_token_ids is not None:
            return len(self.prompt_token_ids)
        return sum(segment[3] for segment in self.prompt_segments or ())

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.prompt_token_ids is None) == (self.prompt_segments is None):
            raise ValueError("give either prompt_token_ids or prompt_segments")
        if self.num_prompt_tokens == 0:
            raise ValueError("the prompt is empty")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")
        return self


class Scenario(Config):
    """A scenario file."""

    name: str = ""
    about: str = ""
    engine: str = ""
    config: ScenarioConfig = ScenarioConfig()
    model: ScenarioModel
    time_mode: Literal["step", "clock"] = "step"
    step_time: StepTime | None = None
    requests: tuple[ScenarioRequest, ...]

    @model_validator(mode="after")
    def _times(self) -> Self:
        clock = self.time_mode == "clock"
        if clock and self.step_time is None:
            raise ValueError("time_mode clock needs step_time")
        wanted, other = ("ns", "step") if clock else ("step", "ns")
        for request in self.requests:
            if getattr(request, f"arrival_{wanted}") is None:
                raise ValueError(
                    f"request {request.id!r}: arrival_{wanted} is missing (time_mode {self.time_mode})"
                )
            for field in (f"arrival_{other}", f"abort_{other}"):
                if getattr(request, field) is not None:
                    raise ValueError(
                        f"request {request.id!r}: {field} does not go with time_mode {self.time_mode}"
                    )
            # Said before a prompt of any length is made.
            if request.num_prompt_tokens >= self.config.max_model_len:
                raise ValueError(
                    f"request {request.id!r}: prompt of {request.num_prompt_tokens} tokens leaves no room for output: "
                    f"max_model_len is {self.config.max_model_len}"
                )
        ids = [r.id for r in self.requests]
        if len(set(ids)) != len(ids):
            raise ValueError(f"request id {next(i for i in ids if ids.count(i) > 1)!r} is used twice")
        return self

    def engine_config(self, rules: Rules) -> EngineConfig:
        """The configuration of the engine; raises pydantic's ValidationError when it can never run."""
        c = self.config
        return EngineConfig(
            model=ModelConfig(
                max_model_len=c.max_model_len,
                vocab_size=self.model.vocab_size,
                eos_token_id=self.model.eos_token_id,
            ),
            cache=CacheConfig(
                block_size=c.block_size,
                num_gpu_blocks=c.num_gpu_blocks,
                enable_prefix_caching=c.enable_prefix_caching,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=c.max_num_seqs,
                max_num_batched_tokens=c.max_num_batched_tokens,
                max_num_scheduled_tokens=c.max_num_scheduled_tokens,
                enable_chunked_prefill=c.enable_chunked_prefill,
                long_prefill_token_threshold=c.long_prefill_token_threshold,
                policy=c.policy,
                scheduler_reserve_full_isl=c.scheduler_reserve_full_isl,
                async_scheduling=c.async_scheduling,
                use_v2_model_runner=c.use_v2_model_runner,
            ),
            speculative=self._speculative(),
            rules=rules,
        )

    def _speculative(self) -> SpeculativeConfig | None:
        spec = self.config.spec
        if spec is None:
            return None
        return SpeculativeConfig(method=spec.method, num_speculative_tokens=spec.num_speculative_tokens)

    def prompt(self, request: ScenarioRequest) -> tuple[int, ...]:
        """The request's prompt tokens."""
        if request.prompt_token_ids is not None:
            return request.prompt_token_ids
        ids: list[int] = []
        for kind, key, start, length in request.prompt_segments or ():
            token = self.prompt_token if kind == "p" else self.output_token
            ids += [token(key, index) for index in range(start, start + length)]
        return tuple(ids)

    def prompt_token(self, stream: str, index: int) -> int:
        """Token `index` of a named prompt stream."""
        return _crc(f"p|{stream}|{index}") % self.model.vocab_size

    def output_token(self, out_key: str, index: int) -> int:
        """Output token `index` (0 = first generated)."""
        return _crc(f"o|{self.model.seed}|{out_key}|{index}") % self.model.vocab_size

    def drafts(self, out_key: str, num_outputs: int, at_most: int | None = None) -> list[int]:
        """What is drafted once `num_outputs` outputs are known; empty without speculative decoding."""
        spec = self.config.spec
        if spec is None:
            return []
        count = spec.num_speculative_tokens
        if spec.variable_length:
            count = _crc(f"n|{self.model.seed}|{out_key}|{num_outputs}") % (count + 1)
        if at_most is not None:
            count = min(count, at_most)
        return [self._draft(spec, out_key, num_outputs, i) for i in range(count)]

    def _draft(self, spec: ScenarioDrafting, out_key: str, num_outputs: int, index: int) -> int:
        token = self.output_token(out_key, num_outputs + index)
        right = _crc(f"a|{self.model.seed}|{out_key}|{num_outputs}|{index}") % 100 < spec.accept_percent
        return token if right else (token + 1) % self.model.vocab_size

    def verified(self, out_key: str, num_outputs: int, drafts: list[int]) -> list[int]:
        """The outputs of a step that verifies `drafts`: one more than there are right drafts in front."""
        tokens = [self.output_token(out_key, num_outputs)]
        for draft in drafts:
            if draft != tokens[-1]:
                break
            tokens.append(self.output_token(out_key, num_outputs + len(tokens)))
        return tokens


def list_crc(items: Iterable[object]) -> int:
    """Order-sensitive fingerprint of a list of ids."""
    return _crc(",".join(str(x) for x in items))


def _crc(text: str) -> int:
    return crc32(text.encode("ascii"))


def read_scenario(path: Path) -> Scenario:
    """Reads a scenario file. Raises ScenarioError."""
    try:
        text = path.read_bytes()
    except OSError as e:
        raise ScenarioError(f"{path}: {e.strerror or e}") from e
    try:
        return Scenario.model_validate_json(text)
    except ValidationError as e:
        raise ScenarioError(f"{path}: {explain(e)}") from e
