"""Large JSON documents are read piece by piece, and mean what they mean as a whole."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servetwin.workloads import WorkloadError
from servetwin.workloads.traces import ReadOptions, Tolerance, read_trace
from servetwin.workloads.traces.json_stream import JsonStream
from servetwin.workloads.traces.source import CHUNK_CHARACTERS, Source
from servetwin.workloads.traces.values import Damage


class Pieces:
    """A text that comes a few characters at a time."""

    def __init__(self, text: str, size: int) -> None:
        self._text, self._size = text, size

    def chunks(self) -> Any:
        return (self._text[i : i + self._size] for i in range(0, len(self._text), self._size))


def stream(text: str, size: int = 3) -> JsonStream:
    return JsonStream(cast(Source, Pieces(text, size)))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


@given(
    values=st.lists(VALUES, max_size=5),
    fields=st.dictionaries(st.text(max_size=4), VALUES, max_size=5),
    size=st.integers(1, 9),
    indent=st.sampled_from([None, 1]),
)
def test_pieces_of_any_size_mean_what_the_whole_means(
    values: list[Any], fields: dict[str, Any], size: int, indent: int | None
) -> None:
    text = f"{json.dumps(values, indent=indent)}\n{json.dumps(fields, indent=indent)}{json.dumps(fields)} "
    read = stream(text, size)
    assert list(read.elements()) == values
    assert {name: read.value() for name in read.members()} == fields
    for _ in read.members():
        read.skip()
    read.end()


@pytest.mark.parametrize(
    "text", ["[1, 2", "[1 2]", "[1,, 2]", "[tru]", '["a]', "[" * 100_000, f"[{'9' * 5000}]"]
)
def test_what_is_not_json_is_damage(text: str) -> None:
    with pytest.raises(Damage, match="must be JSON"):
        list(stream(text, 999).elements())
    with pytest.raises(Damage, match="must be JSON"):
        list(stream('{"a": 1, b: 2}').members())


RESULT = {"input_lens": [5, 6], "output_lens": [3, 4], "start_times": [1.0, 2.0]}


def test_a_result_that_was_cut_off_hides_no_other(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    later = json.dumps(RESULT | {"start_times": [5.0, 6.0]})
    for cut in ('{"itls": [', '{"request_rate":', '{"itls": [[1.0], [2.0', "nonsense"):
        path.write_text("\n".join([json.dumps(RESULT), cut, later, cut]))
        trace = read_trace(path, ReadOptions(tolerance=Tolerance.LENIENT))
        assert trace.requests.arrival_s.tolist() == [0, 1, 4, 5]
        assert trace.rows_dropped == {"damaged: row": 2}
        with pytest.raises(WorkloadError, match="result 2: row "):
            read_trace(path)


def test_what_nobody_reads_of_a_large_file_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "result.json"

    def peak_bytes(requests: int) -> int:
        path.write_text(json.dumps(RESULT | {"itls": [[0.0123456789] * 200] * requests}))
        tracemalloc.start()
        try:
            assert len(read_trace(path)) == 2
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak_bytes(10)  # what is imported at first use is no part of the measurement
    small = peak_bytes(2000)
    assert peak_bytes(8000) < small + CHUNK_CHARACTERS
    assert path.stat().st_size > 20 * CHUNK_CHARACTERS


def test_a_list_of_conversations_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    talk = {"conversations": [{"value": "a b"}, {"value": "c"}]}
    read = ReadOptions(tokenize=lambda text: [len(word) for word in text.split()])
    path.write_text(json.dumps([talk, talk]))
    assert len(read_trace(path, read)) == 2
    for behind in ("{", "]", '[{"conversations"'):
        path.write_text(json.dumps([talk, talk]) + behind)
        with pytest.raises(WorkloadError, match=r"sharegpt\.json: is not JSON: row .* must be the end of"):
            read_trace(path, read)
    half = json.dumps([{"conversations": [{"value": "\ud800"}, {"value": "c"}]}])
    path.write_text(half)
    with pytest.raises(WorkloadError, match=r"row 1: value .* must be a text of whole characters"):
        read_trace(path, read)
