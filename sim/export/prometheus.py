"""A run as Prometheus metrics under vLLM's names, at the end or as of any simulated instant."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from servetwin.sim.export import vllm_metrics as vllm
from servetwin.sim.export.engine_metrics import EngineMetrics, Options, engine_metrics, steps_by_replica
from servetwin.sim.runs import WORKLOAD, RunFolderError, read_json_lines

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric

    from servetwin.sim.runs import Run

NO_MODEL = "servetwin"
"""The model's name where a run has none: only its step times are known."""
AT_THE_END = float("inf")
Labels = dict[str, str]


class When(NamedTuple):
    """What is asked for."""

    at_ns: float
    created_s: float


class RunMetrics:
    """All metrics of a run, of all its engines."""

    def __init__(
        self,
        run: Run,
        *,
        low_latency: bool = False,
        legacy_names: bool = False,
        block_lifetime: bool = False,
        created_s: float = 0.0,
    ) -> None:
        """`created_s`: since when counters count, seconds since 1970. Raises RunFolderError, LogTooOldError."""
        engine = run.config.get("engine")
        if engine is None:
            raise RunFolderError(
                f"{run.path} was not written by a scheduler: there are no metrics of an engine"
            )
        if block_lifetime and not len(run.blocks):
            raise RunFolderError(
                f"{run.path}: has no blocks/, which --kv-cache-metrics needs (run --log-blocks)"
            )
        self._cache: Mapping[str, Any] = engine["cache"]
        self._model = engine["model"].get("name") or NO_MODEL
        self._legacy, self._created_s = legacy_names, created_s
        self.options = Options(
            int(engine["model"]["max_model_len"]),
            low_latency,
            engine.get("speculative") is not None,
            block_lifetime,
        )
        asked = _asked_tokens(run)
        self.engines: dict[int, EngineMetrics] = {
            replica: engine_metrics(run, replica, steps, asked, self.options)
            for replica, steps in steps_by_replica(run).items()
        }
        ends = run.requests[["finish_s", "last_token_s", "arrival_s"]].max()
        self.end_s = float(ends.max()) if len(run.requests) else 0.0
        """When the last request ended: from then on nothing changes."""

    def families(self, at_ns: float = AT_THE_END, created_s: float | None = None) -> Iterator[Metric]:
        """Every metric as of an instant; `created_s`: since when counters count, if not as given before."""
        from prometheus_client import Metric

        families = [*vllm.FAMILIES]
        families += vllm.SPECULATION if self.options.speculation else ()
        families += (vllm.BLOCK_LIFETIME,) if self.options.block_lifetime else ()
        when = When(at_ns, self._created_s if created_s is None else created_s)
        by_name = {family.name: self._family(family, when) for family in families}
        yield from by_name.values()
        yield self._cache_config()
        if self._legacy:
            for old, new in vllm.LEGACY.items():
                yield _renamed(by_name[new], old)
            for name, text in vllm.LEGACY_ZEROS.items():
                metric = Metric(name, text, "gauge")
                for replica in self.engines:
                    metric.add_sample(name, self._labels(replica), 0.0)
                yield metric

    def _family(self, family: vllm.Family, when: When) -> Metric:
        from prometheus_client import Metric

        metric = Metric(family.name, family.text, family.kind)
        for replica, engine in self.engines.items():
            labels = self._labels(replica)
            if family.kind == "histogram":
                self._add_histogram(metric, labels, engine, when)
            elif family.kind == "counter":
                self._add_counters(metric, family, labels, engine, when)
            else:
                for value, held in engine.gauges[family.name].items():
                    metric.add_sample(family.name, _with(labels, family, value), held.at(when.at_ns))
        return metric

    def _add_counters(
        self, metric: Metric, family: vllm.Family, labels: Labels, engine: EngineMetrics, when: When
    ) -> None:
        for value, counted in engine.counters[family.name].items():
            total = counted.until(when.at_ns)
            if family.name == "vllm:generation_tokens":
                total = min(total, engine.generation_tokens)
            own = _with(labels, family, value)
            metric.add_sample(f"{family.name}_total", own, float(total))
            metric.add_sample(f"{family.name}_created", own, when.created_s)

    def _add_histogram(self, metric: Metric, labels: Labels, engine: EngineMetrics, when: When) -> None:
        sampled = engine.histograms[metric.name]
        state = sampled.until(when.at_ns)
        so_far = 0
        for bound, count in zip((*map(float, sampled.bounds), float("inf")), state.counts, strict=True):
            so_far += count
            metric.add_sample(f"{metric.name}_bucket", labels | {"le": _bound(bound)}, float(so_far))
        metric.add_sample(f"{metric.name}_count", labels, float(so_far))
        metric.add_sample(f"{metric.name}_sum", labels, state.total)
        metric.add_sample(f"{metric.name}_created", labels, when.created_s)

    def _cache_config(self) -> Metric:
        from prometheus_client import Metric

        metric = Metric(vllm.CACHE_CONFIG.name, vllm.CACHE_CONFIG.text, "gauge")
        known = {
            name: str(self._cache[name]) for name in ("block_size", "enable_prefix_caching", "num_gpu_blocks")
        }
        for replica in self.engines:
            metric.add_sample(metric.name, {"engine": str(replica), **known}, 1.0)
        return metric

    def _labels(self, replica: int) -> Labels:
        return {"model_name": self._model, "engine": str(replica)}

    @cached_property
    def not_modelled(self) -> list[str]:
        """Names of vLLM that are not among the families."""
        opt_in = [] if self.options.block_lifetime else [vllm.BLOCK_LIFETIME.name]
        return [*vllm.NOT_MODELLED, *opt_in]


