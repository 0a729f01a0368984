"""A story as lines of text: what happened, line by line, and where the time went."""

from __future__ import annotations

from collections.abc import Iterator

from servetwin.sim.explain import Moment, Phase, Story
from servetwin.sim.explain_life import LATENCIES
from servetwin.sim.explain_waits import counted
from servetwin.sim.units import NS_PER_S, ns_to_seconds


def lines(story: Story) -> Iterator[str]:
    """The whole story, ready to be printed."""
    yield _title(story)
    if story.partial is not None:
        yield f"partial: {story.partial}; the story ends where the log does"
    yield ""
    for moment in story.moments:
        yield f"{ns_to_seconds(moment.time_ns):12.4f} s  {_sentence(moment, story)}"
    yield ""
    yield from _breakdown(story)


def _title(story: Story) -> str:
    tokens = []
    if story.num_prompt_tokens is not None:
        tokens = [
            counted(story.num_prompt_tokens, "prompt token"),
            counted(story.num_output_tokens or 0, "output token"),
        ]
    return f"request {story.request_id}: " + ", ".join([*tokens, story.outcome or "not ended"])


def _sentence(moment: Moment, story: Story) -> str:
    match moment.kind:
        case "wait":
            assert moment.until_ns is not None, "a wait has an end"
            waited = milliseconds(moment.until_ns - moment.time_ns)
            return f"waited {waited}, {moment.reason}: {moment.text}"
        case "queued":
            return f"{moment.text}, {milliseconds(moment.time_ns - story.moments[0].time_ns)} later"
        case "first token":
            return f"{moment.text}{_figures(story, 'ttft')}"
        case "finished":
            return f"{moment.text}{_figures(story, 'e2e', 'tpot')}"
        case _:
            return moment.text


def _figures(story: Story, *names: str) -> str:
    """Latencies with their formulas."""
    known = [(name, story.latencies_ns[name]) for name in names if name in story.latencies_ns]
    held_back = any(moment.kind == "sent" for moment in story.moments)
    formulas = {name: LATENCIES[name].words(held_back=held_back) for name, _ in known}
    return "".join(f"; {n.upper()} {milliseconds(ns)} = {formulas[n]}" for n, ns in known)


def _breakdown(story: Story) -> Iterator[str]:
    yield "where its time went"
    named = [(_phase(p), p.duration_ns) for p in story.phases] + [("in all", story.total_ns)]
    width = max(len(name) for name, _ in named)
    for name, duration_ns in named:
        share = duration_ns / story.total_ns if story.total_ns else 1.0
        yield f"  {name:<{width}}  {milliseconds(duration_ns, of_ns=story.total_ns):>14}  {share:7.1%}"


def _phase(phase: Phase) -> str:
    return phase.name if phase.reason is None else f"{phase.name}: {phase.reason}"


def milliseconds(duration_ns: int, *, of_ns: int | None = None) -> str:
    """A duration with about four digits, or with as many decimals as the whole that it is a part of has."""
    whole_ms = (duration_ns if of_ns is None else of_ns) * 1000 / NS_PER_S
    decimals = next((d for limit, d in ((10, 3), (100, 2), (1000, 1)) if whole_ms < limit), 0)
    return f"{duration_ns * 1000 / NS_PER_S:,.{decimals}f} ms"
