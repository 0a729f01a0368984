"""`servetwin trace`: what the commands print, write, say and refuse."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from servetwin.sim.cli import make_app, run
from servetwin.sim.commands.trace import COMMANDS
from servetwin.sim.commands.trace_report import rate_plot, round_ticks
from servetwin.workloads import PRESETS, read_trace
from servetwin.workloads.statistics.arrivals import ArrivalFigures
from servetwin.workloads.traces.formats import FORMATS
from servetwin.workloads.two_sample import (
    CORRELATION_ALIKE,
    CORRELATION_CLOSE,
    KS_ALIKE,
    KS_CLOSE,
    P_ALIKE,
    POINTS_ALIKE,
    POINTS_CLOSE,
    RATIO_ALIKE,
    RATIO_CLOSE,
)

ROOT = Path(__file__).parents[1]
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


@pytest.fixture
def azure(tmp_path) -> Callable[..., str]:
    """Writes an Azure trace of one request a second; further rows as they are. Gives the path."""

    def write(*rows: str, n: int = 50, name: str = "azure.csv") -> str:
        good = [f"2023-11-16 18:{i // 60:02}:{i % 60:02},{100 + i},{10 + i}" for i in range(n)]
        (tmp_path / name).write_text("\n".join([AZURE, *good, *rows]))
        return str(tmp_path / name)

    return write


@pytest.fixture
def command(capsys, tmp_path):
    """Runs `servetwin trace ...`; gives exit code, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = run(["trace", *map(str, arguments)])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


@pytest.fixture
def info(command):
    """`trace info --json` of a path."""

    def figures(path: object, *arguments: str) -> dict[str, Any]:
        code, out, _ = command("info", path, "--json", *arguments)
        assert code == 0
        return json.loads(out)

    return figures


# ---------------------------------------------------------------- info


def test_info_says_what_others_rely_on(info, azure):
    found = info(azure())
    assert found["format"] == "azure"
    assert (found["rows_read"], found["rows_emitted"], found["rows_dropped"]) == (50, 50, {})
    assert found["span_s"] == 49
    assert found["rate_per_s"] == pytest.approx(50 / 49)
    assert found["gap_cv"] == 0
    assert found["prompt_tokens"] == {"mean": 124.5, "p50": 124.5, "p90": 144.1, "p99": pytest.approx(148.51)}
    assert found["output_tokens"]["mean"] == 34.5
    assert found["prefix"]["block_hit_percent_infinite"] is None
    assert found["sessions"] == 0


def test_info_drops_what_cannot_be_used_and_shows_the_first_of_each_kind(info, command, azure):
    path = azure("2023-11-16 18:30:00,0,5", "2023-11-16 18:31:00,abc,5", "2023-11-16 18:32:00,7,0")
    found = info(path)
    assert found["rows_read"] == found["rows_emitted"] + sum(found["rows_dropped"].values()) == 53
    assert found["rows_dropped"] == {
        "damaged: ContextTokens": 1,
        "zero prompt tokens": 1,
        "zero output tokens": 1,
    }
    assert {(o["row"], o["reason"]) for o in found["first_dropped"]} >= {(52, "damaged: ContextTokens")}
    _, out, _ = command("info", path)
    assert "row 52: ContextTokens 'abc'" in " ".join(out.split())


def test_strict_turns_the_first_drop_into_an_error(command, azure):
    code, out, err = command("info", azure("2023-11-16 18:30:00,0,5"), "--strict", "--json")
    assert (code, out) == (2, "")
    assert "row 51: zero prompt tokens" in err


def test_info_for_people_has_a_plot_and_says_that_reuse_is_unknown(command, azure):
    code, out, _ = command("info", azure())
    assert code == 0
    assert "prefix reuse unknown" in out
    assert "requests/s over s, in bins of 0.49 s" in out
    assert "█" in out
    assert "times in" not in out


@pytest.mark.parametrize(
    "name", ["mooncake/synthetic_trace_rows0001-2000.jsonl.gz", "tracelab/multi_session_large.csv"]
)
def test_info_for_people_shows_reuse_and_sessions(command, shared_data, name):
    code, out, _ = command("info", shared_data / "traces" / name)
    assert code == 0
    assert ("LRU, 10,000 blocks" in out) == ("mooncake" in name)
    assert ("think time" in out) == ("tracelab" in name)


