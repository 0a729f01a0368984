"""Sessions as a model file holds them, and their fit: turns, growth of the prompt, pauses."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from servetwin.workloads.arrivals import FloatArray
from servetwin.workloads.fit_lengths import LengthsModel, fit_lengths
from servetwin.workloads.model_part import Part
from servetwin.workloads.quantiles import Quantiles, ShareQuantiles, TokenQuantiles, quantiles_of
from servetwin.workloads.session_turns import SessionTurns


class Pauses(Part):
    """What passes between the turns of a session."""

    between: Literal["end and start", "starts"]
    """From the end of a turn to the start of the next (a think time), or from start to start: ends are not known."""
    seconds: Quantiles


class SessionsModel(Part):
    """A session's prompts: a first one, then each time some of the context so far and new tokens."""

    turns: TokenQuantiles
    """Of each session, 1 or more."""
    first: LengthsModel
    """Prompts and answers of first turns."""
    later: LengthsModel
    """Of later turns: the tokens that they add to their context, and answers."""
    context_share: ShareQuantiles | None
    """How much of the context a later turn keeps. None: not known, so prompts share nothing."""
    context_of: Literal["prompt and answer", "prompt"]
    """What the context is: of the turn before, its prompt and answer, or its prompt (where ids name prompts only)."""
    longest_prompt_tokens: Annotated[int, Field(ge=1)]
    """No prompt gets longer: context is dropped first."""
    pauses: Pauses | None
    """None: not known."""


def fit_sessions(sessions: SessionTurns, *, recorded: bool) -> SessionsModel:
    """The model of these sessions, of which one has two turns at least; recorded: later turns have their own times."""
    later = sessions.later
    context = sessions.context_tokens[later]
    known = not np.isnan(context).all()
    added = sessions.prompt_tokens[later] - np.nan_to_num(context).astype(np.int64)
    return SessionsModel(
        turns=quantiles_of(sessions.turns),
        first=fit_lengths(sessions.prompt_tokens[sessions.first], sessions.output_tokens[sessions.first]),
        later=fit_lengths(np.maximum(added, 1), sessions.output_tokens[later]),
        context_share=quantiles_of(_kept(context, sessions.context_limit[later])) if known else None,
        context_of="prompt and answer" if sessions.prompts is None else "prompt",
        longest_prompt_tokens=int(sessions.prompt_tokens.max()),
        pauses=_pauses(sessions, recorded),
    )


def _kept(context: FloatArray, limit: FloatArray) -> FloatArray:
    known = ~np.isnan(context)
    return np.clip(context[known] / np.maximum(limit[known], 1.0), 0.0, 1.0)


def _pauses(sessions: SessionTurns, recorded: bool) -> Pauses | None:
    later = sessions.later
    think_s = sessions.think_time_s[later]
    think_s = think_s[~np.isnan(think_s)]
    if len(think_s):
        return Pauses(between="end and start", seconds=quantiles_of(think_s))
    if not recorded:
        return None
    starts_s = np.maximum(sessions.arrival_s[later] - sessions.arrival_s[later - 1], 0.0)
    return Pauses(between="starts", seconds=quantiles_of(starts_s))
