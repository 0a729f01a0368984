"""What `servetwin serve-metrics` does: a clock that runs through a run, and a server that shows it as of then."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, time
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from servetwin.sim.commands.errors import UsageError
from servetwin.sim.commands.export_flags import opened
from servetwin.sim.commands.metrics_flags import MetricsFlags, metrics_of
from servetwin.sim.commands.show import say
from servetwin.sim.export.prometheus import RunMetrics
from servetwin.sim.run_files import RunFolderError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

    from prometheus_client import Metric

HOST = "127.0.0.1"
PLAIN = "text/plain; version=0.0.4"


class Replay:
    """A collector of `prometheus_client`: the run as of the simulated second at which its clock stands."""

    def __init__(self, metrics: RunMetrics, *, speed: float, from_s: float, loop: bool) -> None:
        self._metrics, self._speed, self._from_s, self._loop = metrics, speed, from_s, loop
        self._started, self._started_wall_s = monotonic(), time()
        self.lasts_s = (metrics.end_s - from_s) / speed
        """Seconds of the wall clock for one time through the run."""

    def collect(self) -> Iterable[Metric]:
        """Called at every scrape, in the server's thread."""
        lap, at_s = self._place(monotonic() - self._started)
        # A counter that begins again says since when it counts.
        return list(self._metrics.families(1e9 * at_s, self._started_wall_s + lap * self.lasts_s))

    def _place(self, elapsed_s: float) -> tuple[int, float]:
        """How often the run has been through, and the simulated second."""
        lap, within_s = 0, elapsed_s
        if self._loop:
            lap, within_s = int(elapsed_s // self.lasts_s), elapsed_s % self.lasts_s
        return lap, self._from_s + within_s * self._speed


def carry_out(path: Path, *, port: int, speed: float, from_s: float, loop: bool, flags: MetricsFlags) -> int:
    """Serves until SIGTERM or SIGINT; the exit code is 0 then. Raises UsageError and RunFolderError."""
    if not 0 <= port <= 65_535:
        raise UsageError(f"--port {port}: must be from 1 to 65535, or 0 for any that is free")
    if not 0 < speed < float("inf"):
        raise UsageError(f"--speed {speed:g}: must be above 0, and finite")
    if not 0 <= from_s < float("inf"):
        raise UsageError(f"--from-s {from_s:g}: must be 0 or more, and finite")
    metrics = metrics_of(opened(path), flags, created_s=time())
    if metrics.end_s <= 0:
        raise RunFolderError(f"{path}: the run ends where it begins: there is nothing to replay")
    if from_s >= metrics.end_s:
        raise UsageError(f"--from-s {from_s:g}: the run ends at {metrics.end_s:,.3f} s")
    with _told_to_end() as end:
        replay = Replay(metrics, speed=speed, from_s=from_s, loop=loop)
        server = _server(replay, port)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        after = "then it begins again" if loop else "then the values stay"
        say(
            f"metrics: http://{HOST}:{server.server_port}/metrics ({metrics.end_s - from_s:,.1f} s of simulated time "
            f"in {replay.lasts_s:,.1f} s, {after}; Ctrl-C ends it)"
        )
        if not loop and not end.wait(min(replay.lasts_s, threading.TIMEOUT_MAX)):
            say("the run is over; the values stay as they are")
        end.wait()
        server.shutdown()
        server.server_close()
        thread.join()
    return 0


class _Quiet(WSGIRequestHandler):
    """Scrapes are not worth a line each."""

    def log_message(self, format: str, *args: object) -> None:
        pass


def _server(replay: Replay, port: int) -> WSGIServer:
    """That of the Prometheus client, on the loopback. Raises UsageError for a port that cannot be had."""
    from prometheus_client import CollectorRegistry, make_wsgi_app
    from prometheus_client.exposition import ThreadingWSGIServer

    registry = CollectorRegistry(auto_describe=False)
    registry.register(replay)
    answer = make_wsgi_app(registry)

    def plain(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        # To scrapers that ask for OpenMetrics without more the client says vllm_... instead of vllm:...
        body: Iterable[bytes] = answer({**environ, "HTTP_ACCEPT": PLAIN}, start_response)
        return body

    try:
        return make_server(HOST, port, plain, ThreadingWSGIServer, handler_class=_Quiet)
    except OSError as e:
        raise UsageError(f"--port {port}: cannot be served on: {e.strerror or e}") from e


@contextmanager
def _told_to_end() -> Iterator[threading.Event]:
    """Set once Ctrl-C or SIGTERM has come."""
    end = threading.Event()
    old = {number: signal.signal(number, lambda *_: end.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield end
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