def test_info_tells_the_units_that_were_assumed_or_told(command, shared_data):
    path = shared_data / "traces/mooncake/synthetic_trace_rows0001-2000.jsonl.gz"
    assert "mooncake (times in ms, 512 tokens per prefix id)" in " ".join(command("info", path)[1].split())
    told = command("info", path, "--time-unit", "s")[1]
    assert "mooncake (times in s, 512 tokens per prefix id)" in " ".join(told.split())


def test_info_has_the_rate_of_sessions(info, command, tmp_path):
    """Three sessions start within 4 s; of one alone there is no rate, and its numbers are singular."""
    rows = [(0, "a"), (1, "b"), (2, "a"), (4, "c")]
    path = tmp_path / "t.jsonl"

    def write(some: list[tuple[int, str]]) -> None:
        row = {"input_length": 8, "output_length": 5}
        path.write_text(
            "".join(json.dumps({"timestamp": 1000 * t, "session_id": s} | row) + "\n" for t, s in some)
        )

    write(rows)
    assert info(path)["session_figures"]["rate_per_s"] == pytest.approx(3 / 4)
    assert "0.75 sessions/s" in command("info", path)[1]
    write(rows[:1])
    assert info(path)["session_figures"]["rate_per_s"] is None
    out = command("info", path)[1]
    assert "1 with 1 request " in out
    assert "sessions/s" not in out


@pytest.mark.parametrize(("useless", "warned"), [(5, False), (6, True)])
def test_info_warns_where_many_rows_are_dropped(info, azure, useless, warned):
    """More than a tenth of the rows."""
    found = info(azure(*["2023-11-16 18:30:00,0,5"] * useless))
    assert any("6 of 56 rows dropped (11 %)" in w for w in found["warnings"]) == warned


def test_info_does_not_warn_of_rows_that_nobody_asked_for(info, tmp_path):
    rows = [f"{i},{'GPT-4' if i < 4 else 'ChatGPT'},9,{5 + i},{14 + i},Conversation log" for i in range(8)]
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    (tmp_path / "b.csv").write_text("\n".join([header, *rows]))
    found = info(tmp_path / "b.csv", "--trace-model", "GPT-4")
    assert (found["rows_read"], found["rows_emitted"]) == (8, 4)
    assert not any("dropped" in w for w in found["warnings"])


def test_info_of_what_is_no_trace_is_one_line(command, tmp_path):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    code, out, err = command("info", tmp_path / "x.csv")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1


def test_the_unit_of_times_and_the_size_of_blocks_can_be_said(info, tmp_path):
    row = {"timestamp": 2, "input_length": 32, "output_length": 5, "hash_ids": [1, 2]}
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row | {"timestamp": t}) + "\n" for t in (0, 2, 4)))
    found = info(path, "--time-unit", "s", "--block-size", "16", "--format", "mooncake")
    assert (found["span_s"], found["prefix"]["block_tokens"]) == (4, [16])
    assert found["prefix"]["block_hit_percent_infinite"] == pytest.approx(100 * 2 / 6)


@pytest.mark.parametrize(
    ("highest", "ticks"),
    [(1593.0, [0, 500, 1000, 1500]), (0.9, [0, 0.2, 0.4, 0.6, 0.8]), (5, [0, 1, 2, 3, 4, 5])],
)
def test_plots_have_round_ticks(highest, ticks):
    assert round_ticks(highest) == pytest.approx(ticks)


def test_a_plot_is_as_wide_as_it_is_told():
    figures = ArrivalFigures(
        span_s=100,
        rate_per_s=1,
        gap_cv=1,
        dispersion_1s=1,
        peak_to_mean_minute=1,
        bin_s=1,
        requests_per_bin=tuple(range(100)),
    )
    assert max(map(len, rate_plot(figures, 80).splitlines())) == 80


# ---------------------------------------------------------------- traces of traces


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.zst", ".parquet"])
def test_convert_writes_our_formats(command, azure, tmp_path, ending):
    out = tmp_path / f"o{ending}"
    code, printed, _ = command("convert", azure(), "-o", out)
    assert code == 0
    assert "50 requests over 49 s (1.02 requests/s)" in printed
    assert len(read_trace(out)) == 50


def test_convert_refuses_to_overwrite_unless_told(command, azure, tmp_path):
    out = tmp_path / "o.jsonl"
    out.write_text("mine")
    code, _, err = command("convert", azure(), "-o", out)
    assert (code, out.read_text()) == (2, "mine")
    assert "exists" in err
    assert command("convert", azure(), "-o", out, "--overwrite")[0] == 0


