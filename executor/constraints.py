"""Which tokens a request may produce, and how its wishes shift them: everything that edits logits but penalties.

All functions edit float32 logits `[num_rows, vocab_size]` in place and look only at the rows they are given. Token ids
in parameters are within the vocabulary (the front end sees to it), except stop tokens: those outside never come up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from servetwin.executor.flat_index import RowTokens, flat_index, float32_like
from servetwin.executor.sampling_row import NumberedRow, SamplingRow


def is_constrained(row: SamplingRow) -> bool:
    """Whether `apply_constraints` could change this row."""
    params = row.params
    return bool(
        params.logit_bias
        or params.allowed_token_ids
        or params.bad_words_token_ids
        or row.num_output_tokens < params.min_tokens
    )


def apply_constraints(
    logits: torch.Tensor, rows: Sequence[NumberedRow], eos_token_ids: Sequence[int]
) -> None:
    """logit_bias, allowed_token_ids, min_tokens, bad words.

    Bad words give way where they leave a row without a candidate: a token must come, and it is never one outside
    allowed_token_ids. That the others leave none is refused before it comes here.
    """
    _add_bias(logits, rows)
    _keep_allowed(logits, rows)
    _hold_back_stop_tokens(logits, rows, eos_token_ids)
    _ban_bad_words(logits, rows)


def _add_bias(logits: torch.Tensor, rows: Iterable[NumberedRow]) -> None:
    biases = [(i, row.params.logit_bias) for i, row in rows if row.params.logit_bias]
    if not biases:
        return
    index = flat_index([(i, list(bias)) for i, bias in biases], logits.shape[1])
    values = [value for _, bias in biases for value in bias.values()]
    logits.view(-1).index_add_(0, torch.from_numpy(index).to(logits.device), float32_like(logits, values))


def _keep_allowed(logits: torch.Tensor, rows: Iterable[NumberedRow]) -> None:
    parts: list[RowTokens] = [
        (i, row.params.allowed_token_ids) for i, row in rows if row.params.allowed_token_ids
    ]
    if not parts:
        return
    index = torch.from_numpy(flat_index(parts, logits.shape[1])).to(logits.device)
    kept = logits.view(-1)[index]
    logits[[i for i, _ in parts]] = -torch.inf
    logits.view(-1)[index] = kept


def _hold_back_stop_tokens(
    logits: torch.Tensor, rows: Iterable[NumberedRow], eos_token_ids: Sequence[int]
) -> None:
    """Below min_tokens no token that could end the request comes up; with ignore_eos neither, as in vLLM."""
    vocab_size = logits.shape[1]
    parts: list[RowTokens] = [
        (i, [t for t in (*eos_token_ids, *row.params.stop_token_ids) if 0 <= t < vocab_size])
        for i, row in rows
        if row.num_output_tokens < row.params.min_tokens
    ]
    if parts:
        index = torch.from_numpy(flat_index(parts, vocab_size)).to(logits.device)
        logits.view(-1).index_fill_(0, index, -torch.inf)


def _ban_bad_words(logits: torch.Tensor, rows: Iterable[NumberedRow]) -> None:
    banned = [(i, last_tokens_of_bad_words(row)) for i, row in rows if row.params.bad_words_token_ids]
    parts: list[RowTokens] = [(i, token_ids) for i, token_ids in banned if token_ids]
    if not parts:
        return
    flat = logits.view(-1)
    index = torch.from_numpy(flat_index(parts, logits.shape[1])).to(logits.device)
    before = flat[index]
    flat[index] = -torch.inf
    none_left = logits[[i for i, _ in parts]].amax(dim=1) == -torch.inf
    lengths = torch.tensor([len(token_ids) for _, token_ids in banned if token_ids], device=logits.device)
    flat[index] = torch.where(none_left.repeat_interleave(lengths), before, -torch.inf)


def last_tokens_of_bad_words(row: SamplingRow) -> list[int]:
    """Tokens that would complete a bad word now: the outputs (never the prompt) end with what comes before them."""
    words = row.params.bad_words_token_ids
    longest = max(len(word) for word in words) - 1
    outputs = row.output_token_ids
    recent = outputs[max(0, len(outputs) - longest) :].tolist()
    return [word[-1] for word in words if len(word) == 1 or recent[-len(word) + 1 :] == word[:-1]]
