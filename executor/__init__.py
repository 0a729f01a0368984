"""Runs what the scheduler decides: `LLM` and `LLMEngine` with vLLM's names, and the parts below them.

The names are imported when they are asked for, so that `servetwin.executor.model_runner` and all below it load neither
the scheduler nor the front end.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from servetwin.executor.engine_args import EngineArgs as EngineArgs
    from servetwin.executor.llm import LLM as LLM
    from servetwin.executor.llm_engine import LLMEngine as LLMEngine
    from servetwin.executor.outputs import CompletionOutput as CompletionOutput
    from servetwin.executor.outputs import RequestOutput as RequestOutput
    from servetwin.sim.contract import EngineDeadError as EngineDeadError
    from servetwin.sim.contract import RequestOutputKind as RequestOutputKind
    from servetwin.sim.contract import SamplingParams as SamplingParams

_HOMES = {
    "LLM": "servetwin.executor.llm",
    "LLMEngine": "servetwin.executor.llm_engine",
    "EngineArgs": "servetwin.executor.engine_args",
    "RequestOutput": "servetwin.executor.outputs",
    "CompletionOutput": "servetwin.executor.outputs",
    "EngineDeadError": "servetwin.sim.contract",
    "SamplingParams": "servetwin.sim.contract",
    "RequestOutputKind": "servetwin.sim.contract",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
