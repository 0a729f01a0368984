"""From what a user names to a workload: a preset, a trace file, or our JSONL."""

from __future__ import annotations

from pathlib import Path

from servetwin.workloads.checks import check_count, check_seed
from servetwin.workloads.presets import PRESETS, build_preset
from servetwin.workloads.spec import ListWorkload, WorkloadError
from servetwin.workloads.traces.formats import known_formats, read_trace


def open_workload(
    name_or_path: str | Path, num_prompts: int | None = None, rate_per_s: float | None = None, seed: int = 0
) -> ListWorkload:
    """The workload behind a preset's name or a file's path (a Path is always a file).

    num_prompts: the first ones in order of arrival (default: all of a file, 1000 of a preset).
    rate_per_s: another request rate, for presets only; a trace keeps its arrivals.
    seed: root seed of a preset; a trace has nothing to draw.
    Raises WorkloadError for whatever cannot be used.
    """
    if num_prompts is not None:
        check_count("num_prompts", num_prompts)
    check_seed(seed)
    if _is_preset(name_or_path):
        return build_preset(str(name_or_path), num_prompts, rate_per_s, seed)
    if rate_per_s is not None:
        raise WorkloadError(
            f"rate_per_s {rate_per_s!r}: must be left out for a trace, which has its own arrivals"
        )
    return _open_file(name_or_path, num_prompts, seed)


def _is_preset(name_or_path: str | Path) -> bool:
    presets = ", ".join(PRESETS)
    exists = Path(name_or_path).exists()
    if isinstance(name_or_path, str) and name_or_path in PRESETS:
        if exists:
            raise WorkloadError(
                f"workload {name_or_path!r}: is a preset and a file here; the file is ./{name_or_path}, "
                f"the preset can only be used from another folder"
            )
        return True
    if not exists:
        raise WorkloadError(
            f"workload {str(name_or_path)!r}: is neither a file nor a preset. Presets: {presets}. "
            f"Trace formats: {known_formats()}"
        )
    return False


def _open_file(path: str | Path, num_prompts: int | None, seed: int) -> ListWorkload:
    trace = read_trace(path)
    if num_prompts is not None and num_prompts > len(trace):
        raise WorkloadError(
            f"num_prompts {num_prompts}: must be at most {len(trace)}, the usable rows of {path}"
        )
    requests = trace.requests[:num_prompts]
    about = {
        "format": trace.format,
        "path": str(path),
        **trace.counts(),
        "requests": len(requests),
        "seed": seed,
    }
    return ListWorkload(requests, about)
