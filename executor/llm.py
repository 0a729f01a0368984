"""`LLM`: prompts in, texts out. The engine behind it starts with the object and ends with `shutdown`."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from difflib import get_close_matches
from itertools import count
from numbers import Integral
from pathlib import Path
from threading import RLock
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

from pydantic import ValidationError
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from servetwin.executor.chat import Conversation, chat_prompts
from servetwin.executor.engine_args import EngineArgs
from servetwin.executor.engine_log import logger
from servetwin.executor.harmless_args import without_harmless
from servetwin.executor.input_processor import PromptType
from servetwin.executor.llm_engine import LLMEngine
from servetwin.executor.outputs import RequestOutput
from servetwin.executor.parallel_sampling import ParentRequest
from servetwin.sim.config import explain
from servetwin.sim.contract import EngineDeadError, RequestOutputKind, SamplingParams
from servetwin.sim.vllm_flags import FLAGS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompts: TypeAlias = PromptType | Sequence[PromptType]
Params: TypeAlias = SamplingParams | Sequence[SamplingParams]
T = TypeVar("T")


class LLM:
    """A model with its engine; two in one process know nothing of each other. Threads may share one."""

    def __init__(self, model: Path | str, *, tokenizer: Path | str | None = None, **engine_args: Any) -> None:
        """Loads `model` (a local Hugging Face folder) and starts its engine; `engine_args` as in `EngineArgs`.

        Raises TypeError for an argument that is not there, ValueError for a value that cannot be used.
        """
        self.llm_engine = LLMEngine.from_engine_args(_engine_args(model, tokenizer, engine_args))
        self._lock = RLock()
        """Held for every use of the engine, and not while a caller has the outputs."""
        self._request_ids = map(str, count())
        self._inboxes: dict[str, deque[RequestOutput]] = {}
        """By request id: where the call that made the request looks for its outputs."""

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params | None = None,
        *,
        priority: Sequence[int] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """The whole outputs of one or more prompts, in the order of the prompts.

        `sampling_params`: for all, or a list with those of each prompt (default: `SamplingParams()`). `priority`: of
        each prompt, lower is more urgent. `use_tqdm`: progress on stderr (vLLM's name; default: on a terminal).
        Raises ValueError, with nothing queued, when one of them cannot be served; EngineDeadError when the engine dies.
        Ctrl-C ends the engine.
        """
        results: dict[str, RequestOutput] = {}
        with self._ended_by_ctrl_c():
            requests = self._prepare(prompts, sampling_params, priority, RequestOutputKind.FINAL_ONLY)
            with self._submitted(requests) as inbox, _progress(use_tqdm) as progress:
                for _ in progress.track(requests, description="requests"):
                    output = self._next_output(inbox)
                    results[output.request_id] = output
        return [results[request.request_id] for request in requests]

    def stream(
        self,
        prompts: Prompts,
        sampling_params: Params | None = None,
        *,
        priority: Sequence[int] | None = None,
        output_kind: RequestOutputKind = RequestOutputKind.DELTA,
    ) -> Generator[RequestOutput, None, None]:
        """Outputs of one or more prompts as they come; which is which, `request_id` tells: ascending numbers.

        Everything is checked at once, and queued when the first output is asked for. To stop early, close the iterator:
        what is unfinished is aborted. Raises as `generate` does.
        """
        return self._follow(self._prepare(prompts, sampling_params, priority, output_kind))

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params | None = None,
        *,
        use_tqdm: bool | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """As `generate`, for one or more conversations (lists of dicts with `role` and `content`).

        They become prompts by the tokenizer's chat template, or by `chat_template` (Jinja). Raises ValueError where
        there is neither.
        """
        prompts = chat_prompts(self.get_tokenizer(), messages, chat_template, add_generation_prompt)
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer. ValueError when there is none."""
        return self.llm_engine.get_tokenizer()

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content; False, with nothing changed, while any request holds a block."""
        with self._lock:
            return self.llm_engine.reset_prefix_cache()

    def shutdown(self) -> None:
        """Ends the engine; calling it again does nothing."""
        self.llm_engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    # ---------------------------------------------------------------- requests

    @contextmanager
    def _ended_by_ctrl_c(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            self.shutdown()
            raise

    def _prepare(
        self,
        prompts: Prompts,
        sampling_params: Params | None,
        priority: Sequence[int] | None,
        output_kind: RequestOutputKind,
    ) -> list[ParentRequest]:
        """All requests of a call, checked; nothing is queued."""
        listed = _list_of_prompts(prompts)
        params = _one_for_each(
            "sampling_params", SamplingParams() if sampling_params is None else sampling_params, len(listed)
        )
        priorities = _one_for_each("priority", 0 if priority is None else priority, len(listed))
        requests = []
        for index, (prompt, its_params, its_priority) in enumerate(
            zip(listed, params, priorities, strict=True)
        ):
            try:
                request = self.llm_engine.prepare(
                    next(self._request_ids), prompt, its_params, priority=its_priority
                )
            except ValueError as e:
                raise ValueError(f"prompts[{index}]: {e}") from e
            requests.append(replace(request, params=replace(request.params, output_kind=output_kind)))
        return requests

    @contextmanager
    def _submitted(self, requests: Sequence[ParentRequest]) -> Iterator[deque[RequestOutput]]:
        """Queues requests and gives the inbox of their outputs; what is unfinished at the end is aborted."""
        inbox: deque[RequestOutput] = deque()
        request_ids = [request.request_id for request in requests]
        try:
            with self._lock:
                for request in requests:
                    self._inboxes[request.request_id] = inbox
                    self.llm_engine.submit(request)
            yield inbox
        finally:
            with self._lock:
                with suppress(EngineDeadError):  # which has aborted everything
                    self.llm_engine.abort_request(request_ids)
                for request_id in request_ids:
                    self._inboxes.pop(request_id, None)

    def _next_output(self, inbox: deque[RequestOutput]) -> RequestOutput:
        """Waits for the next output in `inbox`; what comes for another call (an open stream, another thread) goes into
        its own."""
        while not inbox:
            with self._lock:
                if not inbox:
                    self._receive()
        return inbox.popleft()

    def _receive(self) -> None:
        for output in self.llm_engine.step():
            if output.request_id in self._inboxes:
                self._inboxes[output.request_id].append(output)

    def _follow(self, requests: Sequence[ParentRequest]) -> Generator[RequestOutput, None, None]:
        num_unfinished = len(requests)
        with self._ended_by_ctrl_c(), self._submitted(requests) as inbox:
            while num_unfinished:
                output = self._next_output(inbox)
                num_unfinished -= output.finished
                yield output


def _engine_args(model: Path | str, tokenizer: Path | str | None, options: Mapping[str, Any]) -> EngineArgs:
    """Raises TypeError for a name that is no field of `EngineArgs`, unless it is one of vLLM's that changes nothing."""
    options, harmless = without_harmless(options)
    if harmless:
        logger.info("Ignored, since it changes nothing here: %s", ", ".join(harmless))
    allowed = [field.name for field in fields(EngineArgs)]
    for name in options:
        if name in allowed:
            continue
        hint = ""
        if name in FLAGS:
            hint = ": vLLM has it, and it is not modelled here"
        elif close := get_close_matches(name, allowed, n=1):
            hint = f"; did you mean {close[0]}?"
        raise TypeError(f"LLM has no argument {name}{hint}")
    try:
        return EngineArgs(model=model, tokenizer=tokenizer, **{"usage_context": "llm_class", **options})
    except ValidationError as e:
        raise ValueError(explain(e)) from e


def _list_of_prompts(prompts: Prompts) -> list[PromptType]:
    """A single prompt becomes a list of one; arrays and iterators become lists. ValueError for another thing."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts must be a prompt or a list of prompts, got {prompts!r}")
    listed: list[Any] = list(prompts)
    return [listed] if listed and isinstance(listed[0], Integral) else listed


def _one_for_each(field: str, given: T | Sequence[T], num_prompts: int) -> list[T]:
    """`given` as a list as long as the prompts. Raises ValueError for a list of another length."""
    if not isinstance(given, Sequence):
        return [given] * num_prompts
    if len(given) != num_prompts:
        raise ValueError(
            f"{field} has {len(given)} entries for {num_prompts} prompts: one for each is needed"
        )
    return list(given)


def _progress(wanted: bool | None) -> Progress:
    console = Console(stderr=True)
    shown = console.is_terminal if wanted is None else wanted
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not shown)
