"""A pasted `vllm serve` command line: what is followed, what is ignored and said, what is refused."""

from __future__ import annotations

import json
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servetwin.sim.commands.flags import EngineFlags
from servetwin.sim.commands.vllm_merge import merge, with_vllm_args
from servetwin.sim.engine_options import resolve_long_prefill_token_threshold
from servetwin.sim.human_readable import human_readable_int
from servetwin.sim.vllm_args import (
    VllmArgs,
    VllmArgsError,
    parse_vllm_args,
)
from servetwin.sim.vllm_flags import FLAGS, SHORT, Takes, spelled

TABLE = """
    --model m --max-model-len 4k --max-num-seqs 64 --max-num-batched-tokens 8192 --performance-mode throughput
    --enable-chunked-prefill --max-num-partial-prefills 1 --max-long-partial-prefills 1
    --long-prefill-token-threshold 0 --scheduling-policy fcfs --scheduler-reserve-full-isl --async-scheduling
    --stream-interval 1 --block-size 16 --enable-prefix-caching --prefix-caching-hash-algo sha256
    --gpu-memory-utilization 0.92 --kv-cache-memory-bytes 1G --num-gpu-blocks-override 100 --kv-cache-dtype auto
    --kv-offloading-backend native -tp 2 -pp 1 -dp 1 --enable-expert-parallel --dtype auto --quantization fp8
    --speculative-config '{"method": "ngram", "num_speculative_tokens": 3}' --enforce-eager
    --cudagraph-capture-sizes 1 2 4 --max-cudagraph-capture-size 512 --disable-hybrid-kv-cache-manager
    --kv-cache-metrics --kv-cache-metrics-sample 0.01 --otlp-traces-endpoint http://x
    --show-hidden-metrics-for-version 0.21 --enable-mfu-metrics
"""
PARTIAL_PREFILLS = ("--max-num-partial-prefills", "--max-long-partial-prefills")


def engine(text: str) -> dict:
    return parse_vllm_args(text).engine


@pytest.fixture
def config(tmp_path):
    """Writes a vLLM configuration file; gives `--config PATH`."""

    def write(content: str) -> str:
        path = tmp_path / "vllm.yaml"
        path.write_text(content)
        return f"--config {shlex.quote(str(path))}"

    return write


# ---------------------------------------------------------------- taking the line apart


@pytest.mark.parametrize(
    "start",
    [
        "",
        "serve",
        "vllm serve",
        "CUDA_VISIBLE_DEVICES=0,1 vllm serve",
        "python -m vllm.entrypoints.openai.api_server --model",
    ],
)
def test_the_model_is_found_however_the_command_begins(start):
    assert engine(f"{start} meta-llama/Llama-3.1-8B --max-num-seqs 64") == {
        "model": Path("meta-llama/Llama-3.1-8B"),
        "max_num_seqs": 64,
    }


@pytest.mark.parametrize(
    "text",
    [
        "--max-num-seqs 64 --no-enable-prefix-caching",
        "--max_num_seqs=64 --no_enable_prefix_caching",
        "--max-num_seqs '64' \\\n  --no-enable-prefix-caching",
        "--max-num-seqs 8 --enable-prefix-caching --no-enable-prefix-caching --max-num-seqs 64",
    ],
)
def test_spellings_of_flags_are_the_same(text):
    assert engine(text) == {"max_num_seqs": 64, "enable_prefix_caching": False}


@pytest.mark.parametrize(
    ("text", "number"),
    [("32k", 32_000), ("32K", 32_768), ("25.6k", 25_600), ("1_000", 1000), ("2g", 2 * 10**9), ("1T", 2**40)],
)
def test_suffixes_of_numbers_are_decimal_in_lower_case_and_binary_in_upper_case(text, number):
    assert human_readable_int(text) == engine(f"--max-num-batched-tokens {text}")["max_num_batched_tokens"]
    assert human_readable_int(text) == number


@pytest.mark.parametrize("text", ["25.6K", "1.5", "k", "", "1e3", "²"])
def test_what_is_no_whole_number_is_refused(text):
    with pytest.raises(ValueError, match="is not a whole number"):
        human_readable_int(text)


@given(st.integers(-(10**9), 10**9), st.sampled_from(["", "k", "K", "m", "M"]))
def test_a_number_with_a_suffix_is_a_multiple(number, suffix):
    unit = human_readable_int(f"1{suffix}")
    assert human_readable_int(f"{number}{suffix}") == number * unit


