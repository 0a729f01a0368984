"""ServeGen client folders: requests are drawn from the fitted behaviour of each client, so a row is a drawn request.

In each window of 600 s a client sends rate x 600 requests. Their gaps are Gamma or Weibull with the window's
shape, stretched so that they fill it exactly; lengths come from the distribution of its six hours by the inverse of
its cumulative function. Differences from ServeGen's own generator, which are deliberate: prompt, answer and
arrivals are drawn independently (one uniform number for all fields makes them perfectly rank-correlated); a client
that is idle sends nothing, and none is forced to send at the edge of a window: n requests lie between n + 1
gaps, and a fraction of a request is one with that probability. The window's rate counts, not its fitted scale.

Every client, window and use has a random stream of its own, so a longer or shorter `window_s` leaves the
requests of a window as they are. Source: github.com/alibaba/ServeGen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servetwin.workloads.spec import MAX_TOKENS, WorkloadError
from servetwin.workloads.streams import stream
from servetwin.workloads.traces.rows import BATCH_ROWS, OFFENCES_SHOWN, IntArray, Offence, Rows
from servetwin.workloads.traces.servegen_clients import (
    WINDOW_S,
    ClientFiles,
    Histogram,
    LengthHistograms,
    Window,
    client_files,
    read_windows,
)
from servetwin.workloads.traces.source import Head
from servetwin.workloads.traces.trace import Reading, TraceFormat

DEFAULT_SPAN_S = 3600
MAX_REQUESTS = 5_000_000
TEXTS = ("input_tokens", "text_tokens")
MEDIA = ("image", "audio", "video")
OUTPUT = "output_tokens"
FIELDS = (*TEXTS, *(f"{m}_{what}" for m in MEDIA for what in ("count", "tokens")), OUTPUT)
NO_LENGTHS = "no distribution of lengths"
GENERATED = "requests are drawn from the behaviour of each client, prompts and answers independently: none is recorded"
PER_IMAGE = "image_tokens are taken as those of one image: drawn image_count times for a request, and so on"

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Client:
    files: ClientFiles
    active: list[Window]


@dataclass(frozen=True, slots=True)
class Drawn:
    """Requests of one client in one window; shape [n] each."""

    client: int
    times_s: FloatArray
    prompt_tokens: IntArray
    output_tokens: IntArray


def _read(reading: Reading) -> None:
    clients = _clients(reading)
    begin_s, end_s = span = _span(reading, clients)
    reading.about |= {"clients": len(clients), "window_s": list(span), "seed": reading.options.seed}
    chosen = [(c, w) for c in clients for w in c.active if begin_s - WINDOW_S < w.start_s < end_s]
    expected = sum(window.mean_requests for _, window in chosen)
    if expected > MAX_REQUESTS:
        raise WorkloadError(
            f"{reading.source.path}: {begin_s:g} s to {end_s:g} s holds {expected:,.0f} requests: at most "
            f"{MAX_REQUESTS:,} can be drawn at once; choose a shorter time (window_s; --window)"
        )
    reading.notes.append(GENERATED)
    _emit(reading, _drawn(reading, chosen, span), begin_s)


# ---------------------------------------------------------------- what is drawn from


def _clients(reading: Reading) -> list[Client]:
    clients, idle, active = [], 0, 0
    for files in client_files(reading.source.file):
        windows = Rows(str(files.trace), reading.options.tolerance)
        found, idle_windows = read_windows(files.trace, windows)
        _take_over(reading.rows, windows, files.trace.name)
        clients.append(Client(files, found))
        idle, active = idle + idle_windows, active + len(found)
    reading.about |= {"active_windows": active, "idle_windows": idle}
    return clients


def _take_over(rows: Rows, windows: Rows, name: str) -> None:
    """Damaged windows count among the rows that were read and dropped."""
    rows.read += windows.read
    rows.dropped.update(windows.dropped)
    for offence in windows.offences:
        if sum(shown.reason == offence.reason for shown in rows.offences) < OFFENCES_SHOWN:
            rows.offences.append(Offence(offence.row, offence.reason, f"{name}: {offence.detail}"))


def _span(reading: Reading, clients: list[Client]) -> tuple[float, float]:
    starts = [window.start_s for client in clients for window in client.active]
    if not starts:
        raise WorkloadError(f"{reading.source.path}: none of its {len(clients)} clients is ever active")
    first, last = min(starts), max(starts) + WINDOW_S
    if reading.options.window_s is None:
        hour_ends = min(first + DEFAULT_SPAN_S, last)
        reading.notes.append(
            f"only the first active hour, {first} s to {hour_ends} s of {first} s to {last} s: choose with window_s "
            "(--window START:END)"
        )
        return first, hour_ends
    begin, end = reading.options.window_s
    if not (0 <= begin < end < math.inf):
        raise WorkloadError(
            f"window_s {begin!r} to {end!r}: must be two finite times in s, the second after the first"
        )
    if end <= first or begin >= last:
        raise WorkloadError(
            f"{reading.source.path}: window_s {begin:g} to {end:g}: no client is active then; "
            f"some are from {first} s to {last} s"
        )
    return begin, end


# ---------------------------------------------------------------- drawing


def _drawn(reading: Reading, chosen: list[tuple[Client, Window]], span: tuple[float, float]) -> list[Drawn]:
    drawn = []
    lengths: dict[int, LengthHistograms] = {}
    for client, window in chosen:
        number = client.files.number
        if number not in lengths:
            lengths[number] = LengthHistograms(client.files.dataset)
        histograms = lengths[number].at(window.start_s, FIELDS)
        uses = _Uses(reading.options.seed, number, window.start_s)
        times_s = _times_s(window, uses)
        inside = (times_s >= span[0]) & (times_s < span[1])
        if histograms is None or OUTPUT not in histograms or not any(f in histograms for f in TEXTS):
            missing = int(inside.sum())
            reading.rows.read += missing
            reading.rows.dropped[NO_LENGTHS] += missing
            continue
        if "image_count" in histograms and PER_IMAGE not in reading.notes:
            reading.notes.append(PER_IMAGE)
        prompt = _prompts(str(client.files.dataset), histograms, len(times_s), uses)
        output = histograms[OUTPUT].sample(len(times_s), uses.stream(OUTPUT))
        drawn.append(Drawn(number, times_s[inside], prompt[inside], output[inside]))
    return drawn


@dataclass(frozen=True, slots=True)
class _Uses:
    """The random streams of one client in one window."""

    seed: int
    client: int
    start_s: int

    def stream(self, use: str) -> np.random.Generator:
        return stream(self.seed, f"servegen {self.client} {self.start_s} {use}")


def _times_s(window: Window, uses: _Uses) -> FloatArray:
    rng = uses.stream("arrivals")
    n = math.floor(window.mean_requests + rng.random())
    draw = rng.weibull if window.pattern == "Weibull" else rng.standard_gamma
    # Gaps of a very small shape underflow to 0 or overflow: they are compared with the largest, before they are added.
    gaps = np.nan_to_num(draw(window.shape, n + 1))
    gaps = gaps / gaps.max() if gaps.max() > 0 else np.ones(n + 1)
    times_s = window.start_s + gaps.cumsum()[:-1] * (WINDOW_S / gaps.sum())
    # A last gap of practically nothing leaves a request at the edge, which belongs to the next window.
    inside: FloatArray = np.minimum(times_s, np.nextafter(window.start_s + WINDOW_S, 0))
    return inside


def _prompts(path: str, histograms: dict[str, Histogram], n: int, uses: _Uses) -> IntArray:
    """The text of each request, and the tokens of its images, sounds and videos."""
    text = next(field for field in TEXTS if field in histograms)
    prompt = histograms[text].sample(n, uses.stream(text))
    for medium in MEDIA:
        field = f"{medium}_tokens"
        if field not in histograms:
            continue
        counts = np.ones(n, dtype=np.int64)
        if f"{medium}_count" in histograms:
            counts = histograms[f"{medium}_count"].sample(n, uses.stream(f"{medium}_count"))
        if counts.sum() > MAX_REQUESTS:
            raise WorkloadError(
                f"{path}: {medium}_count: {counts.sum():,} in one window are more than {MAX_REQUESTS:,}"
            )
        pieces = histograms[field].sample(int(counts.sum()), uses.stream(field))
        prompt = prompt + np.bincount(np.repeat(np.arange(n), counts), pieces, n).astype(np.int64)
    if prompt.max(initial=0) > MAX_TOKENS:
        raise WorkloadError(f"{path}: a prompt of {prompt.max():,} tokens: must be at most {MAX_TOKENS:,}")
    return prompt


def _emit(reading: Reading, drawn: list[Drawn], begin_s: float) -> None:
    """Numbered in order of arrival; time 0 is the beginning of the window."""
    sizes = [len(d.times_s) for d in drawn]
    if not sum(sizes):
        raise WorkloadError(
            f"{reading.source.path}: no request falls into the time from {begin_s:g} s on (window_s; --window)"
        )
    times_s = np.concatenate([d.times_s for d in drawn])
    order = np.argsort(times_s, kind="stable")
    prompt = np.concatenate([d.prompt_tokens for d in drawn])[order]
    output = np.concatenate([d.output_tokens for d in drawn])[order]
    client = np.repeat([d.client for d in drawn], sizes)[order]
    arrival_s = times_s[order] - begin_s
    for start in range(0, len(order), BATCH_ROWS):
        part = slice(start, start + BATCH_ROWS)
        columns: dict[str, Any] = {
            "client_id": client[part].astype(str).tolist(),
            "arrival_s": arrival_s[part],
        }
        numbers = np.arange(start + 1, start + 1 + len(arrival_s[part]))
        reading.rows.extend(numbers, prompt_tokens=prompt[part], output_tokens=output[part], **columns)


def _matches(head: Head) -> bool:
    return head.folder is not None and bool(client_files(head.folder))


FORMAT = TraceFormat(
    name="servegen",
    looks_like="a folder of chunk-I-trace.csv and chunk-I-dataset.json, one of each for a client",
    matches=_matches,
    read=_read,
    uses=frozenset({"window_s", "seed"}),
)
