"""Flags that several commands share, grouped as in `vllm serve --help`; spelling and defaults are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from servetwin.sim.commands.flag_kinds import count as _int
from servetwin.sim.commands.flag_kinds import flag as _flag
from servetwin.sim.commands.flag_kinds import numbers as _ints
from servetwin.sim.commands.flag_kinds import switch as _switch
from servetwin.sim.definitions import formulas_in_words

RUN = Group("Run", sort_key=0)
LOAD = Group("Load", sort_key=1)
MODEL = Group("Model", sort_key=2)
CARD = Group("Card (executor roofline, or a profile on several cards)", sort_key=2)
CACHE = Group("KV cache", sort_key=3)
SCHEDULER = Group("Scheduler", sort_key=4)
SPECULATION = Group("Speculative decoding", sort_key=5)
COMPAT = Group("Fidelity to vLLM (default of the corrections: as --vllm-compat says)", sort_key=6)
SAMPLING = Group("Sampling (executor torch)", sort_key=7)

WorkloadName = Annotated[
    str | None,
    Parameter(
        help="A trace (its format is told by its content), our JSONL (one request a line), a run folder, or a preset "
        "(`servetwin trace presets`)."
    ),
]
MaxModelLen = Annotated[int | None, _int(MODEL, "Longest prompt + output, in tokens (default: the model's).")]
BlockSize = Annotated[int, _int(CACHE, "Tokens per KV block.")]
EnforceEager = Annotated[
    bool,
    _switch(
        MODEL,
        "Capture no CUDA graphs: decode steps on a GPU launch their kernels one by one. On a CPU this is always so. "
        "Step times of a profile: no step is padded, which is their default.",
    ),
]
CaptureSizes = Annotated[
    tuple[int, ...] | None,
    _ints(
        MODEL,
        "Sizes of CUDA graphs to capture, for example 1 2 4 8; a batch is padded to the next one (default: 1, 2, 4, "
        "then steps of 8, from 256 on of 16). A CPU has none. Executor torch replays decode batches; with step times "
        "of a profile every step that fits is padded (default: none is).",
    ),
]
MaxCaptureSize = Annotated[
    int | None,
    _int(
        MODEL,
        "Largest of the default sizes (default: 2 x max_num_seqs, at most 512). Pads the steps of a profile to the "
        "default sizes, too.",
    ),
]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SimulationFlags:
    """What a simulated run is made of beside its load and its engine; with these it decides every figure."""

    executor: Annotated[
        str | None,
        _flag(
            RUN,
            "Required. torch: a real model, measured. constant: every step takes --step-time-s. roofline: "
            "estimated for --model from the published peaks of --gpu. A path: step times from a profile of "
            "`servetwin fit`, or from a folder of per-kernel tables; a shipped profile goes by its name. "
            "recorded:RUN: those of an earlier run, step by step. module:attribute: your own, called with "
            "ExecutorOptions (the current folder is searched, too).",
        ),
    ] = None
    step_time_s: Annotated[
        float | None, _flag(RUN, "Seconds that every step takes; executor constant only, above 0.")
    ] = None
    leap: Annotated[
        bool,
        _flag(
            RUN,
            "Take steps in which the same requests decode many at once, where their time is modelled. The run is the "
            "same without, and takes longer.",
        ),
    ] = True
    metric_defs: Annotated[
        str,
        _flag(
            RUN,
            "Whose definitions: vllm-bench, vllm-server, guidellm or inference-perf. Over completed requests: "
            f"{formulas_in_words()}.",
        ),
    ] = "vllm-bench"
    reset_prefix_cache_at: Annotated[
        tuple[float, ...],
        _switch(
            RUN,
            "Simulated seconds at which to empty the prefix cache, which works only while no request holds a block; "
            "may be given several times.",
        ),
    ] = ()
    seed: Annotated[int, _int(RUN, "Root of every random stream: workload, token ids, sampling.")] = 0


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RunFlags(SimulationFlags):
    """How one run is carried out and what it leaves behind."""

    live: Annotated[
        bool,
        _switch(
            RUN,
            "Serve on the wall clock instead of in simulated time: requests are sent at their own times to an engine "
            "in a child process (executor torch). An hour of trace takes an hour.",
        ),
    ] = False
    out: Annotated[Path | None, _flag(RUN, "Folder to write the run to (default: nothing is written).")] = (
        None
    )
    overwrite: Annotated[bool, _switch(RUN, "Replace the run in the folder of --out.")] = False
    save_tokens: Annotated[bool, _switch(RUN, "Write tokens/: every output token with its time.")] = False
    save_plans: Annotated[
        bool, _switch(RUN, "Write plans.jsonl.zst: every plan, for `servetwin execute`.")
    ] = False
    log_blocks: Annotated[
        bool | None,
        _flag(RUN, "Write blocks/: the life of every KV block (default: on below 50,000 requests)."),
    ] = None
    pace: Annotated[
        float | None,
        _flag(
            RUN,
            "At most so many simulated seconds in one second, to watch a run while it goes on (default: as fast as it "
            "can). The run is the same.",
        ),
    ] = None
    json: Annotated[bool, _switch(RUN, "Print the summary as one JSON object.")] = False


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LoadFlags:
    """Which requests are sent."""

    num_prompts: Annotated[
        int | None,
        _int(
            LOAD,
            "Only the first N requests (default: all of a trace, a preset's own number, 1,000 of a dataset).",
        ),
    ] = None
    request_rate: Annotated[
        float | None,
        _flag(
            LOAD,
            "Requests/s of a preset instead of its own, of --dataset-name, or of a trace without times (of one with "
            "sessions: beginnings of sessions/s); inf: all at once. A trace with times keeps them: see `servetwin "
            "trace scale`.",
        ),
    ] = None
    rate_scale: Annotated[
        float,
        _flag(
            LOAD,
            "Send so many times as fast, whatever gave the times: arrivals, think times and times of giving up are "
            "divided by it.",
        ),
    ] = 1.0
    burstiness: Annotated[
        float | None,
        _flag(
            LOAD, "With --request-rate: gaps of shape B, below 1 bursty, 1 Poisson (default), inf constant."
        ),
    ] = None
    ramp_up_strategy: Annotated[
        Literal["linear", "exponential"] | None,
        _flag(
            LOAD,
            "The rate goes with the index of the request (of a trace with sessions: of the session) from "
            "--ramp-up-start-rps to --ramp-up-end-rps.",
        ),
    ] = None
    ramp_up_start_rps: Annotated[
        float | None, _flag(LOAD, "Rate at the first request, in the unit of --request-rate.")
    ] = None
    ramp_up_end_rps: Annotated[
        float | None, _flag(LOAD, "Rate at the last request, in the unit of --request-rate.")
    ] = None
    max_concurrency: Annotated[
        int | None,
        _int(
            LOAD,
            "At most so many requests in flight: the client sends one that is due then when another has ended. "
            "Latencies count from when it was sent; those from its arrival stand beside them.",
        ),
    ] = None
    loop: Annotated[
        Literal["auto", "open", "closed"],
        _flag(
            LOAD,
            "closed: a later turn of a session is sent when the turn before has ended and its think time has passed. "
            "open: at its recorded time. auto: closed where there are think times.",
        ),
    ] = "auto"
    dataset_name: Annotated[
        Literal["random", "prefix_repetition"] | None,
        _flag(
            LOAD,
            "Made-up requests of `vllm bench serve` in the place of WORKLOAD, all at once without a rate.",
        ),
    ] = None
    random_input_len: Annotated[int | None, _int(LOAD, "Dataset random: prompt tokens (default 1024).")] = (
        None
    )
    random_output_len: Annotated[int | None, _int(LOAD, "Dataset random: output tokens (default 128).")] = (
        None
    )
    random_range_ratio: Annotated[
        float | None, _flag(LOAD, "Dataset random: lengths from (1 - R) to (1 + R) times these (default 0).")
    ] = None
    random_prefix_len: Annotated[
        int | None, _int(LOAD, "Dataset random: tokens that all prompts begin with, on top (default 0).")
    ] = None
    prefix_repetition_prefix_len: Annotated[
        int | None, _int(LOAD, "Dataset prefix_repetition: tokens of a prefix (default 256).")
    ] = None
    prefix_repetition_suffix_len: Annotated[
        int | None, _int(LOAD, "Dataset prefix_repetition: tokens of one's own (default 256).")
    ] = None
    prefix_repetition_num_prefixes: Annotated[
        int | None, _int(LOAD, "Dataset prefix_repetition: prefixes (default 10).")
    ] = None
    prefix_repetition_output_len: Annotated[
        int | None, _int(LOAD, "Dataset prefix_repetition: output tokens (default 128).")
    ] = None
    trace_warnings: Annotated[
        bool,
        _flag(LOAD, "Say on stderr what of a trace's recorded times misleads: coarse clocks, idle ends."),
    ] = True
    ignore_eos: Annotated[
        bool, _flag(LOAD, "Generate exactly output_tokens tokens; a request's own ignore_eos wins.")
    ] = True


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """How a model's tokens are chosen."""

    temperature: Annotated[float, _flag(SAMPLING, "0 is greedy.")] = 0.0
    top_k: Annotated[int, _int(SAMPLING, "Draw from the k most likely tokens; 0 is off.")] = 0
    top_p: Annotated[
        float, _flag(SAMPLING, "Draw from the most likely tokens with this probability; 1 is off.")
    ] = 1.0


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """One engine, as `vllm serve` would be told. None: the default applies."""

    model: Annotated[
        Path | None,
        _flag(
            MODEL,
            "Local Hugging Face folder. Without it max_model_len is 131,072 and the pool has 40,000 blocks (assumed).",
        ),
    ] = None
    load_format: Annotated[
        Literal["auto", "dummy"],
        _flag(MODEL, "dummy: random weights for the configuration in the model folder."),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        _flag(MODEL, "Data type of weights, activations and KV cache."),
    ] = "auto"
    compile: Annotated[
        bool,
        _switch(MODEL, "Compile the model with torch.compile before the first step; executor torch only."),
    ] = False
    threads: Annotated[
        int | None,
        _int(
            MODEL,
            "CPU threads that torch computes with (default: one per physical core that the process may use; fewer if "
            "OMP_NUM_THREADS says so); executor torch only.",
        ),
    ] = None
    enforce_eager: EnforceEager = False
    cudagraph_capture_sizes: CaptureSizes = None
    max_cudagraph_capture_size: MaxCaptureSize = None
    gpu: Annotated[
        str | None,
        _flag(
            CARD,
            "Card to estimate step times for, and the size of the pool: H100, A100-80GB, RTX-4090 ... With a profile "
            "on several cards: the one whose link counts (default: the one that was measured).",
        ),
    ] = None
    tensor_parallel_size: Annotated[
        int,
        _int(CARD, "Cards that share every layer. With a profile of fewer cards step times are an estimate."),
    ] = 1
    kv_cache_dtype: Annotated[
        str,
        _flag(
            CARD,
            "Data type of K and V: auto (as --dtype), bfloat16, float16, fp8, fp8_e4m3, fp8_e5m2; executor roofline "
            "only.",
        ),
    ] = "auto"
    max_model_len: MaxModelLen = None
    block_size: BlockSize = 16
    num_gpu_blocks_override: Annotated[
        int | None,
        _int(
            CACHE,
            "Blocks in the pool, the reserved block 0 included (default: what memory holds; 40,000 without a model).",
        ),
    ] = None
    kv_cache_memory_bytes: Annotated[
        int | None, _int(CACHE, "Memory of the KV cache in bytes; executors torch and roofline only.")
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        _flag(
            CACHE,
            "Part of the device's memory (0 to 1) that the engine may use, weights and activations included; executors "
            "torch and roofline only (default: 0.92 of a GPU; on a CPU half of what is free, at most 4 GiB for the "
            "cache).",
        ),
    ] = None
    enable_prefix_caching: Annotated[bool, _flag(CACHE, "Reuse KV blocks of equal prompt prefixes.")] = True
    zero_fresh_blocks: Annotated[
        bool, _switch(CACHE, "Clear every KV block before its first use; executor torch only.")
    ] = False
    max_num_seqs: Annotated[
        int | None,
        _int(SCHEDULER, "Requests that may run at once (default: 256, at most max_num_batched_tokens)."),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        _int(SCHEDULER, "Tokens per step (default: 2,048; without chunked prefill at least max_model_len)."),
    ] = None
    max_num_scheduled_tokens: Annotated[
        int | None,
        _int(SCHEDULER, "Smaller token budget per step than max_num_batched_tokens (default: the same)."),
    ] = None
    enable_chunked_prefill: Annotated[
        bool, _flag(SCHEDULER, "Split prompts over steps to fit the token budget.")
    ] = True
    long_prefill_token_threshold: Annotated[
        int, _int(SCHEDULER, "Longest piece of a prompt per step, in tokens; 0 is off.")
    ] = 0
    scheduling_policy: Annotated[
        str,
        _flag(
            SCHEDULER,
            "Order of admission and choice of preemption victims: fcfs, priority, sjf (shortest predicted output, "
            "with ageing), fair (between client_ids by tokens served), or module:Class of your own.",
        ),
    ] = "fcfs"
    scheduler_reserve_full_isl: Annotated[
        bool, _flag(SCHEDULER, "Admit a request only when all its known tokens fit (the full-sequence gate).")
    ] = True
    async_scheduling: Annotated[
        bool | None,
        _flag(
            SCHEDULER,
            "Schedule a step while the previous one runs (default: on, as in vLLM, unless the drafter or the executor "
            "forbids it).",
        ),
    ] = None
    performance_mode: Annotated[
        Literal["balanced", "throughput"],
        _flag(SCHEDULER, "throughput: twice the default max_num_seqs and max_num_batched_tokens."),
    ] = "balanced"
    use_v2_model_runner: Annotated[
        bool,
        _flag(
            SCHEDULER,
            "Plans report resumed requests as new ones (VLLM_USE_V2_MODEL_RUNNER of vLLM); no figure changes.",
        ),
    ] = False
    max_num_partial_prefills: Annotated[int, Parameter(parse=False)] = 1
    """Only through --vllm-args: nothing in 0.22.0 reads it but the default of the threshold."""
    speculative_config: Annotated[
        str | None,
        _flag(
            SPECULATION,
            'Speculative decoding as JSON, e.g. {"method": "eagle", "num_speculative_tokens": 3}; methods: ngram, '
            "eagle (also eagle3, mtp), draft_model.",
        ),
    ] = None
    draft_acceptance_rate: Annotated[
        float | None,
        _flag(
            SPECULATION,
            "Required with --speculative-config where no model verifies drafts: probability (0 to 1) that a draft is "
            "right when all before it were. vLLM's log divides accepted by drafted tokens, which is less: with k "
            "drafts at rate r it shows (r + ... + r^k) / k.",
        ),
    ] = None
    vllm_compat: Annotated[
        str,
        _flag(
            COMPAT,
            "Release whose decisions are taken, and how: 0.22:exact (to the letter), 0.22:safe (its known defects "
            "corrected); exact and safe alone will do.",
        ),
    ] = "0.22:exact"
    forget_uncomputed_blocks: Annotated[
        bool | None,
        _flag(COMPAT, "Correction: no prefix hits on blocks of a step that a victim was taken out of."),
    ] = None
    keep_cursor: Annotated[
        bool | None,
        _flag(COMPAT, "Correction: a preemption under priority makes no running request lose its turn."),
    ] = None
    length_outranks_min_tokens: Annotated[
        bool | None,
        _flag(COMPAT, "Correction: the end of the context window ends a request also below min_tokens."),
    ] = None
    null_block_is_no_room: Annotated[
        bool | None,
        _flag(COMPAT, "Correction: the reserved block does not count when the pool's size is checked."),
    ] = None
    vllm_args: Annotated[
        str | None,
        Parameter(
            group=MODEL,
            allow_leading_hyphen=True,
            help='A `vllm serve` command line, e.g. "serve MODEL --max-num-seqs 64"; flags of ours that differ from '
            "their default win.",
        ),
    ] = None
