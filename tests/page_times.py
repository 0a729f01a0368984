"""Opens every page of the dashboard for some run folders and prints, as JSON, how long the server took and its memory.

    python tests/page_times.py SMALL FOLDER [FOLDER]

The pages are those of the second folder; the first only has the server import what it needs, and is where it starts. A
process of its own, so that its memory is that of the dashboard's server. Times are those of a switch by the menu: the
page's columns are read, the figures made and handed over; the browser's part is not in them.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter, process_time

from streamlit.testing.v1 import AppTest

from servetwin.dashboard.launch import APP
from servetwin.dashboard.pages import FIRST_PAGE, PAGES

LIMIT_S = 120


def main(folders: list[str]) -> None:
    sys.argv = [str(APP), *folders]
    app = AppTest.from_file(str(APP), default_timeout=LIMIT_S).run()
    found = {FIRST_PAGE: measured(app, app.selectbox(key="run").select(Path(folders[1])).run)}
    app.session_state["other_run"] = folders[-1]
    found |= {page: measured(app, partial(opened, app, page)) for page in PAGES if page != FIRST_PAGE}
    print(json.dumps(found))


def measured(app: AppTest, show: Callable[[], object]) -> dict[str, float]:
    """Of showing one page: times, the most memory so far, the most points that one of its figures sends."""
    wall, processor = perf_counter(), process_time()
    show()
    return {
        "wall_s": perf_counter() - wall,
        "processor_s": process_time() - processor,
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "points": most_points(app),
    }


def opened(app: AppTest, page: str) -> None:
    """As the menu does."""
    (app._page_hash,) = (
        number for number, info in app._registered_pages.items() if info["url_pathname"] == page
    )
    app.run()
    if app.exception or app.error:
        raise SystemExit(f"{page}: {[e.value for e in (*app.exception, *app.error)]}")


def most_points(app: AppTest) -> int:
    """Of the figures on the page, the one that sends most points to the browser."""
    figures = [json.loads(chart.proto.spec) for chart in app.get("plotly_chart")]
    return max((sum(num_points(trace) for trace in figure["data"]) for figure in figures), default=0)


def num_points(trace: dict[str, object]) -> int:
    """Of its longest array; arrays of numbers come as base64 of their bytes."""
    return max((length(value) for value in trace.values()), default=0)


def length(value: object) -> int:
    if isinstance(value, dict) and "bdata" in value:
        return len(value["bdata"]) * 3 // 4 // int(value["dtype"][-1])
    return len(value) if isinstance(value, list) else 0


if __name__ == "__main__":
    assert all(Path(folder).is_dir() for folder in sys.argv[1:])
    main(sys.argv[1:])
