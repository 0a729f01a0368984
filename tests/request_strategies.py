"""Lists of requests of every kind a trace may hold, for Hypothesis."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from servetwin.workloads import RequestSpec

NAMES = st.text(min_size=1, max_size=4)
SECONDS = st.integers(0, 5).map(float) | st.floats(0, 1e6)
"""Whole ones often, so that requests arrive together."""
TOKEN_IDS = st.lists(st.integers(0, 200_000), min_size=1, max_size=6).map(tuple)
IDS_64 = st.integers(0, 3) | st.integers(-(2**63), 2**64 - 1)
ANY_IDS = IDS_64 | st.integers(-(2**90), 2**90)


@st.composite
def _specs(draw: st.DrawFn, ids: st.SearchStrategy[int]) -> RequestSpec:
    prompt = draw(st.integers(1, 40) | st.integers(1, 100_000) | TOKEN_IDS)
    length = len(prompt) if isinstance(prompt, tuple) else prompt
    output_tokens = draw(st.integers(1, 50_000))
    session = draw(st.none() | st.sampled_from(["a", "b"]) | NAMES)
    fields: dict[str, Any] = {"prompt_token_ids": prompt} if isinstance(prompt, tuple) else {}
    if not fields and draw(st.booleans()):
        block = draw(st.integers(1, 16) | st.just(512))
        most = min(4, -(-length // block))
        fields = {
            "prefix_ids": tuple(draw(st.lists(ids, max_size=most))),
            "prefix_block_tokens": block,
        }
    if not isinstance(prompt, tuple) and session is not None:
        fields["context_tokens"] = draw(st.none() | st.integers(0, length))
    return RequestSpec(
        request_id="replaced",
        arrival_s=draw(SECONDS),
        prompt_tokens=length,
        output_tokens=output_tokens,
        output_token_ids=draw(st.none() | TOKEN_IDS.map(lambda found: found[:output_tokens])),
        priority=draw(st.integers(-5, 5)),
        session_id=session,
        turn=draw(st.none() | st.integers(0, 9)),
        think_time_s=draw(st.none() | SECONDS),
        min_tokens=draw(st.integers(0, output_tokens)),
        stop_token_ids=draw(st.just(()) | TOKEN_IDS),
        ignore_eos=draw(st.none() | st.booleans()),
        abort_s=draw(st.none() | SECONDS),
        client_id=draw(st.none() | NAMES),
        cache_salt=draw(st.none() | NAMES),
        predicted_output_tokens=draw(st.none() | st.integers(1, 50_000)),
        **fields,
    )


def requests(
    ids: st.SearchStrategy[int] = ANY_IDS, max_size: int = 8
) -> st.SearchStrategy[list[RequestSpec]]:
    """One request or more in any order, with ids of their own; prefix ids from `ids`."""
    names = st.lists(NAMES, min_size=1, max_size=max_size, unique=True)
    return names.flatmap(
        lambda chosen: st.tuples(*(_specs(ids) for _ in chosen)).map(
            lambda found: [replace(r, request_id=name) for r, name in zip(found, chosen, strict=True)]
        )
    )
