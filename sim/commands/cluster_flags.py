"""The flags of a cluster, and the configuration they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from servetwin.sim.commands.errors import UsageError
from servetwin.sim.commands.flag_kinds import count as _int
from servetwin.sim.commands.flag_kinds import flag as _flag
from servetwin.sim.commands.flag_kinds import switch as _switch

if TYPE_CHECKING:
    from collections.abc import Callable

    from servetwin.sim.cluster.config import Autoscale, ClusterConfig, Disaggregation, Failure

CLUSTER = Group("Cluster (modelled step times)", sort_key=1)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ClusterFlags:
    """Replicas of the engine. None: the default applies."""

    replicas: Annotated[
        int | None,
        _int(CLUSTER, "Engines, each with the flags below; with --autoscale: at the start (default: 1)."),
    ] = None
    router: Annotated[
        str | None,
        _flag(
            CLUSTER,
            "Who gets a request: random, round_robin, least_requests, least_tokens, power_of_two, prefix_affinity, "
            "session (sticky), or module:attribute of your own (default: round_robin).",
        ),
    ] = None
    max_queued_requests: Annotated[
        int | None,
        _int(
            CLUSTER,
            "A request that is sent to a replica where so many wait already is refused (default: no limit).",
        ),
    ] = None
    replica_failure: Annotated[
        tuple[str, ...],
        _switch(
            CLUSTER,
            "REPLICA@FROM-TO: replica 0, 1, ... is gone between these simulated seconds, with all it held; may be "
            "given several times.",
        ),
    ] = ()
    on_failure: Annotated[
        Literal["lost", "retry", "reroute"] | None,
        _flag(
            CLUSTER,
            "Requests of a replica that fails: lost. retry: they begin anew there when it is back. reroute: they begin "
            "anew at another replica at once (default: lost).",
        ),
    ] = None
    autoscale: Annotated[
        Literal["queue", "kv", "rate"] | None,
        _flag(
            CLUSTER,
            "One replica more while a signal is above --scale-up-at, one less while it is below --scale-down-at. "
            "queue: requests that wait, per replica. kv: used share of the KV blocks, 0 to 1. rate: requests/s "
            "sent to each replica.",
        ),
    ] = None
    scale_up_at: Annotated[float | None, _flag(CLUSTER, "Of the signal of --autoscale.")] = None
    scale_down_at: Annotated[float | None, _flag(CLUSTER, "Of the signal of --autoscale.")] = None
    min_replicas: Annotated[int | None, _int(CLUSTER, "With --autoscale (default: 1).")] = None
    max_replicas: Annotated[int | None, _int(CLUSTER, "With --autoscale, which needs it.")] = None
    scale_interval_s: Annotated[
        float | None, _flag(CLUSTER, "Seconds between two looks at the signal (default: 15).")
    ] = None
    startup_delay_s: Annotated[
        float | None, _flag(CLUSTER, "Seconds until a new replica takes requests (default: 0).")
    ] = None
    scale_cooldown_s: Annotated[
        float | None, _flag(CLUSTER, "Seconds after a change of size without another (default: 0).")
    ] = None
    prefill_replicas: Annotated[
        int | None,
        _int(CLUSTER, "Replicas 0, 1, ... only compute prompts; needs --decode-replicas."),
    ] = None
    decode_replicas: Annotated[
        int | None, _int(CLUSTER, "The replicas behind those get the KV of prompts and compute the answers.")
    ] = None
    kv_transfer_bandwidth: Annotated[
        float | None,
        _flag(CLUSTER, "Bytes/s at which the KV of one prompt is sent (default: it takes no time)."),
    ] = None
    kv_transfer_latency_s: Annotated[
        float | None, _flag(CLUSTER, "Seconds that every transfer takes on top (default: 0).")
    ] = None
    kv_bytes_per_token: Annotated[
        int | None,
        _int(
            CLUSTER, "What a transfer carries for each prompt token (default: as the model in --model says)."
        ),
    ] = None


def cluster_config(flags: ClusterFlags, model_kv_bytes: Callable[[], int | None]) -> ClusterConfig:
    """What the flags stand for. Raises UsageError.

    `model_kv_bytes`: asked for the KV bytes of a token; None where no model is known.
    """
    from pydantic import ValidationError

    from servetwin.sim.cluster.config import ClusterConfig
    from servetwin.sim.config import explain

    _check_company(flags)
    try:
        split = _disaggregation(flags, model_kv_bytes)
        of_split = None if split is None else split.prefill_replicas + split.decode_replicas
        replicas = flags.replicas if flags.replicas is not None else of_split
        return ClusterConfig.model_validate(
            _given(
                replicas=replicas,
                router=flags.router,
                max_queued_requests=flags.max_queued_requests,
                failures=tuple(map(_failure, flags.replica_failure)),
                on_failure=flags.on_failure,
                autoscale=_autoscale(flags),
                disaggregation=split,
            )
        )
    except ValidationError as e:
        raise UsageError(_spelled(explain(e))) from e


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


NAMES = {
    "autoscale.interval_s": "--scale-interval-s",
    "autoscale.cooldown_s": "--scale-cooldown-s",
    "interval_s": "--scale-interval-s",
    "cooldown_s": "--scale-cooldown-s",
}
"""Fields that are not called like their flags."""


def _spelled(message: str) -> str:
    """A message of the configuration, with the flag in the place of the field it begins with."""
    from servetwin.sim.commands.flag_names import spelled

    name, _, rest = message.partition(" ")
    if name in NAMES:
        return f"{NAMES[name]} {rest}"
    return f"{spelled(name)} {rest}" if name in vars(ClusterFlags()) else message


SCALING = (
    *("scale_up_at", "scale_down_at", "min_replicas", "max_replicas"),
    *("scale_interval_s", "startup_delay_s", "scale_cooldown_s"),
)
SPLITTING = ("kv_transfer_bandwidth", "kv_transfer_latency_s", "kv_bytes_per_token")


def _check_company(flags: ClusterFlags) -> None:
    """Flags that do something only beside another."""
    from servetwin.sim.commands.flag_names import spelled

    if flags.autoscale is None:
        for name in (n for n in SCALING if getattr(flags, n) is not None):
            raise UsageError(f"{spelled(name)} has no effect without --autoscale")
    else:
        for name in ("scale_up_at", "scale_down_at", "max_replicas"):
            if getattr(flags, name) is None:
                raise UsageError(f"--autoscale {flags.autoscale} needs {spelled(name)}")
    if (flags.prefill_replicas is None) != (flags.decode_replicas is None):
        there, missing = ("prefill", "decode") if flags.decode_replicas is None else ("decode", "prefill")
        raise UsageError(f"--{there}-replicas needs --{missing}-replicas")
    if flags.prefill_replicas is None:
        for name in (n for n in SPLITTING if getattr(flags, n) is not None):
            raise UsageError(
                f"{spelled(name)} has no effect without --prefill-replicas and --decode-replicas"
            )
    if flags.on_failure is not None and not flags.replica_failure:
        raise UsageError(f"--on-failure {flags.on_failure} has no effect without --replica-failure")


def _failure(text: str) -> Failure:
    from servetwin.sim.cluster.config import Failure

    replica, _, window = text.partition("@")
    begin, _, end = window.partition("-")
    try:
        return Failure(replica=int(replica), from_s=float(begin), to_s=float(end))
    except ValueError as e:
        from pydantic import ValidationError

        if isinstance(e, ValidationError) and not isinstance(e.errors()[0]["input"], str):
            from servetwin.sim.config import explain

            raise UsageError(f"--replica-failure {text!r}: {explain(e)}") from e
        raise UsageError(
            f"--replica-failure {text!r} must be REPLICA@FROM-TO in seconds, for example 0@60-90"
        ) from e


def _autoscale(flags: ClusterFlags) -> Autoscale | None:
    from servetwin.sim.cluster.config import Autoscale

    if flags.autoscale is None:
        return None
    return Autoscale.model_validate(
        _given(
            signal=flags.autoscale,
            scale_up_at=flags.scale_up_at,
            scale_down_at=flags.scale_down_at,
            min_replicas=flags.min_replicas,
            max_replicas=flags.max_replicas,
            interval_s=flags.scale_interval_s,
            startup_delay_s=flags.startup_delay_s,
            cooldown_s=flags.scale_cooldown_s,
        )
    )


def _disaggregation(flags: ClusterFlags, model_kv_bytes: Callable[[], int | None]) -> Disaggregation | None:
    from servetwin.sim.cluster.config import Disaggregation

    if flags.prefill_replicas is None:
        return None
    bytes_per_token = flags.kv_bytes_per_token
    if flags.kv_transfer_bandwidth is None:
        if bytes_per_token is not None:
            raise UsageError("--kv-bytes-per-token has no effect without --kv-transfer-bandwidth")
    elif bytes_per_token is None and (bytes_per_token := model_kv_bytes()) is None:
        raise UsageError(
            "--kv-transfer-bandwidth needs --kv-bytes-per-token, or --model: nothing says how much is sent"
        )
    return Disaggregation.model_validate(
        _given(
            prefill_replicas=flags.prefill_replicas,
            decode_replicas=flags.decode_replicas,
            kv_transfer_bandwidth=flags.kv_transfer_bandwidth,
            kv_transfer_latency_s=flags.kv_transfer_latency_s,
            kv_bytes_per_token=bytes_per_token,
        )
    )


def cluster_line(config: ClusterConfig) -> str:
    """The configuration in words."""
    router = config.router or "round_robin"
    parts = [f"{config.replicas} replica{'s' * (config.replicas != 1)}", f"router {router}"]
    if (split := config.disaggregation) is not None:
        parts[0] += f" ({split.prefill_replicas} for prompts, {split.decode_replicas} for answers)"
        bandwidth, each = split.kv_transfer_bandwidth, split.kv_bytes_per_token
        wire = (
            "KV sent in no time"
            if bandwidth is None
            else f"{each:,} bytes of KV a token at {bandwidth:g} bytes/s"
        )
        parts.append(f"{wire}, latency {split.kv_transfer_latency_s:g} s")
    if (scale := config.autoscale) is not None:
        parts.append(
            f"{scale.min_replicas} to {scale.max_replicas} by {scale.signal} (up above {scale.scale_up_at:g}, down "
            f"below {scale.scale_down_at:g}; every {scale.interval_s:g} s, start in {scale.startup_delay_s:g} s)"
        )
    if config.max_queued_requests is not None:
        parts.append(f"at most {config.max_queued_requests} waiting at each")
    if config.failures:
        parts.append(f"{len(config.failures)} failures ({config.on_failure})")
    return ", ".join(parts)
