"""A request as a story tells it: lengths, what it shares, how urgent it is, whose it is; and the tokens that follow.

Every token is a function of the request's name and place, so that equal stories give equal runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

from servetwin.sim.block_hash import TokenPrompt
from servetwin.sim.config import EngineConfig
from servetwin.sim.contract import SamplingParams
from servetwin.sim.request import Request

EOS_TOKEN_ID = 0
"""No other token has this id."""


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """What a client asks for."""

    prompt_tokens: int
    max_tokens: int
    priority: int = 0
    """Lower is more urgent."""
    client_id: str | None = None
    shared_tokens: int = 0
    """Leading prompt tokens that all such requests have in common."""
    predicted_output_tokens: int | None = None
    eos_after: int | None = None
    """The model ends the answer with this many tokens, if max_tokens does not end it before."""

    def request(self, request_id: str, config: EngineConfig, now: int) -> Request:
        """A new request that arrives at `now` (ns)."""
        shared = min(self.shared_tokens, self.prompt_tokens)
        tokens = [_token("shared", i) for i in range(shared)]
        tokens += [_token(request_id, i) for i in range(shared, self.prompt_tokens)]
        return Request(
            request_id,
            TokenPrompt(tuple(tokens)),
            SamplingParams(temperature=0.0, max_tokens=self.max_tokens),
            block_size=config.cache.block_size,
            max_model_len=config.model.max_model_len,
            arrival_ns=now,
            priority=self.priority,
            eos_token_id=config.model.eos_token_id,
            client_id=self.client_id,
            predicted_output_tokens=self.predicted_output_tokens,
        )

    def answer_token(self, request_id: str, index: int) -> int:
        """What the model answers at `index` (0 = first output token)."""
        if self.eos_after is not None and index >= self.eos_after - 1:
            return EOS_TOKEN_ID
        return _token(f"{request_id} answers", index)

    def __str__(self) -> str:
        said = [f"prompt {self.prompt_tokens}", f"max_tokens {self.max_tokens}", f"priority {self.priority}"]
        optional = {
            "shares": min(self.shared_tokens, self.prompt_tokens) or None,
            "client": self.client_id,
            "predicted": self.predicted_output_tokens,
            "ends after": self.eos_after,
        }
        return ", ".join(said + [f"{name} {value}" for name, value in optional.items() if value is not None])


def _token(name: str, index: int) -> int:
    return 1 + crc32(f"{name}|{index}".encode())
