"""The front end of one engine: requests in, `RequestOutput`s out, the engine core behind a client.

`step()` only consumes what the engine has produced: with the core in a child process, that goes on by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from servetwin.executor.core_listener import CoreListener
from servetwin.executor.engine_args import EngineArgs
from servetwin.executor.engine_core_client import EngineCoreClient, make_client
from servetwin.executor.input_processor import InputProcessor, PromptType, RequestOptions
from servetwin.executor.output_processor import OutputProcessor
from servetwin.executor.outputs import RequestOutput
from servetwin.executor.parallel_sampling import ParentRequest
from servetwin.executor.tokenizer import fast_tokenizer, load_tokenizer
from servetwin.sim.config import EngineConfig
from servetwin.sim.contract import EngineDeadError, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LLMEngine:
    """One engine. To be used from one thread; several in one process know nothing of each other."""

    def __init__(
        self, args: EngineArgs, client: EngineCoreClient, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        """Takes over `client` and shuts it down in the end. Without a tokenizer: token ids only, no text.

        Raises ValueError for a tokenizer that is not a fast one.
        """
        self.tokenizer = tokenizer
        self._client = client
        self._inputs = InputProcessor(client.config, tokenizer, max_logprobs=args.max_logprobs)
        self._outputs = OutputProcessor(None if tokenizer is None else fast_tokenizer(tokenizer))

    @classmethod
    def from_engine_args(
        cls, args: EngineArgs, *, multiprocess: bool | None = None, listener: CoreListener | None = None
    ) -> LLMEngine:
        """Starts an engine: in a child process, or in this one (`multiprocess=False`).

        None: what the environment variable SERVETWIN_ENABLE_MULTIPROCESSING says (0: in this one). `listener` is told
        what the engine does. Raises ValueError for arguments, a model or a tokenizer that cannot be used.
        """
        tokenizer = tokenizer_of(args)
        return cls(args, make_client(args, multiprocess=multiprocess, listener=listener), tokenizer)

    # ---------------------------------------------------------------- requests

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        *,
        arrival_time: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> None:
        """Queues a request. `arrival_time`: seconds since the epoch, if it is not now.

        Raises ValueError, with nothing queued, for what cannot be served, and for an id in use.
        """
        self.submit(self.prepare(request_id, prompt, params, arrival_time=arrival_time, **options))

    def prepare(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        *,
        arrival_time: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> ParentRequest:
        """Checks a request as `add_request` does, and queues nothing. Raises ValueError."""
        return self._inputs.process(request_id, prompt, params, arrival_time=arrival_time, **options)

    def submit(self, request: ParentRequest) -> None:
        """Queues a request that was prepared. Raises ValueError for an id in use, EngineDeadError after `shutdown`."""
        children = request.children()
        self._outputs.add_request(request, children)
        try:
            for child in children:
                self._client.add_request(child)
        except BaseException:
            # Nothing of it stays behind: who waits for the unfinished requests would wait for ever.
            core_ids = self._outputs.abort_requests([request.request_id])
            with suppress(EngineDeadError):
                self._client.abort_requests(core_ids)
            raise

    def abort_request(self, request_ids: str | Sequence[str]) -> None:
        """Ends requests; no output of theirs follows. Ids that are unknown or have ended are ignored."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        if core_ids := self._outputs.abort_requests(ids):
            self._client.abort_requests(core_ids)

    def step(self, timeout_s: float | None = None) -> list[RequestOutput]:
        """What has come since the last call, at most one output a request; [] when nothing is unfinished.

        Waits until the engine has produced something, or for `timeout_s`. What it produced may be nothing to tell (see
        `RequestOutputKind`): [] then as well. Raises EngineDeadError when the engine has died.
        """
        if timeout_s is None and not self.has_unfinished_requests():
            return []
        outputs = self._client.get_outputs(timeout_s)
        if timeout_s is None and not outputs:
            raise RuntimeError(
                f"the engine has nothing left to do, and requests are unfinished: {self._outputs.unfinished_ids}"
            )
        processed = self._outputs.process_outputs(outputs)
        if processed.reqs_to_abort:
            self._client.abort_requests(processed.reqs_to_abort)
        return processed.request_outputs

    def has_unfinished_requests(self) -> bool:
        return self.get_num_unfinished_requests() > 0

    def get_num_unfinished_requests(self) -> int:
        """Requests, however many outputs each has."""
        return self._outputs.num_unfinished_requests

    # ---------------------------------------------------------------- engine

    @property
    def engine_config(self) -> EngineConfig:
        """The engine as it runs, with the measured number of blocks."""
        return self._client.config

    @property
    def stalled(self) -> str | None:
        """Why nothing will come out before something new comes in; None while something may."""
        return self._client.stalled

    @property
    def described(self) -> dict[str, Any]:
        """What the executor says of itself: model, device, versions."""
        return self._client.described

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer. ValueError when there is none."""
        if self.tokenizer is None:
            raise ValueError(
                "there is no tokenizer: the model's folder has none, or skip_tokenizer_init was given"
            )
        return self.tokenizer

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content; False, with nothing changed, while any request holds a block."""
        return self._client.reset_prefix_cache()

    def shutdown(self) -> None:
        """Ends the engine; calling it again does nothing."""
        self._client.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


def tokenizer_of(args: EngineArgs) -> PreTrainedTokenizerBase | None:
    """The engine's tokenizer: its own folder's, else the model's, which may have none.

    Raises ValueError when it is damaged, not a fast one, or missing where it was asked for.
    """
    assert args.model is not None
    if args.skip_tokenizer_init:
        return None
    tokenizer = load_tokenizer(Path(args.tokenizer or args.model))
    if tokenizer is None and args.tokenizer is not None:
        raise ValueError(f"tokenizer {str(args.tokenizer)!r} is not a folder with a tokenizer")
    if tokenizer is not None:
        fast_tokenizer(tokenizer)
    return tokenizer
