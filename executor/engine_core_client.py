"""The front end's way to an engine core: in a child process (`MPClient`) or in this one (`InprocClient`)."""

from __future__ import annotations

import os
import sys
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from servetwin.executor.core_listener import CoreListener
from servetwin.executor.core_loop import CoreLoop, executor_options
from servetwin.executor.core_process import CoreProcess
from servetwin.executor.engine_args import EngineArgs
from servetwin.executor.engine_log import log_to_stderr
from servetwin.executor.messages import (
    AbortRequests,
    AddRequest,
    Died,
    Outputs,
    PrefixCacheReset,
    Ready,
    Reply,
    Request,
    ResetPrefixCache,
    Setup,
    Stalled,
    StartFailed,
)
from servetwin.sim.config import EngineConfig
from servetwin.sim.contract import EngineCoreOutput, EngineCoreRequest, EngineDeadError
from servetwin.sim.progress_guard import StalledError

MULTIPROCESSING_VARIABLE = "SERVETWIN_ENABLE_MULTIPROCESSING"
SHUT_DOWN = "the engine has been shut down"


class EngineCoreClient(ABC):
    """One engine core. Used from one thread at a time."""

    config: EngineConfig
    described: dict[str, Any]
    """Hardware, versions and model (`Executor.describe`)."""

    @property
    def stalled(self) -> str | None:
        """Why nothing will come out until something is sent, as far as that has come by; None while something may."""
        return None

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Sends a request. What the engine cannot serve is answered by an output with finish_reason "error"."""

    @abstractmethod
    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Gives requests up: no output follows, except such as were on their way. Unknown ids are ignored."""

    @abstractmethod
    def get_outputs(self, timeout_s: float | None = None) -> list[EngineCoreOutput]:
        """All outputs that are there, after waiting for the first; [] when the time is over.

        Raises EngineDeadError, and StalledError when without a timeout the wait would have no end.
        """

    @abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content; False, with nothing changed, while any request holds a block."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the engine; may be called again. Every other call raises EngineDeadError from then on."""


def make_client(
    args: EngineArgs, *, multiprocess: bool | None = None, listener: CoreListener | None = None
) -> EngineCoreClient:
    """An engine, ready to serve. Raises ValueError for arguments or a model that do not do.

    `multiprocess` None: in a child process unless SERVETWIN_ENABLE_MULTIPROCESSING is 0. `listener`: told of
    everything that happens in the engine; with a child process while outputs are fetched.
    """
    if multiprocess is None:
        multiprocess = os.environ.get(MULTIPROCESSING_VARIABLE) != "0"
    return MPClient(args, listener=listener) if multiprocess else InprocClient(args, listener=listener)


class InprocClient(EngineCoreClient):
    """The engine core in this process, for debugging: it runs while outputs are fetched, and its errors come as they
    are."""

    def __init__(self, args: EngineArgs, *, listener: CoreListener | None = None) -> None:
        log_to_stderr()
        self._loop = CoreLoop(args, listener=listener)
        self.config, self.described = self._loop.config, self._loop.described
        self._refused: list[EngineCoreOutput] = []
        self._dead: str | None = None
        self._finalizer = weakref.finalize(self, self._loop.close)
        # The interpreter ends the worker's thread before it would call this.
        self._finalizer.atexit = False

    def add_request(self, request: EngineCoreRequest) -> None:
        self._raise_if_dead()
        if (refused := self._loop.add_request(request)) is not None:
            self._refused.append(refused)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        self._raise_if_dead()
        self._loop.abort_requests(request_ids)

    def get_outputs(self, timeout_s: float | None = None) -> list[EngineCoreOutput]:
        """Runs steps until something comes out or nothing is left to do; a step that runs is not cut short."""
        self._raise_if_dead()
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        outputs, self._refused = self._refused, []
        while not outputs and self._loop.has_work():
            if deadline_s is not None and time.monotonic() >= deadline_s:
                return []
            # Until the step has gone through: Ctrl-C, too, may leave it half done.
            self._dead = "the engine core failed in an earlier step"
            outputs = self._loop.step()
            self._dead = None
        if not outputs and deadline_s is None and self._loop.stalled is not None:
            raise StalledError(self._loop.stalled)
        return outputs

    @property
    def stalled(self) -> str | None:
        return self._loop.stalled

    def reset_prefix_cache(self) -> bool:
        self._raise_if_dead()
        return self._loop.reset_prefix_cache()

    def shutdown(self) -> None:
        self._dead = self._dead or SHUT_DOWN
        self._finalizer()

    def _raise_if_dead(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)