def test_the_length_auto_is_the_default_and_beats_an_earlier_number():
    assert engine("--max-model-len 4096 --max-model-len auto") == {"max_model_len": None}
    assert engine("--max-model-len -1") == {"max_model_len": None}


@pytest.mark.parametrize(
    "text",
    [
        """--speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'""",
        "--speculative-config.method ngram --speculative_config.num-speculative-tokens=3",
        "--spec-method ngram --spec-tokens 3",
        """--speculative-config '{"method": "eagle"}' --speculative-config.num_speculative_tokens 3"""
        " --spec-method ngram",
    ],
)
def test_speculative_decoding_is_one_json_object_however_it_is_given(text):
    assert json.loads(engine(text)["speculative_config"]) == {"method": "ngram", "num_speculative_tokens": 3}


def test_dotted_keys_reach_into_objects_and_lists():
    text = "--speculative-config.a.b 1 --speculative-config.a.c x --speculative-config.l+=1,y"
    assert json.loads(engine(text)["speculative_config"]) == {"a": {"b": 1, "c": "x"}, "l": [1, "y"]}


def test_no_speculation_is_no_configuration():
    assert engine("--speculative-config null") == {}


def test_the_second_model_runner_is_switched_by_its_environment_variable():
    args = parse_vllm_args("VLLM_USE_V2_MODEL_RUNNER=1 HF_HOME=/x vllm serve m")
    assert args.engine["use_v2_model_runner"] is True
    assert args.ignored == ("HF_HOME",)


# ---------------------------------------------------------------- the configuration file


def test_the_command_line_wins_over_the_configuration_file(config):
    file = config(
        "model: m\nmax-num-seqs: 8\nmax_num_batched_tokens: 4k\nenable-prefix-caching: false\n"
        "speculative-config: {method: eagle, num_speculative_tokens: 3}\nserved-model-name: [a, b]\nport: null\n"
    )
    args = parse_vllm_args(f"serve --max-num-seqs 64 {file} --speculative-config.method ngram")
    spec = json.loads(args.engine.pop("speculative_config"))
    assert spec == {"method": "ngram", "num_speculative_tokens": 3}
    assert args.engine == {
        "model": Path("m"),
        "max_num_seqs": 64,
        "max_num_batched_tokens": 4000,
        "enable_prefix_caching": False,
    }
    assert args.ignored == ("--served-model-name",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max-num-seq: 4\n", r"vllm.yaml: --max-num-seq is no flag .*; did you mean --max-num-seqs\?"),
        ("enable-prefix-caching: 1\n", "vllm.yaml: --enable-prefix-caching 1: must be true or false"),
        ("max-num-seqs: [1, 2]\n", r"--max-num-seqs: '\[1,2\]' is not a whole number"),
        ("config: other.yaml\n", "stands in a configuration file itself"),
        ("- a\n", "must map flag names to values, holds list"),
        ("a: [\n", "cannot be read"),
    ],
)
def test_a_damaged_configuration_file_is_refused(config, content, message):
    with pytest.raises(VllmArgsError, match=message):
        parse_vllm_args(config(content))


def test_a_missing_configuration_file_is_refused(tmp_path):
    with pytest.raises(VllmArgsError, match=r"--vllm-args: --config .*: cannot be read"):
        parse_vllm_args(f"--config {tmp_path / 'no.yaml'}")


# ---------------------------------------------------------------- what is ignored, what is refused


def test_every_flag_of_the_table_is_known():
    args = parse_vllm_args(TABLE)
    assert args.engine["async_scheduling"] is True
    assert args.engine["performance_mode"] == "throughput"
    assert args.engine["gpu_memory_utilization"] == 0.92
    assert args.engine["enforce_eager"] is True
    assert "--cudagraph-capture-sizes" in args.ignored
    assert args.limits_nothing == ()


def test_everything_that_was_set_is_a_flag_of_the_engine():
    known = {field.name for field in fields(EngineFlags)}
    assert set(engine(f"VLLM_USE_V2_MODEL_RUNNER=0 {TABLE}")) <= known