def test_convert_refuses_damage_and_says_what_it_dropped(command, azure, tmp_path):
    code, _, err = command("convert", azure("2023-11-16 18:30:00,abc,5"), "-o", tmp_path / "o.jsonl")
    assert code == 2
    assert "row 51" in err
    code, _, err = command("convert", azure("2023-11-16 18:30:00,0,5"), "-o", tmp_path / "o.jsonl")
    assert code == 0
    assert "1 of 51 rows dropped: 1 zero prompt tokens" in err


def test_convert_to_mooncake_says_what_is_lost(command, shared_data, tmp_path):
    path = shared_data / "traces/lmcache_agent/miniswe.lengths.jsonl.gz"
    code, _, err = command("convert", path, "--to", "mooncake", "-o", tmp_path / "m.jsonl")
    assert code == 0
    assert "rounded to whole milliseconds: 237 arrivals" in err
    assert "numbered anew, one per 512 tokens" in err
    assert read_trace(tmp_path / "m.jsonl").format == "mooncake"


@pytest.mark.parametrize(
    ("arguments", "span_s", "said"),
    [
        (["--speed-up", "2"], 24.5, "speed-up 2: arrivals divided by it"),
        (["--rate", "10"], 5.0, "reaches rate 10 requests/s: arrivals divided by it"),
    ],
)
def test_scale_echoes_the_word_that_was_chosen(command, azure, tmp_path, arguments, span_s, said):
    code, out, err = command("scale", azure(), "-o", tmp_path / "o.jsonl", "--json", *arguments)
    assert code == 0
    found = json.loads(out)
    assert (found["requests"], found["span_s"]) == (50, pytest.approx(span_s))
    assert said in err


def test_think_times_are_scaled_together_and_that_is_said(command, shared_data, tmp_path):
    path = shared_data / "traces/tracelab/multi_session_large.csv"
    code, _, err = command("scale", path, "--speed-up", "4", "-o", tmp_path / "o.jsonl")
    assert code == 0
    assert "arrivals and think times divided by it" in err
    before, after = (
        r.requests.table["think_time_s"].to_pandas() for r in map(read_trace, (path, tmp_path / "o.jsonl"))
    )
    assert after.sum() == pytest.approx(before.sum() / 4)


@pytest.mark.parametrize("arguments", [[], ["--speed-up", "2", "--rate", "3"]])
def test_scale_wants_one_word(command, azure, tmp_path, arguments):
    code, _, err = command("scale", azure(), "-o", tmp_path / "o.jsonl", *arguments)
    assert code == 2
    assert "--speed-up and --rate" in err


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        (["--start", "10", "--end", "20"], list(range(11, 21))),
        (["--first", "3"], [1, 2, 3]),
        (["--start", "45", "--first", "2"], [46, 47]),
    ],
)
def test_cut_keeps_a_window_or_the_first(command, azure, tmp_path, arguments, rows):
    out = tmp_path / "o.jsonl"
    code, _, err = command("cut", azure(), "-o", out, *arguments)
    assert code == 0
    requests = read_trace(out).requests
    assert [r.request_id for r in requests] == [f"row-{row:06d}" for row in rows]
    assert requests[0].arrival_s == 0
    assert ("which is now 0" in err) == ("--start" in arguments)


def test_cut_says_which_sessions_it_cuts(command, shared_data, tmp_path):
    path = shared_data / "traces/tracelab/multi_session_large.csv"
    _, _, err = command("cut", path, "--first", "10", "-o", tmp_path / "o.jsonl")
    assert "1 sessions are cut" in err


def test_merge_puts_traces_on_one_clock(command, azure, tmp_path):
    code, out, _ = command(
        "merge", azure(), azure(n=20, name="b.csv"), "-o", tmp_path / "o.parquet", "--json"
    )
    assert code == 0
    assert [s["rows_emitted"] for s in json.loads(out)["sources"]] == [50, 20]
    ids = read_trace(tmp_path / "o.parquet").requests.values("request_id")
    assert ids[:3] == ["row-000001", "row-000001@2", "row-000002"]


def test_merge_wants_two_traces(command, azure, tmp_path):
    assert command("merge", azure(), "-o", tmp_path / "o.jsonl")[0] == 2


