"""Families of prompts: several system prompts, several users of each, and their questions.

The load of inference-perf's `shared_prefix` and SGLang's generated shared prefixes, with turns as an option.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from servetwin.workloads.checks import check_count
from servetwin.workloads.lengths import IntArray, Lengths
from servetwin.workloads.prompts import Columns, Prompts
from servetwin.workloads.streams import stream


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixFamilies:
    """Every user asks once a round, in an order drawn anew for each round; a question follows its system prompt.

    With `turns` above 1 a user asks that many times in one conversation: the prompt is then the previous prompt, its
    answer and the new question. After that the user begins another. A longer draw begins with a shorter one.
    """

    num_system_prompts: int
    users_per_prompt: int
    system_prompt_len: int
    """Tokens that all users of one system prompt share."""
    question_lengths: Lengths
    output_lengths: Lengths
    turns: int = 1
    """Questions in one conversation; 1: no conversations, requests have no session."""

    def __post_init__(self) -> None:
        for name in ("num_system_prompts", "users_per_prompt", "system_prompt_len", "turns"):
            check_count(name, getattr(self, name))

    def draw(self, n: int, seed: int) -> Prompts:
        """`n` requests, from the streams `prefixes`, `input_lengths` and `output_lengths` of the root `seed`."""
        users = self._users(n, stream(seed, "prefixes"))
        questions = self.question_lengths.sample(n, stream(seed, "input_lengths"))
        outputs = self.output_lengths.sample(n, stream(seed, "output_lengths"))
        prompts, contexts = self._grown(users, questions, outputs)
        columns: Columns = {
            "prompt_tokens": prompts,
            "output_tokens": outputs,
            # One id for a whole system prompt: an id is a run of tokens of any length.
            "prefix_ids": [(user // self.users_per_prompt,) for user in users.tolist()],
            "prefix_block_tokens": np.full(n, self.system_prompt_len),
        }
        if self.turns == 1:
            return Prompts(columns)
        turns, conversations = self._places(n)
        sessions = [f"user-{u:04d}-{c}" for u, c in zip(users.tolist(), conversations.tolist(), strict=True)]
        return Prompts({**columns, "session_id": sessions, "turn": turns, "context_tokens": contexts})

    @property
    def _round(self) -> int:
        return self.num_system_prompts * self.users_per_prompt

    def _users(self, n: int, rng: np.random.Generator) -> IntArray:
        """Who sends each request, shape [n]."""
        rounds = [rng.permutation(self._round) for _ in range(0, n, self._round)]
        return np.concatenate(rounds)[:n].astype(np.int64)

    def _places(self, n: int) -> tuple[IntArray, IntArray]:
        """Turn within its conversation, and which conversation of its user, of each request, shape [n]."""
        conversation, turn = np.divmod(np.arange(n) // self._round, self.turns)
        return turn, conversation

    def _grown(self, users: IntArray, questions: IntArray, outputs: IntArray) -> tuple[IntArray, IntArray]:
        """Prompt tokens, and those that are the turn before and its answer, of each request, shape [n]."""
        prompts, contexts = np.empty_like(questions), np.zeros_like(questions)
        said = np.zeros(self._round, dtype=np.int64)
        for number, of_round in self._rounds(len(users)):
            if number % self.turns == 0:
                said[:] = 0
            senders = users[of_round]
            contexts[of_round] = said[senders]
            known = np.where(said[senders] > 0, said[senders], self.system_prompt_len)
            prompts[of_round] = known + questions[of_round]
            said[senders] = prompts[of_round] + outputs[of_round]
        return prompts, contexts

    def _rounds(self, n: int) -> Iterator[tuple[int, slice]]:
        for number, start in enumerate(range(0, n, self._round)):
            yield number, slice(start, min(start + self._round, n))
