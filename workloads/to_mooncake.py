"""Requests as Mooncake's JSON lines, which most replayers read, and what of them that format cannot say.

Times are whole milliseconds, `hash_ids` one per begun block (512 tokens in Mooncake's own files). Sessions are as
AIPerf and Dynamo write them: `session_id`, and for a later turn whose think time is known `delay` (ms) in the place
of the timestamp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from servetwin.workloads.checks import check_count
from servetwin.workloads.columns import REQUEST_FIELDS, RequestColumns
from servetwin.workloads.prompt_blocks import PromptBlocks
from servetwin.workloads.spec import RequestSpec
from servetwin.workloads.transform import as_columns
from servetwin.workloads.wording import counted

BLOCK_TOKENS = 512
SAID = frozenset(
    {
        "arrival_s",
        "prompt_tokens",
        "output_tokens",
        "prompt_token_ids",
        "session_id",
        "turn",
        "think_time_s",
        "context_tokens",
        "prefix_ids",
        "prefix_block_tokens",
        "cache_salt",
        "source_row",
    }
)
"""Fields whose meaning the format holds, though perhaps in another form."""


def mooncake_rows(
    requests: Sequence[RequestSpec], block_tokens: int = BLOCK_TOKENS, *, timed: bool = True
) -> Iterator[dict[str, Any]]:
    """One row for each request, in order of arrival. Ids stand as they are where they are of `block_tokens`.

    `timed`: whether they have arrival times; rows of others have no timestamp.
    """
    check_count("block_tokens", block_tokens)
    columns = as_columns(requests)
    blocks = None if _fits(columns, block_tokens) else PromptBlocks(block_tokens)
    in_context = columns.has("context_tokens")
    sent: set[str] = set()
    for spec in columns:
        row: dict[str, Any] = {"timestamp": round(spec.arrival_s * 1000)} if timed else {}
        row |= {
            "input_length": spec.prompt_tokens,
            "output_length": spec.output_tokens,
        }
        ids = spec.prefix_ids if blocks is None else blocks.ids(spec)
        # First turns count as known where later ones share what they have.
        known = (spec.prefix_ids or spec.prompt_token_ids) is not None or (
            in_context and spec.session_id is not None
        )
        if ids is not None and known:
            row["hash_ids"] = list(ids)
        if spec.session_id is not None:
            row["session_id"] = spec.session_id
            if spec.session_id in sent and spec.think_time_s is not None:
                row.pop("timestamp", None)
                row["delay"] = _milliseconds(spec.think_time_s)
            sent.add(spec.session_id)
        yield row


def not_said(requests: RequestColumns, block_tokens: int = BLOCK_TOKENS) -> list[str]:
    """What Mooncake's format loses of these requests (in order of arrival), a sentence each."""
    return [sentence for sentence in _losses(requests, block_tokens) if sentence]


def _losses(requests: RequestColumns, block_tokens: int) -> Iterator[str]:
    lost = [name for name in REQUEST_FIELDS if name not in SAID and _has_own(requests, name)]
    if lost:
        yield f"not in the file, for Mooncake's format has no place for them: {', '.join(lost)}"
    in_ms = requests.arrival_s * 1000
    if finer := int((abs(in_ms - in_ms.round()) > 1e-6).sum()):
        yield f"rounded to whole milliseconds: {counted(finer, 'arrival')}"
    if requests.has("think_time_s") and requests.has("session_id"):
        yield "later turns with a think time have it as their delay, and no time of their own"
    if requests.has("think_time_s") and not requests.has("session_id"):
        yield "not in the file: think times of requests without session"
    yield _about_prefixes(requests, block_tokens)
    yield _about_contexts(requests, block_tokens)
    if block_tokens != BLOCK_TOKENS:
        yield f"hash_ids are of {block_tokens} tokens each: readers must be told (--hash-block-size {block_tokens})"


def _about_prefixes(requests: RequestColumns, block_tokens: int) -> str:
    names = ("prefix_ids", "prompt_token_ids", "context_tokens")
    if not any(map(requests.has, names)):
        return "no hash_ids: the trace says nothing of what prompts begin with, so reuse of prefixes stays unknown"
    if _fits(requests, block_tokens):
        return ""
    return (
        f"hash_ids are numbered anew, one per {block_tokens} tokens: two prompts share one where they are known "
        "to be equal throughout it"
    )


def _about_contexts(requests: RequestColumns, block_tokens: int) -> str:
    """What later turns have in common with the turn before that no id says."""
    if not (requests.has("context_tokens") and requests.has("session_id")):
        return ""
    prompt_before: dict[str, int] = {}
    context = said = 0
    columns = (requests.values(name) for name in ("session_id", "prompt_tokens", "context_tokens"))
    for session, prompt_tokens, context_tokens in zip(*columns, strict=True):
        if session is None:
            continue
        if session in prompt_before and context_tokens is not None:
            context += context_tokens
            said += min(context_tokens, prompt_before[session]) // block_tokens * block_tokens
        prompt_before[session] = prompt_tokens
    if said == context:
        return ""
    return (
        f"reuse within sessions is lost in part: of {counted(context, 'context token')} of later turns hash_ids say "
        f"{said:,} ({100 * said / context:.0f} %): those in whole blocks of the prompt before, not its answer"
    )


def _has_own(requests: RequestColumns, name: str) -> bool:
    if name not in requests.table.column_names:
        return False
    default = RequestSpec.__dataclass_fields__[name].default
    return any(value != default for value in requests.values(name))


def _fits(requests: RequestColumns, block_tokens: int) -> bool:
    """Whether the ids can stand as they are."""
    if any(map(requests.has, ("prompt_token_ids", "context_tokens", "cache_salt"))):
        return False
    if not requests.has("prefix_ids"):
        return True
    import pyarrow.compute as pc

    table = requests.table
    if pc.any(pc.not_equal(table["prefix_block_tokens"], block_tokens)).as_py():
        return False
    begun = (requests.prompt_tokens + block_tokens - 1) // block_tokens
    lengths = pc.fill_null(pc.list_value_length(table["prefix_ids"]), -1).to_numpy()
    as_numbers = str(table["prefix_ids"].type.value_type) != "string"
    return as_numbers and bool(((lengths == begun) | (lengths < 0)).all())


def _milliseconds(seconds: float) -> float:
    ms = seconds * 1000
    return round(ms) if math.isclose(ms, round(ms), abs_tol=1e-6) else ms