def test_all_that_is_ignored_is_said_in_one_warning():
    args = parse_vllm_args(
        "serve m --port 8000 --trust-remote-code --served-model-name a b --port 8001 --api-key k --hf-token "
        "--lora-modules x=y --compilation-config.mode 3 -O3 --performance-mode interactivity"
    )
    assert args.engine == {"model": Path("m")}
    assert args.warnings() == [
        "--vllm-args: ignored, since not modelled: --port, --trust-remote-code, --served-model-name, --api-key, "
        "--hf-token, --lora-modules, --compilation-config, --optimization-level, --performance-mode"
    ]


@pytest.mark.parametrize(
    ("text", "sizes", "eager"),
    [
        ("--cudagraph-capture-sizes 1 2 4", (1, 2, 4), None),
        ("--compilation-config.cudagraph_capture_sizes '[1, 8]'", (1, 8), None),
        ("""-cc '{"cudagraph_capture_sizes": [3]}' --cudagraph-capture-sizes 5""", (5,), None),
        ("""-cc '{"cudagraph_mode": "NONE", "cudagraph_capture_sizes": [3]}'""", None, True),
        ("--enforce-eager --cudagraph-capture-sizes 1 2", None, True),
        ("""-cc '{"cudagraph_mode": "none"}'""", None, True),
        ("""-cc '{"cudagraph_mode": "NONE"}' --no-enforce-eager""", None, True),
        ("-O0", None, True),
        ("""-O0 -cc '{"cudagraph_mode": "FULL"}'""", None, None),
        ("-O1", None, None),
    ],
)
def test_graph_sizes_may_stand_in_the_compilation_config(text, sizes, eager):
    """As in vLLM nothing is captured under enforce_eager, whatever the sizes."""
    assert engine(text).get("cudagraph_capture_sizes") == sizes
    assert engine(text).get("enforce_eager") is eager


def test_nothing_ignored_is_no_warning():
    assert parse_vllm_args("serve m -pp 1 --stream-interval 1 --runner generate").warnings() == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-pp 2", "--pipeline-parallel-size 2: pipeline stages .*; allowed is 1"),
        ("--data-parallel-size=4", "--data-parallel-size 4: .*; allowed is 1"),
        ("-dcp 2", "--decode-context-parallel-size 2: .*not modelled"),
        ("--stream-interval 8", "--stream-interval 8: .*; allowed is 1"),
        ("--scheduler-cls a.B", "--scheduler-cls a.B: .*--scheduling-policy"),
        ("--kv-offloading-size 4", "--kv-offloading-size 4: .*not modelled"),
        ("""--kv-transfer-config '{"kv_role": "x"}'""", "--kv-transfer-config .*kv_role.*not modelled"),
        ("--kv-transfer-config.kv_role x", "--kv-transfer-config .*kv_role.*not modelled"),
        ("--runner pooling", "--runner pooling: pooling models are not modelled"),
    ],
)
def test_what_would_change_the_schedule_unmodelled_is_refused_by_name(text, message):
    with pytest.raises(VllmArgsError, match=f"^--vllm-args: {message}"):
        parse_vllm_args(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "--max-num-sequences 4",
            r"--max-num-sequences is no flag of vllm serve 0.22; did you mean --max-num-seqs\?",
        ),
        ("--bogus", "--bogus is no flag of vllm serve 0.22$"),
        ("-max-num-seqs 4", "-max-num-seqs is no flag"),
        ("--no-max-num-seqs", "--no-max-num-seqs is no flag"),
        ("--max-num-seqs", "--max-num-seqs: takes one value, and none follows"),
        ("--max-num-seqs --port 1", "--max-num-seqs: takes one value, and none follows"),
        ("--served-model-name --port 1", "takes one value or more, and none follows"),
        ("--enforce-eager=true", "--enforce-eager=true: takes no value"),
        ("--max-num-seqs.a 3", "--max-num-seqs.a: --max-num-seqs takes one value, and no dotted key"),
        ("--max-num-seqs many", "--max-num-seqs: 'many' is not a whole number"),
        ("--scheduling-policy sjf", "--scheduling-policy: 'sjf' must be one of fcfs, priority"),
        ("--dtype int8", "--dtype: 'int8' must be one of auto"),
        ("--cudagraph-capture-sizes 4 0", "--cudagraph-capture-sizes: '0' must be 1 or more"),
        ("--max-num-partial-prefills 0", "--max-num-partial-prefills: '0' must be 1 or more"),
        ("--speculative-config ngram", "--speculative-config 'ngram': is not JSON"),
        ("--speculative-config 3", "--speculative-config '3': must be a JSON object"),
        ("m --model n", "'n' was not expected: the model is 'm' already"),
        ("m --enable-prefix-caching true", "'true' was not expected"),
        ("--config a --config b", "--config is given 2 times"),
        ("'m", "no closing quotation"),
        ("VLLM_USE_V2_MODEL_RUNNER=yes m", "VLLM_USE_V2_MODEL_RUNNER=yes: must be 0 or 1"),
    ],
)
def test_a_line_that_vllm_would_not_take_is_refused(text, message):
    with pytest.raises(VllmArgsError, match=message):
        parse_vllm_args(text)


