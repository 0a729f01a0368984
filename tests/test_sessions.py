"""Sessions: later turns wait for their answers, and begin with blocks that the turns before have left in the cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from engines import engine_config
from hypothesis import given
from hypothesis import strategies as st

from servetwin.sim.config import EngineConfig, RunConfig
from servetwin.sim.events import EventLog, MemorySink
from servetwin.sim.metrics import summarize
from servetwin.sim.runs import differences
from servetwin.sim.simulation import simulate
from servetwin.sim.steptime.modelled import ConstantStepModel, ModelledStepTimer
from servetwin.sim.token_source import TokenSource
from servetwin.workloads import ListWorkload, RequestSpec, Workload, WorkloadError
from servetwin.workloads.closed_loop import ClosedLoop, Users, as_workload

S = 1_000_000_000
BLOCK = 4


@dataclass
class Outcome:
    """A run, and its requests as they were received."""

    log: MemorySink
    received: list[RequestSpec]

    def column(self, name: str) -> dict[str, float]:
        return dict(zip(self.log.requests.request_id, self.log.requests[name], strict=True))


def big_engine() -> EngineConfig:
    """One whose cache never runs full."""
    return engine_config(usable_blocks=4000, block_size=BLOCK, max_model_len=4000, caching=True)


def serve(
    workload: Workload,
    *,
    step_s: float = 1.0,
    config: EngineConfig | None = None,
    max_concurrency: int | None = None,
) -> Outcome:
    tokens, log, received = TokenSource(1000), MemorySink(), []
    simulate(
        RunConfig(engine=config or big_engine(), executor="constant"),
        workload,
        ModelledStepTimer(ConstantStepModel(round(step_s * S)), tokens, "constant"),
        EventLog(log, log_blocks=False),
        tokens=tokens,
        plan_tokens=False,
        log_blocks=False,
        on_request=received.append,
        max_concurrency=max_concurrency,
    )
    return Outcome(log, received)


def turn(
    number: int,
    prompt: int,
    output: int,
    *,
    context: int | None = None,
    session: str = "s",
    arrival_s: float = 0.0,
    think_s: float = 0.0,
    **rest: object,
) -> RequestSpec:
    return RequestSpec(
        request_id=f"{session}-{number}",
        arrival_s=arrival_s,
        prompt_tokens=prompt,
        output_tokens=output,
        session_id=session,
        turn=number,
        context_tokens=context,
        think_time_s=think_s if number else None,
        **rest,  # type: ignore[arg-type]
    )


# ---------------------------------------------------------------- when turns are sent


@pytest.mark.parametrize("step_s", [1.0, 6.0])
def test_report_70_a_closed_loop_waits_for_the_answer(step_s: float) -> None:
    """Turn 1 takes 5 steps; turn 2 is sent one second after its end, however long that took."""
    session = [turn(0, 4, 5), turn(1, 4, 1, arrival_s=6.0, think_s=1.0)]
    closed = as_workload(session, {})
    assert closed.about["loop"] == "closed"
    ran = serve(closed, step_s=step_s)
    assert ran.column("finish_s")["s-0"] == 5 * step_s
    assert ran.column("arrival_s")["s-1"] == 5 * step_s + 1


def test_report_70_an_open_loop_keeps_the_recorded_times() -> None:
    session = [turn(0, 4, 5), turn(1, 4, 1, arrival_s=6.0, think_s=1.0)]
    open_loop = as_workload(session, {}, "open")
    assert open_loop.about["loop"] == "open"
    assert serve(open_loop, step_s=6.0).column("arrival_s")["s-1"] == 6.0


def test_without_think_times_the_recorded_times_hold() -> None:
    """Unless a closed loop is asked for, in which the next turn follows at once."""
    session = [turn(0, 4, 5), replace(turn(1, 4, 1, arrival_s=2.0), think_time_s=None)]
    assert as_workload(session, {}).about["loop"] == "open"
    assert serve(as_workload(session, {}, "closed")).column("arrival_s")["s-1"] == 5.0


def test_a_closed_loop_without_sessions_is_refused() -> None:
    lone = RequestSpec(request_id="a", arrival_s=0, prompt_tokens=1, output_tokens=1)
    with pytest.raises(WorkloadError, match="loop 'closed': no request has a session_id"):
        as_workload([lone], {}, "closed")


def test_turns_follow_one_another_whatever_their_order_in_the_file() -> None:
    """Also behind a turn that is missing, that was refused, and that its client gave up."""
    late, refused = turn(3, 4, 1, think_s=2.0), turn(2, 5000, 1)
    given_up = turn(5, 4, 50, abort_s=20.0)
    ran = serve(ClosedLoop([turn(6, 4, 1), given_up, late, refused, turn(0, 4, 3)]))
    arrivals = ran.column("arrival_s")
    assert arrivals["s-0"] == 0
    assert arrivals["s-2"] == 3.0
    assert arrivals["s-3"] == 5.0
    assert arrivals["s-5"] == ran.column("finish_s")["s-3"]
    assert arrivals["s-6"] == ran.column("finish_s")["s-5"] >= 20.0


def test_the_first_turn_here_is_sent_at_its_arrival_though_its_parents_are_missing() -> None:
    assert serve(ClosedLoop([turn(4, 4, 1, arrival_s=7.5)])).column("arrival_s") == {"s-4": 7.5}


def test_users_send_one_request_after_the_other() -> None:
    """Two users, one second of thinking: never more than two in flight, each waits for its own answer."""
    specs = [
        RequestSpec(request_id=str(i), arrival_s=0, prompt_tokens=4, output_tokens=2 + i % 2)
        for i in range(6)
    ]
    ran = serve(Users(specs, users=2, think_times_s=[1.0] * 6))
    arrival, finish = ran.column("arrival_s"), ran.column("finish_s")
    assert arrival["0"] == arrival["1"] == 1.0
    for i in range(2, 6):
        assert arrival[str(i)] == finish[str(i - 2)] + 1.0


# ---------------------------------------------------------------- what turns share

lengths = st.tuples(st.integers(1, 40), st.integers(1, 30), st.floats(0, 1))
"""New tokens of a turn, tokens of its answer, and which part of the context it keeps."""


@given(turns=st.lists(lengths, min_size=2, max_size=5), loop=st.sampled_from(["open", "closed"]))
def test_hits_are_those_of_the_closed_form(turns: list[tuple[int, int, float]], loop: str) -> None:
    """A turn finds the whole blocks of the context it keeps, less the last token, which nobody computed.

    At least one token of a prompt is computed anyway.
    """
    session: list[RequestSpec] = []
    expected: dict[str, int] = {"s-0": 0}
    length = 0
    for number, (new, output, part) in enumerate(turns):
        context = round(length * part) if number else None
        prompt = new + (context or 0)
        session.append(turn(number, prompt, output, context=context, arrival_s=1000.0 * number))
        if context is not None:
            expected[f"s-{number}"] = min(context, length - 1, prompt - 1) // BLOCK * BLOCK
        length = prompt + output
    ran = serve(as_workload(session, {}, loop))  # type: ignore[arg-type]
    assert {name: int(n) for name, n in ran.column("cached_tokens").items()} == expected


def test_another_session_shares_nothing_but_prefix_ids() -> None:
    """Two sessions begin with the same system prompt of two blocks; their own tokens differ."""
    head = {"prefix_ids": (7, 8), "prefix_block_tokens": BLOCK}
    first = [turn(0, 20, 4, **head), turn(1, 30, 4, context=24, think_s=1.0, **head)]
    second = [replace(r, request_id=f"t{r.request_id}", session_id="t", arrival_s=100.0) for r in first]
    cached = serve(ClosedLoop([*first, *second])).column("cached_tokens")
    assert cached["s-0"] == 0
    assert cached["s-1"] == cached["ts-1"] == 20
    assert cached["ts-0"] == 2 * BLOCK


def test_a_prompt_of_pieces_reads_the_same_in_its_next_turn() -> None:
    """The tokens that an executor gets, answers included, and so the contents of the blocks."""
    tokens = TokenSource(500)
    first, second = turn(0, 10, 5), turn(1, 18, 3, context=15)
    before = tokens.prompt(first)
    tokens.ended(first, [11, 12, 13, 14, 15])
    after = tokens.prompt(second)
    assert after.token_ids()[:15] == [*before.token_ids(), 11, 12, 13, 14, 15]
    assert len(after.token_ids()) == after.num_tokens == 18
    assert after.content(0, 8) == before.content(0, 8)
    assert after.content(0, 8) != after.content(8, 16)


def test_a_shorter_answer_than_planned_leaves_more_new_tokens() -> None:
    """The prompt keeps its length."""
    tokens = TokenSource(500)
    first, second = turn(0, 10, 5), turn(1, 18, 3, context=15)
    tokens.prompt(first)
    tokens.ended(first, [11])
    after = tokens.prompt(second).token_ids()
    assert len(after) == 18 and after[10] == 11


# ---------------------------------------------------------------- a replay is the run again


@st.composite
def sessions(draw: st.DrawFn) -> list[RequestSpec]:
    """Turns of some sessions, between requests of their own."""
    specs: list[RequestSpec] = []
    for s in range(draw(st.integers(1, 3))):
        length, start_s = 0, draw(st.integers(0, 20)) / 4
        for number in range(draw(st.integers(1, 4))):
            context = draw(st.integers(0, length)) if number else None
            prompt, output = (context or 0) + draw(st.integers(1, 20)), draw(st.integers(1, 8))
            think_s = draw(st.integers(0, 8)) / 4
            arrival_s = start_s + 10 * number
            session = f"s{s}"
            specs.append(
                turn(
                    number,
                    prompt,
                    output,
                    context=context,
                    session=session,
                    arrival_s=arrival_s,
                    think_s=think_s,
                )
            )
            length = prompt + output
    for i in range(draw(st.integers(0, 4))):
        arrival_s = draw(st.integers(0, 40)) / 4
        specs.append(
            RequestSpec(request_id=f"lone-{i}", arrival_s=arrival_s, prompt_tokens=9, output_tokens=3)
        )
    return specs


@given(
    requests=sessions(),
    loop=st.sampled_from(["open", "closed"]),
    max_concurrency=st.none() | st.integers(1, 3),
)
def test_report_64_replaying_what_was_received_gives_the_same_log(
    requests: list[RequestSpec], loop: str, max_concurrency: int | None
) -> None:
    """Open and closed loop, with and without a limit of the client, on an engine that preempts."""
    config = engine_config(usable_blocks=40, block_size=BLOCK, max_model_len=120, caching=True)
    options = {"config": config, "max_concurrency": max_concurrency, "step_s": 0.25}
    first = serve(as_workload(requests, {}, loop), **options)  # type: ignore[arg-type]
    again = serve(as_workload(first.received, {}, loop), **options)  # type: ignore[arg-type]
    assert differences(first.log, again.log) == []
    if loop == "closed":
        # Whoever sends at the times that came about gets the same, too.
        opened = serve(as_workload(first.received, {}, "open"), **options)  # type: ignore[arg-type]
        if max_concurrency is None:
            assert differences(first.log, opened.log) == []


# ---------------------------------------------------------------- --max-concurrency


def lone(i: int, arrival_s: float, output: int = 2) -> RequestSpec:
    return RequestSpec(request_id=str(i), arrival_s=arrival_s, prompt_tokens=4, output_tokens=output)


def test_a_client_with_a_limit_sends_late_and_both_latencies_are_told() -> None:
    """One in flight, 2 s each: the second arrives at 1 s, is sent at 2 s, and has its first token at 3 s."""
    workload = ListWorkload([lone(0, 0.0), lone(1, 1.0), lone(2, 10.0)])
    ran = serve(workload, max_concurrency=1)
    assert ran.column("sent_s") == {"0": 0.0, "1": 2.0, "2": 10.0}
    assert ran.column("arrival_s")["1"] == 1.0
    summary = summarize(ran.log)
    assert summary["mean_ttft_ms"] == 1000.0
    assert summary["mean_client_queue_time_ms"] == pytest.approx(1000 / 3)
    assert summary["mean_ttft_including_client_queue_ms"] == pytest.approx(4000 / 3)
    assert summary["servetwin"]["formulas"]["ttft"] == "first_token - sent"
    without = summarize(serve(ListWorkload([lone(0, 0.0), lone(1, 1.0)])).log)
    assert without["servetwin"]["formulas"]["ttft"] == "first_token - arrival"
    assert "mean_client_queue_time_ms" not in without


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(1, 4))
def test_never_more_than_the_limit_are_in_flight_and_none_waits_without_need(
    arrivals: list[int], limit: int
) -> None:
    """Whoever was held back is sent in the instant in which another ends, in order of arrival; also within steps."""
    ran = serve(
        ListWorkload([lone(i, t / 8, 1 + i % 3) for i, t in enumerate(arrivals)]),
        max_concurrency=limit,
        step_s=0.25,
    )
    frame = ran.log.requests.sort_values(["sent_s", "arrival_s"])
    for row in frame.itertuples():
        in_flight = frame[(frame.sent_s <= row.sent_s) & (frame.finish_s > row.sent_s)]
        assert len(in_flight) <= limit
        assert row.sent_s == row.arrival_s or row.sent_s in set(frame.finish_s)
    assert frame.arrival_s.is_monotonic_increasing
