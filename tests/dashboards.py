"""The dashboard in tests: run folders small enough to know by heart, and pages without a browser."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from engines import NO_SHAPE
from streamlit.testing.v1 import AppTest

from servetwin.dashboard.launch import APP
from servetwin.dashboard.pages import FIRST_PAGE
from servetwin.sim.contract import CachedRequestData, ModelRunnerOutput, SchedulerOutput, StepResult
from servetwin.sim.events import EventLog
from servetwin.sim.records import Admission, EngineCoreOutputs, Finish, Frame, ScheduleRecord
from servetwin.sim.runs import RunWriter
from servetwin.sim.timeline import StepTimes
from servetwin.workloads import RequestSpec

S = 1_000_000_000


def write_run(path: Path, state: str = "complete") -> Path:
    """A run of one request that gets three tokens, one a second."""
    writer = RunWriter.create(path, {"config": {}})
    log = EventLog(writer)
    log.arrived(RequestSpec(request_id="a", arrival_s=0.0, prompt_tokens=4, output_tokens=3), 0)
    for n in range(3):
        record = ScheduleRecord(running=1, used_blocks=1 + n, free_blocks=9 - n)
        if n == 0:
            record.admitted = [Admission("a", False, 0, 1)]
        cached = CachedRequestData(["a"], new_block_ids=[None], num_computed_tokens=[n])
        frame = Frame(n, n * S, SchedulerOutput([], cached, {"a": 1}, 1, {}, [0], set()), record)
        log.scheduled(frame)
        ended = n == 2
        outputs = EngineCoreOutputs({"a": [7]}, {"a": Finish("length", None)} if ended else {})
        result = StepResult(0, S, ModelRunnerOutput([], {}, []), "constant", shape=NO_SHAPE)
        log.stepped(frame, result, StepTimes(0, n * S, n * S, (n + 1) * S), (n + 1) * S, outputs)
    log.close(3 * S)
    if state == "complete":
        writer.complete()
    elif state == "failed":
        writer.fail("interrupted")
    return path


def shown(monkeypatch: pytest.MonkeyPatch, *folders: Path, page: str = FIRST_PAGE, **query: str) -> AppTest:
    """A page for these folders, opened by a link with this query; fails when it raised."""
    monkeypatch.setattr(sys, "argv", [str(APP), *map(str, folders)])
    app = AppTest.from_file(str(APP), default_timeout=60)
    for name, value in query.items():
        app.query_params[name.rstrip("_")] = value
    app.run()
    return app if page == FIRST_PAGE else opened(app, page)


def opened(app: AppTest, page: str) -> AppTest:
    """Another page of the same session, as by the menu."""
    assert not app.exception
    # AppTest switches between files only; pages that are functions have no other way in.
    (app._page_hash,) = (
        page_hash
        for page_hash, info in app._registered_pages.items()
        if info["url_pathname"] == ("" if page == FIRST_PAGE else page)
    )
    app.run()
    assert not app.exception, app.exception[0].message
    return app


def metrics(app: AppTest) -> dict[str, str]:
    """Label -> value of the key figures on a page."""
    return {m.label: m.value for m in app.metric}
