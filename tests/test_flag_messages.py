"""A wrong value on the command line: one line that names the flag that was typed and the value; exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from servetwin.sim.cli import COMMANDS, make_app, run
from servetwin.workloads import (
    ArgumentError,
    WorkloadError,
    build_preset,
    cut,
    resampled,
    scaled,
    scaled_to_rate,
)
from servetwin.workloads.spec import RequestSpec

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
ROWS = [f"2023-11-16 18:00:{i:02},{100 + i},{10 + i}" for i in range(50)]

NUMBER, NOT_INFINITE = "must be a number above 0, or infinite", "must be a finite number above 0"
WHOLE, SEED = "must be a whole number, 1 or more", "must be a whole number, 0 or more"
NO_FLOAT, NO_INT = 'unable to convert "x" into float', "'x' is not a whole number"
TOO_MANY = "must be at most 1,000,000,000 requests"

TRACE = {
    "scale --speed-up": {"0": NOT_INFINITE, "-2": NOT_INFINITE, "nan": NOT_INFINITE, "inf": NOT_INFINITE}
    | {"1e-300": "puts the last arrival at 4.9e+301 s", "x": NO_FLOAT},
    "scale --rate": {"0": NOT_INFINITE, "-2": NOT_INFINITE, "nan": NOT_INFINITE, "inf": NOT_INFINITE}
    | {
        "1e-300": "puts the last arrival at 5e+301 s",
        "1e-323": "puts the last arrival at inf s",
        "x": NO_FLOAT,
    },
    "cut --start": dict.fromkeys(("-1", "nan", "inf", "1e+300"), "must be between 0 and 4e+09")
    | {"1000": "nothing arrives from 1000 s on; arrivals are from 0 to 49 s", "x": NO_FLOAT},
    "cut --end": dict.fromkeys(("-1", "0", "nan"), "must be after the start of the window, 0 s")
    | {"x": NO_FLOAT},
    "cut --start 10 --end": {"5": "must be after the start of the window, 10 s"},
    "cut --end 10.5 --start": {"10.2": "nothing arrives from 10.2 s to 10.5 s"},
    "cut --first": {"0": WHOLE, "-1": WHOLE, "51": "must be at most 50, the requests there are", "x": NO_INT},
    "resample --num-prompts": {
        "0": WHOLE,
        "-5": WHOLE,
        "nan": "is not a whole number",
        "99999999999999": TOO_MANY,
        "x": NO_INT,
    },
    "resample -n 5 --seed": {"-1": SEED, "1.5": "'1.5' is not a whole number", "x": NO_INT},
    "convert --seed": {"-1": SEED},
    "convert --to mooncake --to-block-size": {"0": WHOLE, "x": NO_INT},
    "convert --hash-block-size": {"0": WHOLE, "-1": WHOLE, "x": NO_INT},
    "convert --trace-output-tokens": {"0": WHOLE, "x": NO_INT},
    "convert --trace-format": {"x": "must be one of azure, mooncake"},
    "convert --time-unit": {"x": "Choose from"},
    "convert --window": {"5:1": "must be two finite times", "x": "must be START:END in seconds"},
}
SYNTH = {
    "--num-prompts": {"0": WHOLE, "-1": WHOLE, "99999999999999": TOO_MANY, "x": NO_INT},
    "--rate": dict.fromkeys(("0", "-1", "nan", "-inf"), NUMBER)
    | {"1e-300": "would send the last of", "x": NO_FLOAT},
    "--seed": {"-1": SEED},
    "--time-unit": {"s": "says how the trace of --against is read"},
}
RUN = {
    "chat --num-prompts": {"0": WHOLE, "-1": WHOLE, "99999999999999": TOO_MANY, "x": NO_INT},
    "azure.csv --num-prompts": {"0": WHOLE, "51": "must be at most 50, the usable rows of azure.csv"},
    "chat --request-rate": dict.fromkeys(("0", "-1", "nan", "-inf"), NUMBER)
    | {"1e-300": "would send", "x": NO_FLOAT},
    "azure.csv --request-rate": {"3": "cannot change the times that azure.csv has of its own"},
    "chat --request-rate 3 --burstiness": dict.fromkeys(("0", "-1", "nan"), NUMBER),
    "chat --seed": {"-1": SEED},
    "azure.csv --seed": {"-1": SEED},
    "chat --max-concurrency": {"0": WHOLE},
    "chat --loop": {"closed": "no request has a session_id"},
    "chat --ramp-up-strategy linear --ramp-up-end-rps 3 --ramp-up-start-rps": {
        "0": NOT_INFINITE,
        "nan": NOT_INFINITE,
    },
    "chat --ramp-up-strategy linear --ramp-up-start-rps 5 --ramp-up-end-rps": {
        "3": "must be the rate at the start, 5.0, or more",
        "inf": NOT_INFINITE,
    },
    "chat --time-unit": {"s": "goes with a trace; 'chat' is a preset"},
    "--dataset-name random --time-unit": {"s": "goes with a trace; --dataset-name random is made up"},
    "--dataset-name random --num-prompts": {"0": WHOLE, "99999999999999": TOO_MANY},
    "--dataset-name random --random-input-len": {"0": WHOLE, "x": NO_INT},
    "--dataset-name random --random-output-len": {"-1": WHOLE},
    "--dataset-name random --random-prefix-len": {"-1": SEED},
    "--dataset-name random --random-range-ratio": dict.fromkeys(
        ("1", "-1", "nan", "inf"), "must be between 0 and 1"
    ),
    "--dataset-name random --random-range-ratio 0.9 --random-input-len": {"1": "must be more, since with"},
    "--dataset-name prefix_repetition --num-prompts": {"3": "must be 10, the number of prefixes, or more"},
    "--dataset-name prefix_repetition --prefix-repetition-num-prefixes": {"0": WHOLE},
    "--dataset-name prefix_repetition --prefix-repetition-prefix-len": {"0": WHOLE},
    "--dataset-name prefix_repetition --prefix-repetition-suffix-len": {"0": WHOLE},
    "--dataset-name prefix_repetition --prefix-repetition-output-len": {"-1": WHOLE},
    "azure.csv --hash-block-size": {"0": WHOLE},
}
CONSTANT = ["--executor", "constant", "--step-time-s", "0.01"]


@pytest.fixture
def azure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace of one request a second, in the current folder."""
    (tmp_path / "azure.csv").write_text("\n".join([AZURE, *ROWS]))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def refused(azure, capsys):
    """Runs a command line whose last two words are a flag and its value, and compares what it says."""

    def check(words: list[str], message: str, *more: str) -> None:
        *_, flag, value = words
        assert run([*words, *more]) == 2, words
        printed = capsys.readouterr()
        assert printed.out == ""
        [line] = printed.err.splitlines()
        assert flag in line
        assert message in line
        assert value.removesuffix(":1") in line

    return check


