"""Turns what the engine core sends (tokens) into what the user gets (`RequestOutput`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

from tokenizers import Tokenizer

from servetwin.executor.detokenizer import DetokenizationError, IncrementalDetokenizer
from servetwin.executor.output_logprobs import LogprobsCollector
from servetwin.executor.output_state import OutputState, RequestState
from servetwin.executor.outputs import RequestOutput
from servetwin.executor.parallel_sampling import ParentRequest
from servetwin.executor.tokenizer import token_text
from servetwin.sim.contract import EngineCoreOutput, EngineCoreRequest


@dataclass(slots=True)
class ProcessedOutputs:
    """What came of a batch of engine core outputs."""

    request_outputs: list[RequestOutput] = field(default_factory=list)
    """At most one for each request."""
    reqs_to_abort: list[str] = field(default_factory=list)
    """Ids in the engine of what has ended here (by a stop string) and goes on there."""


class OutputProcessor:
    """Follows the unfinished requests of one engine."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Without a tokenizer every text is empty."""
        self._tokenizer = tokenizer
        self._token_text = cache(self._text_of_token)
        self._requests: dict[str, RequestState] = {}
        self._by_core_id: dict[str, tuple[RequestState, OutputState]] = {}

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._requests)

    @property
    def unfinished_ids(self) -> list[str]:
        """Ids of the unfinished requests, as their users gave them."""
        return list(self._requests)

    def add_request(self, parent: ParentRequest, children: list[EngineCoreRequest]) -> None:
        """Begins to follow a request. ValueError when its id, or that of a child, is in use."""
        for request_id in (parent.request_id, *(child.request_id for child in children)):
            if request_id in self._requests or request_id in self._by_core_id:
                raise ValueError(f"request_id {request_id!r} is in use by an unfinished request")
        outputs = [self._output_state(index, child) for index, child in enumerate(children)]
        request = RequestState(parent, outputs)
        self._requests[parent.request_id] = request
        self._by_core_id |= {state.core_id: (request, state) for state in outputs}

    def abort_requests(self, request_ids: Iterable[str]) -> list[str]:
        """Forgets requests; gives the ids in the engine of what goes on there. Unknown ids are ignored."""
        core_ids: list[str] = []
        for request_id in request_ids:
            if request := self._requests.pop(request_id, None):
                core_ids += [state.core_id for state in request.outputs if not state.finished]
        for core_id in core_ids:
            del self._by_core_id[core_id]
        return core_ids

    def process_outputs(self, outputs: Iterable[EngineCoreOutput]) -> ProcessedOutputs:
        """Takes in outputs of one or more steps, in order. Those of requests that are not followed are dropped."""
        processed = ProcessedOutputs()
        touched: dict[str, RequestState] = {}
        for output in outputs:
            request, state = self._by_core_id.get(output.request_id, (None, None))
            if request is None or state is None or not state.accepts(output):
                continue
            request.observe(output, state.take(output))
            touched[request.parent.request_id] = request
            if state.finished:
                del self._by_core_id[state.core_id]
                if output.finish_reason is None:
                    processed.reqs_to_abort.append(state.core_id)
        for request_id, request in touched.items():
            if request.finished:
                del self._requests[request_id]
            if (made := request.make_output()) is not None:
                processed.request_outputs.append(made)
        return processed

    def _output_state(self, index: int, child: EngineCoreRequest) -> OutputState:
        params = child.sampling_params
        detokenizer = None
        if self._tokenizer is not None and params.detokenize:
            try:
                detokenizer = IncrementalDetokenizer(self._tokenizer, child.prompt_token_ids, params)
            except DetokenizationError as e:
                raise ValueError(f"prompt_token_ids: {e}") from e
        logprobs = None if params.logprobs is None else LogprobsCollector(self._token_text)
        return OutputState(index, child.request_id, detokenizer, logprobs)

    def _text_of_token(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else token_text(self._tokenizer, token_id)
