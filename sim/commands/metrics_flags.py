"""Flags of the commands that show a run as Prometheus metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from servetwin.sim.commands.flag_kinds import switch

if TYPE_CHECKING:
    from servetwin.sim.export.prometheus import RunMetrics
    from servetwin.sim.runs import Run

METRICS = Group("Metrics", sort_key=2)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class MetricsFlags:
    """Which metrics, under which names, with which buckets."""

    legacy_metric_names: Annotated[
        bool,
        switch(
            METRICS,
            "Also under the names that older dashboards ask for: gpu_cache_usage_perc, gpu_prefix_cache_*, "
            "time_per_output_token_seconds (the inter-token latency), "
            "num_requests_swapped, cpu_cache_usage_perc (both 0).",
        ),
    ] = False
    low_latency_buckets: Annotated[
        bool,
        switch(
            METRICS,
            "More buckets below vLLM's first ones, which are 10 ms for times between tokens and 0.3 s for times of "
            "requests.",
        ),
    ] = False
    kv_cache_metrics: Annotated[
        bool, switch(METRICS, "Also vllm:kv_block_lifetime_seconds, of all blocks; needs the run's blocks/.")
    ] = False


DEFAULT = MetricsFlags()


def metrics_of(run: Run, flags: MetricsFlags, created_s: float | None = None) -> RunMetrics:
    """The metrics of a run; counters count since `created_s` (default: since the run was started)."""
    from datetime import datetime

    from servetwin.sim.export.prometheus import RunMetrics

    return RunMetrics(
        run,
        low_latency=flags.low_latency_buckets,
        legacy_names=flags.legacy_metric_names,
        block_lifetime=flags.kv_cache_metrics,
        created_s=(
            datetime.fromisoformat(run.header["wall_started"]).timestamp() if created_s is None else created_s
        ),
    )