def cases(table: dict[str, dict[str, str]]) -> list[tuple[str, str, str]]:
    return [(flags, value, message) for flags, values in table.items() for value, message in values.items()]


@pytest.mark.parametrize(("flags", "value", "message"), cases(TRACE))
def test_trace_commands_name_the_flag(refused, flags: str, value: str, message: str) -> None:
    command, *rest = flags.split()
    refused(["trace", command, "azure.csv", "-o", "out.jsonl", *rest, value], message)
    assert not Path("out.jsonl").exists()


@pytest.mark.parametrize("model", ["chat", "diurnal-chat", "model.json"])
@pytest.mark.parametrize(("flags", "value", "message"), cases(SYNTH))
def test_synth_names_the_flag_for_presets_and_models(
    refused, capsys, model: str, flags: str, value: str, message: str
) -> None:
    if model == "model.json":
        assert run(["trace", "fit", "azure.csv", "-o", model]) == 0
        capsys.readouterr()
    refused(["trace", "synth", model, "-o", "out.jsonl", flags, value], message)


@pytest.mark.parametrize(("flags", "value", "message"), cases(RUN))
def test_run_names_the_flag_of_a_workload(refused, flags: str, value: str, message: str) -> None:
    refused(["run", *CONSTANT, *flags.split(), value], message)


@pytest.mark.parametrize(("command", "words"), [("info", []), ("fit", ["-o", "model.json"])])
def test_who_only_reads_names_the_flag(refused, command: str, words: list[str]) -> None:
    refused(["trace", command, "azure.csv", *words, "--seed", "-1"], SEED)
    refused(["trace", command, "azure.csv", *words, "--hash-block-size", "0"], WHOLE)


def test_a_model_without_arrivals_wants_the_flag_of_a_rate(azure, capsys) -> None:
    Path("lengths.csv").write_text(
        "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3,4,7,0.75\n5,6,11,0.83\n"
    )
    assert run(["trace", "fit", "lengths.csv", "-o", "model.json"]) == 0
    capsys.readouterr()
    assert run(["trace", "synth", "model.json", "-o", "out.jsonl"]) == 2
    assert "--rate None: must be given (inf: all at once)" in capsys.readouterr().err


def test_python_names_the_parameter() -> None:
    requests = [
        RequestSpec(request_id=f"r{i}", arrival_s=float(i), prompt_tokens=1, output_tokens=1)
        for i in range(3)
    ]
    for wrong, message in (
        (lambda: scaled(requests, speed_up=0), f"speed_up 0: {NOT_INFINITE}"),
        (lambda: scaled_to_rate(requests, rate_per_s=1e-300), "rate_per_s 1e-300: puts the last arrival at"),
        (lambda: cut(requests, end_s=-1), "end_s -1: must be after the start of the window, 0 s"),
        (lambda: resampled(requests, n=0), f"n 0: {WHOLE}"),
        (lambda: build_preset("chat", rate_per_s=0), f"rate_per_s 0: {NUMBER}"),
    ):
        with pytest.raises(ArgumentError) as caught:
            wrong()
        assert str(caught.value).startswith(message)
        assert isinstance(caught.value, WorkloadError)


def test_an_argument_error_survives_another_process() -> None:
    import pickle

    again = pickle.loads(pickle.dumps(ArgumentError("n", "0: must be 1 or more")))
    assert str(again) == "n 0: must be 1 or more"


def test_every_whole_number_on_the_command_line_is_read_as_one() -> None:
    """cyclopts by itself takes 1.5 for the int 1."""
    app = make_app()
    commands = [(name, app[name]) for name in COMMANDS if name != "trace"]
    trace = app["trace"]
    commands += [(f"trace {name}", trace[name]) for name in trace if not name.startswith("-")]
    assert len(commands) > 15
    cut = [
        f"{name} {argument.name}"
        for name, command in commands
        if command.default_command
        for argument in command.assemble_argument_collection()
        if argument.hint in (int, int | None)
        and argument.parameter.converter is None
        and argument.parameter.parse is not False
    ]
    assert not cut