class MPClient(EngineCoreClient):
    """The engine core in a child process, which goes on while this one does something else.

    Ended by `shutdown`, with this object, or with this process, whichever comes first. In a process that was forked
    off, `shutdown` does nothing and every other call raises EngineDeadError.
    """

    def __init__(self, args: EngineArgs, *, listener: CoreListener | None = None) -> None:
        self._listener = listener
        self._outputs: list[EngineCoreOutput] = []
        self._resets: list[PrefixCacheReset] = []
        self._stalled: Stalled | None = None
        self._num_requests = 0
        self._dead: str | None = None
        # What can be refused without a model is refused without a child.
        executor_options(args)
        self._process = CoreProcess()
        self._finalizer = weakref.finalize(self, self._process.close)
        self.pid = self._process.pid
        try:
            self._process.send(_setup(args, listen=listener is not None))
            ready = self._wait_until_ready()
        finally:
            if not self._process.started:
                self._finalizer()
        self.config = EngineConfig.model_validate_json(ready.config)
        self.described = ready.described

    def _wait_until_ready(self) -> Ready:
        while (reply := self._process.receive()) is None:
            if (end := self._process.ended()) is not None:
                reply = self._process.receive_last()
                if reply is None:
                    raise EngineDeadError(f"{end} while it started; its last words are on stderr")
                break
            self._process.wait(None)
        if isinstance(reply, StartFailed):
            raise ValueError(reply.message)
        if isinstance(reply, Died):
            raise EngineDeadError(f"the engine core (pid {self.pid}) could not start: {reply.message}")
        assert isinstance(reply, Ready), f"{type(reply).__name__} came before Ready"
        self._process.started = True
        # Setup has gone one way and Ready the other.
        self._process.hide()
        return reply

    # ------------------------------------------------------------ calls

    def add_request(self, request: EngineCoreRequest) -> None:
        self._send(AddRequest(request))

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        self._send(AbortRequests(list(request_ids)))

    def get_outputs(self, timeout_s: float | None = None) -> list[EngineCoreOutput]:
        """What came before the engine's death is still given out; the call after that raises EngineDeadError."""
        self._raise_if_inherited()
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._take_replies()
            if self._outputs:
                outputs, self._outputs = self._outputs, []
                return outputs
            self._raise_if_dead()
            if deadline_s is None and (stalled := self.stalled) is not None:
                raise StalledError(stalled)
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                return []
            self._process.wait(left_s)

    @property
    def stalled(self) -> str | None:
        """An engine that had not taken in all that was sent may have something to do by now."""
        if self._stalled is None or self._stalled.num_requests != self._num_requests:
            return None
        return self._stalled.message

    def reset_prefix_cache(self) -> bool:
        """Waits until the child has done so, which it does between two steps."""
        self._send(ResetPrefixCache())
        while not self._resets:
            self._process.wait(None)
            self._take_replies()
            self._raise_if_dead()
        return self._resets.pop().done

    def shutdown(self) -> None:
        self._end(SHUT_DOWN)

    # ------------------------------------------------------------ messages

    def _send(self, message: Request) -> None:
        self._raise_if_inherited()
        if self._dead is None and self._process.ended() is not None:
            self._take_replies()
        self._raise_if_dead()
        self._num_requests += 1
        self._process.send(message)

    def _take_replies(self) -> None:
        """Everything that is there, and whether the child still is."""
        if self._dead is not None:
            return
        end = self._process.ended()
        receive = self._process.receive if end is None else self._process.receive_last
        while self._dead is None and (reply := receive()) is not None:
            self._take(reply)
        if end is not None:
            self._end(end)

    def _take(self, reply: Reply) -> None:
        if isinstance(reply, Outputs):
            self._outputs += reply.outputs
        elif isinstance(reply, PrefixCacheReset):
            self._resets.append(reply)
        elif isinstance(reply, Stalled):
            self._stalled = reply
        elif isinstance(reply, Died):
            self._end(f"the engine core process (pid {self.pid}) failed: {reply.message}")
        elif self._listener is not None and not isinstance(reply, Ready | StartFailed):
            reply.replay(self._listener)

    def _end(self, why: str) -> None:
        self._dead = self._dead or why
        self._finalizer()

    def _raise_if_dead(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)

    def _raise_if_inherited(self) -> None:
        owner_pid = self._process.owner_pid
        if os.getpid() != owner_pid:
            raise EngineDeadError(
                f"the engine belongs to process {owner_pid}, of which this one (pid {os.getpid()}) is a fork: make "
                "another engine here"
            )


def _setup(args: EngineArgs, *, listen: bool) -> Setup:
    values = {f.name: getattr(args, f.name) for f in fields(args)}
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
    return Setup(plain, [str(entry) or str(Path.cwd()) for entry in sys.path], listen)
