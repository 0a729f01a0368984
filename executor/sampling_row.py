"""What the sampler needs to know of one row of logits."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from servetwin.sim.contract import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How the token behind one position is chosen. It holds no state: equal rows give equal tokens."""

    params: SamplingParams
    stream: int
    """Names the random draws of the request (`random_stream`), unsigned 64 bits."""
    prompt_token_ids: npt.NDArray[np.int32]
    """[prompt tokens]. Outputs never become prompt, also when a preempted request computes them again."""
    output_token_ids: npt.NDArray[np.int32]
    """[outputs before this one]. Drafts before this position count as outputs."""

    @property
    def num_output_tokens(self) -> int:
        """The place of this token among the outputs, from 0."""
        return len(self.output_token_ids)


NumberedRow = tuple[int, SamplingRow]
"""A row and its number in the batch."""


def random_stream(engine_seed: int, req_id: str, params: SamplingParams) -> int:
    """The name of a request's random draws, unsigned 64 bits.

    A request with a seed draws what the seed says, whatever its id, its engine and its company. The others get a
    stream each, the same in every run of an engine with the same seed.
    """
    name = f"engine {engine_seed} {req_id}" if params.seed is None else f"seed {params.seed}"
    # surrogatepass: an id need not be valid Unicode to name a stream.
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