class Collector:
    """For a registry of `prometheus_client`: the metrics as of an instant that is asked for at each scrape."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def prometheus_text(metrics: RunMetrics, at_ns: float = AT_THE_END) -> Iterator[bytes]:
    """The text format of Prometheus; what vLLM has and this has not stands in comments."""
    from prometheus_client import generate_latest

    yield b"# vLLM 0.22.0 metrics of a simulated run; not modelled: "
    yield ", ".join(metrics.not_modelled).encode() + b"\n"
    yield generate_latest(registry_of(metrics.families(at_ns)))


def openmetrics_text(metrics: RunMetrics, at_ns: float = AT_THE_END) -> Iterator[bytes]:
    """The OpenMetrics text format, which has no place for comments."""
    from prometheus_client.openmetrics.exposition import ALLOWUTF8, generate_latest

    # By default the client takes the colon out of the names of samples, though it is allowed.
    registry = registry_of(metrics.families(at_ns))
    yield generate_latest(registry, escaping=ALLOWUTF8)  # type: ignore[no-untyped-call]


def registry_of(metrics: Iterable[Metric]) -> CollectorRegistry:
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(metrics))
    return registry


def _asked_tokens(run: Run) -> dict[str, int]:
    """max_tokens of each request; nothing where the workload was not kept."""
    path = run.path / WORKLOAD
    if not path.is_file():
        return {}
    return {row["request_id"]: int(row["output_tokens"]) for row in read_json_lines(path)}


def _with(labels: Labels, family: vllm.Family, value: str) -> Labels:
    return labels if family.label is None else labels | {family.label: value}


def _bound(bound: float) -> str:
    """As the client of Prometheus writes it: 0.3, 1.0, +Inf."""
    return "+Inf" if bound == float("inf") else str(bound)


def _renamed(metric: Metric, name: str) -> Metric:
    from prometheus_client import Metric

    renamed = Metric(name, f"{metric.documentation} Old name of {metric.name}.", metric.type)
    for sample in metric.samples:
        renamed.add_sample(name + sample.name.removeprefix(metric.name), sample.labels, sample.value)
    return renamed
