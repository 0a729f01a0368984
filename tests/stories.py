"""An event log told by hand: what happened, step by step, in whole seconds."""

from __future__ import annotations

from engines import NO_SHAPE

from servetwin.sim.contract import CachedRequestData, ModelRunnerOutput, SchedulerOutput, StepResult
from servetwin.sim.events import EventLog, MemorySink
from servetwin.sim.records import Admission, EngineCoreOutputs, Finish, Frame, Preemption, ScheduleRecord
from servetwin.sim.timeline import StepTimes
from servetwin.workloads import RequestSpec

S = 1_000_000_000


def request(name: str, arrival_s: float = 0.0, prompt: int = 4) -> RequestSpec:
    return RequestSpec(request_id=name, arrival_s=arrival_s, prompt_tokens=prompt, output_tokens=9)


class Story:
    """Tells a log one step after another, in whole seconds."""

    def __init__(self, **options: bool) -> None:
        self.sink = MemorySink()
        self.log = EventLog(self.sink, **options)
        self.steps = 0

    def schedule(self, at: int, rows: dict[str, int] | None = None, **record: object) -> Frame:
        """A schedule call with `rows` (request -> tokens) and the given fields of its record."""
        scheduled = rows or {}
        known = CachedRequestData(
            req_ids=[*scheduled],
            new_block_ids=[None] * len(scheduled),
            num_computed_tokens=[4] * len(scheduled),
        )
        plan = SchedulerOutput([], known, scheduled, sum(scheduled.values()), {}, [0], set())
        frame = Frame(self.steps, at * S, plan, ScheduleRecord(**record))  # type: ignore[arg-type]
        self.steps += 1
        self.log.scheduled(frame)
        return frame

    def update(self, frame: Frame, at: int, *tokens: str, **finished: str) -> None:
        """The step ends: one token each for `tokens`; `finished` gives finish reasons."""
        result = StepResult(
            0, at * S - frame.start_ns, ModelRunnerOutput([], {}, []), "story", shape=NO_SHAPE
        )
        outputs = EngineCoreOutputs(
            {r: [7] for r in tokens}, {r: Finish(f, None) for r, f in finished.items()}
        )
        self.log.stepped(frame, result, StepTimes(0, frame.start_ns, frame.start_ns, at * S), at * S, outputs)

    def step(self, start: int, end: int, *tokens: str, **finished: str) -> None:
        """A step in which every request of `tokens` computes and gets one token."""
        self.update(self.schedule(start, dict.fromkeys(tokens, 1)), end, *tokens, **finished)

    def waits(self) -> list[tuple[str, str, float, float]]:
        rows = self.sink.events[self.sink.events.kind == "wait"]
        return list(zip(rows.request_id, rows.reason, rows.time_s, rows.until_s, strict=True))


def preempted_once() -> MemorySink:
    """Case 54 of the reports: tokens at 3, 4, 10, 11, 12 s, with a preemption at 5 s that ends at 9 s."""
    story = Story(save_tokens=True)
    story.log.arrived(request("a"), 0)
    admitted = Admission("a", resumed=False, hit_tokens=2, blocks=1)
    story.update(story.schedule(2, {"a": 4}, admitted=[admitted]), 3, "a")
    story.step(3, 4, "a")
    story.update(story.schedule(5, preempted=[Preemption("a", 5, 2, False)], head="a"), 6)
    back = Admission("a", resumed=True, hit_tokens=3, blocks=2)
    story.update(story.schedule(9, {"a": 2}, admitted=[back], recomputed={"a": 2}), 10, "a")
    story.step(10, 11, "a")
    story.step(11, 12, "a", a="length")
    story.log.close(12 * S)
    return story.sink


def four_tokens_a_step() -> MemorySink:
    """Case 55 of the reports: the first token at 1 s, four at 2 s, four at 3 s."""
    story = Story(save_tokens=True)
    story.log.arrived(request("a"), 0)
    for end, tokens in ((1, [1]), (2, [2, 3, 4, 5]), (3, [6, 7, 8, 9])):
        frame = story.schedule(end - 1, {"a": len(tokens)})
        result = StepResult(0, S, ModelRunnerOutput([], {}, []), "story", shape=NO_SHAPE)
        times = StepTimes(0, frame.start_ns, frame.start_ns, end * S)
        finished = {"a": Finish("length", None)} if end == 3 else {}
        story.log.stepped(frame, result, times, end * S, EngineCoreOutputs({"a": tokens}, finished))
    story.log.close(3 * S)
    return story.sink