@pytest.mark.parametrize("names", [("--max-num-partial-prefills",), PARTIAL_PREFILLS])
def test_partial_prefill_flags_are_said_to_limit_nothing(names):
    """Report 7: 0.22.0 accepts them, and its scheduler reads neither."""
    args = parse_vllm_args(" ".join(f"{name} 2" for name in names))
    assert args.limits_nothing == names
    (line,) = args.warnings()
    assert line.startswith(f"--vllm-args: {' and '.join(names)}: the scheduler of vLLM 0.22.0 limits no")


@pytest.mark.parametrize(
    ("threshold", "partial_prefills", "resolved"), [(0, 1, 0), (0, 2, 327), (100, 2, 100), (100, 1, 100)]
)
def test_several_partial_prefills_set_an_unset_threshold_to_four_percent(
    threshold, partial_prefills, resolved
):
    assert resolve_long_prefill_token_threshold(threshold, partial_prefills, 8192) == resolved


def test_every_short_flag_leads_to_a_flag():
    assert set(SHORT.values()) <= set(FLAGS)


@given(st.sampled_from(sorted(FLAGS.items())))
def test_every_known_flag_is_followed_ignored_or_refused_by_name(flag):
    name, takes = flag
    if name == "config":
        return
    value = "" if takes is Takes.NOTHING else '{"a": 1}' if takes is Takes.JSON else "1"
    text = f"{spelled(name)} {shlex.quote(value) if value else ''}"
    try:
        args = parse_vllm_args(text)
    except VllmArgsError as e:
        assert spelled(name) in str(e)
    else:
        harmless = "parallel" in name or name in ("stream_interval", "max_long_partial_prefills")
        assert args.engine or args.ignored == (spelled(name),) or harmless


# ---------------------------------------------------------------- beside our own flags


def test_a_flag_of_our_own_wins_over_the_same_in_the_line():
    args = parse_vllm_args("--max-num-seqs 64 --max-model-len 4k --no-enable-prefix-caching")
    flags = merge(EngineFlags(max_num_seqs=8), args)
    assert flags == EngineFlags(max_num_seqs=8, max_model_len=4000, enable_prefix_caching=False)


def test_an_empty_line_changes_nothing():
    flags = EngineFlags(block_size=32)
    assert merge(flags, VllmArgs()) == flags
    assert with_vllm_args(flags, "", executor="constant") == (flags, [])


def test_a_model_that_is_no_folder_here_is_said_and_left_out(tmp_path):
    flags, (note,) = with_vllm_args(EngineFlags(), "serve org/model -pp 1", executor="torch")
    assert flags.model is None and note.startswith("--vllm-args: the model org/model is no folder here")
    flags, notes = with_vllm_args(EngineFlags(), f"serve {tmp_path}", executor="torch")
    assert (flags.model, notes) == (tmp_path, [])
    flags, notes = with_vllm_args(EngineFlags(model=tmp_path), "serve org/model", executor="torch")
    assert (flags.model, notes) == (tmp_path, [])


def test_what_only_a_model_can_act_on_is_ignored_where_none_runs():
    line = "--dtype bfloat16 --kv-cache-memory-bytes 1G --load-format dummy --port 1"
    flags, (note,) = with_vllm_args(EngineFlags(), line, executor="constant")
    assert flags == EngineFlags()
    assert (
        "--port, --dtype, --kv-cache-memory-bytes, --load-format; of these, --kv-cache-memory-bytes decide"
        in note
    )
    flags, _ = with_vllm_args(EngineFlags(), line, executor="torch")
    assert (flags.dtype, flags.kv_cache_memory_bytes, flags.load_format) == ("bfloat16", 2**30, "dummy")
