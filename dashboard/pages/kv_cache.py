"""The KV cache: who has which block, what fills the pool, what was lost, and why a hit was not one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import streamlit as st

from servetwin.dashboard import block_map as maps
from servetwin.dashboard import kv_losses
from servetwin.dashboard.charts import kv as charts
from servetwin.dashboard.charts import overview
from servetwin.dashboard.hit_loss import hit_loss
from servetwin.dashboard.notes import drawn_from, run_notes
from servetwin.dashboard.prefix_tree import PrefixTree, computed_and_evicted, prefix_tree
from servetwin.dashboard.request_lives import running_at
from servetwin.dashboard.residencies import Residencies, holding
from servetwin.dashboard.run_data import RunData
from servetwin.dashboard.state import State, keep, one_of, positive, time_chart
from servetwin.dashboard.words import counted, percent, quantity

BINS = 200
BLOCK_COLUMNS = ("start_s", "used_blocks", "cached_free_blocks", "free_blocks")
OF_ALL_REPLICAS = ("Occupancy", "Prefix tree")
"""Views that make sense for several pools together."""
COLORINGS = ("state", "owner", "references")
HEADINGS = {
    "time_s": "time (s)", "request_id": "request", "times": "its preemptions", "lost_tokens": "lost (computed tokens)",
    "lost_blocks": "lost (blocks)", "found_tokens": "found again on resuming (tokens)",
    "used_before_percent": "pool in use before (%)", "used_after_percent": "and after (%)",
}  # fmt: skip
NOT_LOGGED = (
    "This run did not log blocks/ (runs of 50,000 requests or more do not, unless --log-blocks is given): nothing says "
    "which block was whose."
)


def page(state: State) -> None:
    data = state.data()
    run_notes(data)
    keep("kv_view", "view", next(iter(VIEWS)), one_of(VIEWS))
    view = st.segmented_control("View", [*VIEWS], key="kv_view", required=True)
    name = view or next(iter(VIEWS))
    VIEWS[name](state, state.engine() if name in OF_ALL_REPLICAS else state.one_engine())


def _occupancy(state: State, data: RunData) -> None:
    window = data.within(state.window)
    view = data.steps(window, BLOCK_COLUMNS)
    time_chart(overview.kv_blocks_over_time(view.frame), "kv_blocks", state)
    drawn_from(view)
    begins, counts = kv_losses.evictions_over_time(data, window, BINS)
    time_chart(charts.evictions(begins, counts, window), "evictions", state)
    st.caption(f"{int(counts.sum()):,} cached contents were evicted in this window.")
    if not data.has_engine:
        return
    st.subheader("Unused slots of last blocks")
    waste = _last_blocks(data)
    st.plotly_chart(charts.unused_slots(waste.unused), key="unused_slots")
    st.caption(
        f"When requests ended or were preempted, of the whole run: {quantity(waste.mean, ' slots')} of "
        f"{data.block_size} on average, {percent(waste.share)} of the slots of the blocks they held. A block of "
        f"{data.block_size} tokens is taken whole."
    )


def _map(state: State, data: RunData) -> None:
    res = _logged(data)
    if res is None:
        return
    keep("coloring", default="state", read=one_of(COLORINGS))
    left, right = st.columns([2, 3])
    by = left.segmented_control("Coloured by", COLORINGS, key="coloring", required=True) or "state"
    last = max(int(res.block.max()), 2)  # a slider needs two ends; block 0 is never given to anybody
    low, high = right.slider("Blocks", 1, last, (1, last), key=f"blocks of {data.run.path}: {last}")
    window = data.within(state.window)
    cells = maps.block_map(res, window, (low, high))
    preempted = data.events("preempted").time_s
    inside = preempted[(preempted >= window[0]) & (preempted <= window[1])].to_list()
    names = res.request_ids.to_pylist()
    time_chart(charts.block_map(cells, names, by, inside), "block_map", state)
    every = (
        "every block"
        if len(cells.block_ids) > high - low
        else f"{len(cells.block_ids)} of {high - low + 1:,} blocks"
    )
    st.caption(
        f"{every}, each at {len(cells.times_s)} instants; a shorter window and fewer blocks show more. Dotted lines: "
        f"{counted(len(inside), 'preemption')}"
        + (f", the first {charts.MARKS_AT_MOST} drawn. " if len(inside) > charts.MARKS_AT_MOST else ". ")
        + "The owner is who brought the content in, or took it back from the free blocks."
        + ("" if res.knows_releases else " An older run: blocks count as held until their content was gone.")
    )
    block = int(
        st.number_input("Life of one block", 1, last, low, key=f"block of {data.run.path}: {last}, {low}")
    )
    _one_block(res, block)


def _one_block(res: Residencies, block: int) -> None:
    mine = np.flatnonzero(res.block == block)[:200]
    ends = np.array(["freed", "evicted", "reused", "still there"])
    st.dataframe(
        {
            "request": res.request_ids.take(res.request[mine]).to_pylist(),
            "from (s)": res.begin[mine],
            "released (s)": res.released[mine],
            "gone (s)": res.until[mine],
            "ended": ends[res.ended[mine]],
            "most references": res.peak_references[mine],
        },
        key="one_block",
        hide_index=True,
    )


def _fills(state: State, data: RunData) -> None:
    res = _logged(data)
    if res is None:
        return
    low, high = data.within(state.window)
    keep("at_s", "at", read=positive)
    st.session_state["at_s"] = min(max(st.session_state.get("at_s") or _fullest(data, low, high), low), high)
    time_s = float(st.number_input("At (s)", low, high, key="at_s", format="%.4f"))
    held = holding(res, time_s, data.usable_blocks, running_at(data, res, time_s))
    st.plotly_chart(charts.filled_by(held), key="filled_by")
    st.caption(
        f"{held.total:,} usable blocks of {data.block_size} tokens at {time_s:.4f} s. A block counts to the running "
        "request that brought its content in, once, however many share it; `shared, bringer gone` are those that "
        "others still hold."
    )


def _fullest(data: RunData, low: float, high: float) -> float:
    """The instant of the window with most blocks in use: what people ask about."""
    steps = data.steps((low, high), ("start_s", "used_blocks")).frame
    steps = steps[steps.start_s >= low]
    return float(steps.start_s.iloc[int(steps.used_blocks.to_numpy().argmax())]) if len(steps) else low


def _lost(state: State, data: RunData) -> None:
    table = kv_losses.preemptions(data, data.within(state.window))
    left, middle, right = st.columns(3)
    left.metric(
        "Preemptions in the window",
        f"{len(table):,}" + ("+" if len(table) == kv_losses.LOSSES_AT_MOST else ""),
    )
    middle.metric("Computed tokens lost", f"{int(table.lost_tokens.sum()):,}")
    right.metric("Of these found again", f"{int(table.found_tokens.sum()):,}")
    st.dataframe(table.rename(columns=HEADINGS), key="preemptions", hide_index=True)
    st.caption(
        "A preemption gives up all blocks of its request; what it had computed is lost but for what the prefix cache "
        "still has when it resumes. Before: after the schedule call before; after: after the one that preempted."
    )


def _reuse(state: State, data: RunData) -> None:
    del state  # of the whole run
    res = _logged(data)
    if res is None:
        return
    st.plotly_chart(charts.spans(res.spans), key="spans")
    st.caption(
        "Of the whole run. Lifetime: from being taken to being gone, over all times a content was taken back. "
        "The first bar of each holds also what took no time at all."
    )
    st.plotly_chart(charts.hits(res.spans.hits), key="hits")
    st.subheader("Why prompt tokens were not hits")
    if not data.run.config["engine"]["cache"]["enable_prefix_caching"]:
        st.info("Prefix caching was off.")
        return
    found = hit_loss(data, res, data.block_size)
    parts = {
        "found in the cache": found.hit,
        "new": found.new,
        "evicted before": found.evicted,
        "there, out of reach": found.unreachable,
        "last block rule": found.last_block,
        "shorter than a block": found.short,
    }
    st.plotly_chart(charts.hit_loss(parts), key="hit_loss")
    st.caption(
        f"{found.prompt:,} prompt tokens at first admissions. Evicted before: the content had been there and was "
        "dropped. Out of reach: another block had it, but it was being computed at the same time for another request, "
        "or an earlier block of the prompt was missing. Last block rule: a step must compute one token at least, so "
        "the last block of a prompt that is there as a whole is computed again. Shorter than a block: the rest of a "
        f"prompt behind its last full block of {data.block_size} tokens cannot be found."
    )


def _tree(state: State, data: RunData) -> None:
    del state  # of the whole run
    if not data.has_engine:
        st.info("This run has no prompts.")
        return
    tree = _read_tree(data)
    if not tree.roots:
        st.info("No two prompts of this run begin with the same block.")
        return
    st.plotly_chart(charts.prefix_tree(tree.roots, data.block_size), key="prefix_tree")
    st.caption(
        f"Beginnings that at least two of the first {counted(tree.requests_read, 'prompt')} share, in blocks of "
        f"{data.block_size} tokens; the taller a box, the more requests. Click a box to go into it."
    )
    if (res := data.residencies) is not None:
        root = tree.roots[0]
        computed, evicted = computed_and_evicted(data, res, root.contents)
        st.caption(
            f"The beginning that most share ({counted(root.requests, 'request')}, {len(root.contents)} blocks): its "
            f"blocks were computed {counted(computed, 'time')} in all and evicted {counted(evicted, 'time')}."
        )


@st.cache_resource(max_entries=4, show_spinner="Reading prompts", hash_funcs={RunData: lambda d: d.identity})
def _read_tree(data: RunData) -> PrefixTree:
    return prefix_tree(data)


@st.cache_resource(max_entries=4, show_spinner=False, hash_funcs={RunData: lambda d: d.identity})
def _last_blocks(data: RunData) -> kv_losses.LastBlocks:
    return kv_losses.last_blocks(data)


def _logged(data: RunData) -> Residencies | None:
    if data.residencies is None:
        st.info(NOT_LOGGED)
    return data.residencies


VIEWS: dict[str, Callable[[State, RunData], None]] = {
    "Occupancy": _occupancy,
    "Block map": _map,
    "What fills the pool": _fills,
    "What preemptions lost": _lost,
    "Reuse": _reuse,
    "Prefix tree": _tree,
}