@pytest.fixture
def mooncake(tmp_path) -> str:
    """A trace with prefix ids: 30 requests, two at each of 15 instants."""
    rows = (
        {"timestamp": 3000 * (i // 2), "input_length": 1024, "output_length": 5, "hash_ids": [1, i + 2]}
        for i in range(30)
    )
    (tmp_path / "mooncake.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(tmp_path / "mooncake.jsonl")


def test_merge_takes_a_flag_that_some_of_the_formats_use_and_says_which_do_not(
    command, azure, mooncake, tmp_path
):
    flags = ["--hash-block-size", "1024", "-o", tmp_path / "o.jsonl", "--overwrite"]
    code, _, err = command("merge", azure(), mooncake, *flags)
    assert code == 2
    assert "mooncake.jsonl" in err
    flags[1] = "512"
    code, _, err = command("merge", azure(), mooncake, *flags)
    assert code == 0
    assert "azure.csv: --hash-block-size has no use for the format azure" in err
    assert {r.prefix_block_tokens for r in read_trace(tmp_path / "o.jsonl").requests} == {None, 512}


def test_merge_refuses_a_flag_that_none_of_the_formats_uses(command, azure, tmp_path):
    traces = azure(), azure(name="b.csv")
    code, _, err = command("merge", *traces, "--hash-block-size", "512", "-o", tmp_path / "o.jsonl")
    assert code == 2
    assert "--hash-block-size has no use for the formats of these traces" in err


def test_merge_says_of_how_many_requests_prefixes_are_known(command, azure, mooncake, tmp_path):
    out = tmp_path / "o.jsonl"
    _, _, err = command("merge", azure(n=20), mooncake, "-o", out)
    assert "prefixes known for 30 of 50 requests" in err
    for same in ([azure(n=20), azure(n=20, name="b.csv")], [mooncake, mooncake]):
        assert "prefixes known" not in command("merge", *same, "-o", out, "--overwrite")[2]


def test_output_tokens_that_no_request_needs_are_not_silently_inert(command, tmp_path):
    path = tmp_path / "aibrix.jsonl"

    def said(*lengths: dict[str, int]) -> str:
        rows = (
            {"timestamp": 9 * i, "requests": [{"prompt_length": 5, **row}]} for i, row in enumerate(lengths)
        )
        path.write_text("\n".join(map(json.dumps, rows)))
        code, _, err = command(
            "convert", path, "--trace-output-tokens", "7", "-o", tmp_path / "o.jsonl", "--overwrite"
        )
        assert code == 0
        return err

    assert "the 7 of --trace-output-tokens is not used" in said({"output_length": 3}, {"output_length": 4})
    assert "not used" not in said({"output_length": 3}, {})


def test_help_names_the_formats_of_output_tokens(command):
    texts = command("convert", "--help")[1]
    for format_ in FORMATS:
        if "output_tokens" in format_.uses:
            assert format_.name in " ".join(texts.replace("│", " ").split())


def test_resample_makes_more(command, azure, tmp_path):
    code, out, err = command("resample", azure(), "-n", "200", "-o", tmp_path / "o.jsonl", "--seed", "7")
    assert code == 0
    assert "200 requests over" in out
    assert "drawn with replacement from 50 requests (seed 7)" in err


def test_ticks_are_spread_where_there_are_some(command, shared_data, azure, tmp_path):
    out = tmp_path / "o.jsonl"
    path = shared_data / "traces/mooncake/conversation_trace_rows00001-05000.jsonl.gz"
    code, _, err = command("cut", path, "--first", "500", "--jitter-ticks", "-o", out)
    assert code == 0
    assert "drawn uniformly within their ticks (seed 0)" in err
    assert len(set(read_trace(out).requests.arrival_s)) == 500
    code, _, err = command("convert", azure(), "--jitter-ticks", "-o", out, "--overwrite")
    assert code == 2
    assert "not quantised" in err


@pytest.mark.parametrize(
    "arguments", [["scale", "--speed-up", "2"], ["cut", "--end", "5"], ["convert", "--jitter-ticks"]]
)
def test_a_trace_without_times_cannot_be_scaled_cut_by_time_or_spread(command, tmp_path, arguments):
    path: Path = tmp_path / "v.csv"
    path.write_text(
        "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3,4,7,0.75\n5,6,11,0.83\n"
    )
    code, _, err = command(arguments[0], path, *arguments[1:], "-o", tmp_path / "o.jsonl")
    assert code == 2
    assert "no arrival times" in err


# ---------------------------------------------------------------- synth


@pytest.mark.parametrize("model", ["chat", "random", "diurnal-chat", "model.json"])
def test_an_infinite_rate_sends_all_at_once_from_models_and_presets(command, azure, tmp_path, model):
    if model == "model.json":
        model = str(tmp_path / model)
        assert command("fit", azure(), "-o", model)[0] == 0
    code, out, _ = command("synth", model, "-n", "10", "--rate", "inf", "-o", tmp_path / "o.jsonl", "--json")
    assert code == 0
    assert (json.loads(out)["requests"], json.loads(out)["span_s"]) == (10, 0.0)


def test_a_rate_that_came_out_otherwise_is_told_with_what_makes_it_exact(command, tmp_path):
    """The preset code comes in bursts: 200 requests are far from its mean rate."""
    out = tmp_path / "o.jsonl"
    code, printed, err = command("synth", "code", "-n", "200", "--rate", "4", "-o", out, "--json")
    assert code == 0
    rate = json.loads(printed)["rate_per_s"]
    assert abs(rate / 4 - 1) > 0.05
    assert (
        f"{rate:.4g} requests/s, not the 4 asked for: `servetwin trace scale {out} --rate 4` reaches it"
        in err
    )
    code, printed, _ = command("scale", out, "--rate", "4", "-o", tmp_path / "exact.jsonl", "--json")
    assert json.loads(printed)["rate_per_s"] == pytest.approx(4)
    assert "asked for" not in command("synth", "random", "--rate", "4", "-o", out, "--overwrite")[2]


def test_a_rate_of_sessions_is_named_so_and_can_be_reached(command, tmp_path):
    trace, model, out = (tmp_path / name for name in ("sessions.jsonl", "model.json", "o.jsonl"))
    turns = (
        {"request_id": f"{s}-{t}", "arrival_s": s * s, "prompt_tokens": 50 + 50 * t, "output_tokens": 5}
        | {"session_id": str(s), "turn": t}
        | ({"think_time_s": 1.0, "context_tokens": 50 * t} if t else {})
        for s in range(40)
        for t in range(3)
    )
    trace.write_text("\n".join(map(json.dumps, turns)))
    assert (
        "reaches rate 9 requests/s, all turns counted" in command("scale", trace, "--rate", "9", "-o", out)[2]
    )
    assert command("fit", trace, "-o", model)[0] == 0
    synth = ["synth", model, "-n", "60", "-o", out, "--overwrite", "--rate"]
    err = command(*synth, "2")[2]
    assert "the rate asked for is in sessions/s, later turns not counted: 20 sessions, 60 requests" in err
    [line] = [line for line in err.splitlines() if "sessions/s, not the 2 asked for" in line]
    rate = line.partition("--rate ")[2].split()[0]
    assert command(*synth, rate)[0] == 0
    starts_s = [r.arrival_s for r in read_trace(out).requests if r.turn == 0]
    assert len(starts_s) / (starts_s[-1] - starts_s[0]) == pytest.approx(2, rel=1e-4)


# ---------------------------------------------------------------- presets and help


def test_presets_are_listed(command):
    code, out, _ = command("presets", "--json")
    assert code == 0
    assert [p["name"] for p in json.loads(out)["presets"]] == list(PRESETS)
    assert "synthetic" in command("presets")[1]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(command, name):
    code, out, _ = command(name, "--help")
    assert code == 0
    assert f"servetwin trace {name}" in out


def test_the_way_of_percentiles_is_in_the_help(command):
    assert "interpolated linearly" in " ".join(command("info", "--help")[1].split())


@pytest.mark.parametrize("name", ["fit", "synth"])
def test_the_limits_of_the_verdicts_are_in_the_help(command, name):
    """Those that the comparison goes by."""
    said = " ".join(command(name, "--help")[1].split())
    points = f"{POINTS_ALIKE:g} / {POINTS_CLOSE:g} points"
    ratio = f"{100 * RATIO_ALIKE:g} % / {100 * RATIO_CLOSE:g} %"
    ks = f"KS, {KS_ALIKE:g} (or p at least {P_ALIKE:g}) / {KS_CLOSE:g}"
    ranks = f"by {CORRELATION_ALIKE:g} / {CORRELATION_CLOSE:g}"
    for limits in (points, ratio, ks, ranks):
        assert limits in said


def test_the_commands_of_the_readme_are_commands():
    """Names of commands and flags; what they do is tested above."""
    text = (
        (ROOT / "README.md")
        .read_text(encoding="utf-8")
        .partition("\n## Workloads\n")[2]
        .partition("\n## ")[0]
    )
    lines = [line.partition("#")[0] for line in text.splitlines() if line.startswith("    servetwin ")]
    assert {"synth", "info", "merge", "fit"} <= {line.split()[2] for line in lines}
    for line in lines:
        make_app().parse_args(shlex.split(line)[1:], exit_on_error=False, print_error=False)
