"""What is known of an unfinished request: the tokens and text of each of its outputs, its times and counts."""

from __future__ import annotations

import time
from dataclasses import replace

from servetwin.executor.detokenizer import DetokenizationError, IncrementalDetokenizer
from servetwin.executor.output_logprobs import LogprobsCollector
from servetwin.executor.outputs import CompletionOutput, RequestOutput, RequestStateStats
from servetwin.executor.parallel_sampling import ParentRequest
from servetwin.sim.contract import EngineCoreOutput, RequestOutputKind


class OutputState:
    """One of the n outputs of a request, and what of it has been given out."""

    def __init__(
        self,
        index: int,
        core_id: str,
        detokenizer: IncrementalDetokenizer | None,
        logprobs: LogprobsCollector | None,
    ) -> None:
        """`core_id`: its id in the engine. Without a detokenizer its text stays empty."""
        self.index = index
        self.core_id = core_id
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self._detokenizer = detokenizer
        self._logprobs = logprobs
        self._added_ns = time.monotonic_ns()
        self._known_to_engine = False
        self._num_given_tokens = 0
        self._num_given_chars = 0
        self._end_given = False

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def accepts(self, output: EngineCoreOutput) -> bool:
        """Whether `output` is about this request, not about an earlier one of the same id that was aborted.

        What the engine says first of a request is when it queued it, or why it did not.
        """
        self._known_to_engine = (
            self._known_to_engine
            or output.error is not None
            or any(e.type == "queued" and e.timestamp_ns >= self._added_ns for e in output.events)
        )
        return self._known_to_engine

    def take(self, output: EngineCoreOutput) -> int:
        """Takes in one output of the engine; gives the number of its tokens that belong to the request."""
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        self.error = output.error
        num_tokens = self._detokenize(output)
        self.token_ids += output.new_token_ids[:num_tokens]
        if self._logprobs is not None:
            if output.logprobs is not None:
                self._logprobs.extend(output.logprobs.first(num_tokens))
            assert len(self._logprobs.entries) == len(self.token_ids), "a token without its log probabilities"
        return num_tokens

    def _detokenize(self, output: EngineCoreOutput) -> int:
        """Makes the text, ends at a stop string; gives the number of tokens up to there."""
        num_tokens = len(output.new_token_ids)
        if self._detokenizer is None:
            return num_tokens
        try:
            stopped = self._detokenizer.update(output.new_token_ids, stopped=output.finish_reason == "stop")
        except DetokenizationError as e:
            self.finish_reason, self.stop_reason, self.error = "error", None, str(e)
            return num_tokens
        if stopped is None:
            return num_tokens
        self.finish_reason, self.stop_reason = "stop", stopped.stop_string
        return stopped.num_tokens

    @property
    def has_news(self) -> bool:
        """`delta` would tell something."""
        return len(self.token_ids) > self._num_given_tokens or (self.finished and not self._end_given)

    def whole(self) -> CompletionOutput:
        """Everything so far."""
        return self._completion(0, 0)

    def delta(self) -> CompletionOutput:
        """What came since the last call of this."""
        made = self._completion(self._num_given_tokens, self._num_given_chars)
        self._num_given_tokens = len(self.token_ids)
        self._num_given_chars += len(made.text)
        self._end_given = self.finished
        return made

    def _completion(self, first_token: int, first_char: int) -> CompletionOutput:
        text = "" if self._detokenizer is None else self._detokenizer.settled_text(finished=self.finished)
        logprobs = self._logprobs
        return CompletionOutput(
            index=self.index,
            text=text[first_char:],
            token_ids=self.token_ids[first_token:],
            cumulative_logprob=None if logprobs is None else logprobs.cumulative_logprob,
            logprobs=None if logprobs is None else logprobs.entries[first_token:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class RequestState:
    """A request with its n outputs."""

    def __init__(self, parent: ParentRequest, outputs: list[OutputState]) -> None:
        self.parent = parent
        self.outputs = outputs
        """By index."""
        self._stats = RequestStateStats(arrival_time=parent.arrival_time)
        self._num_cached_tokens: int | None = None

    @property
    def finished(self) -> bool:
        return all(state.finished for state in self.outputs)

    def observe(self, output: EngineCoreOutput, num_new_tokens: int) -> None:
        """Counts and dates what an output of the engine tells."""
        stats = self._stats
        for event in output.events:
            if event.type == "queued":
                stats.queued_ts = stats.queued_ts or event.timestamp_ns / 1e9
            elif event.type == "scheduled":
                stats.scheduled_ts = stats.scheduled_ts or event.timestamp_ns / 1e9
            else:
                stats.num_preemptions += 1
        if self._num_cached_tokens is None:
            self._num_cached_tokens = output.num_cached_tokens
        if num_new_tokens:
            self._date_tokens(num_new_tokens)

    def _date_tokens(self, num_new_tokens: int) -> None:
        stats = self._stats
        stats.last_token_ts = time.monotonic()
        if not stats.num_generation_tokens:
            stats.first_token_ts = stats.last_token_ts
            stats.first_token_latency = time.time() - stats.arrival_time
        stats.num_generation_tokens += num_new_tokens

    def make_output(self) -> RequestOutput | None:
        """What the user is told now, by the request's output kind; None when that is nothing."""
        kind = self.parent.params.output_kind
        if kind is RequestOutputKind.FINAL_ONLY and not self.finished:
            return None
        if kind is RequestOutputKind.DELTA:
            outputs = [state.delta() for state in self.outputs if state.has_news]
        else:
            outputs = [state.whole() for state in self.outputs]
        errors = [state.error for state in self.outputs if state.error is not None]
        return RequestOutput(
            request_id=self.parent.request_id,
            prompt=self.parent.prompt,
            prompt_token_ids=self.parent.prompt_token_ids,
            outputs=outputs,
            finished=self.finished,
            metrics=replace(self._stats),
            num_cached_tokens=self._num_cached_tokens,
            error=errors[0] if errors else None,
        )
