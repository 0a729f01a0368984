"""The resolved configuration of a cluster: replicas of one engine behind a router, and what becomes of them."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from servetwin.sim.config_base import Config, NotNegative, Positive

MAX_REPLICAS = 10_000
DEFAULT_ROUTER = "round_robin"
Seconds = Annotated[float, Field(ge=0, lt=4e9)]
OnFailure = Literal["lost", "retry", "reroute"]
Signal = Literal["queue", "kv", "rate"]


class Failure(Config):
    """A replica is gone from one instant to another, with all it held."""

    replica: NotNegative
    from_s: Seconds
    to_s: Seconds

    @model_validator(mode="after")
    def _ends_after_it_begins(self) -> Self:
        if self.to_s <= self.from_s:
            raise ValueError(
                f"failure of replica {self.replica}: it must end after {self.from_s:g} s, not at {self.to_s:g} s"
            )
        return self


class Autoscale(Config):
    """One replica more while a signal is above a threshold, one less while it is below another."""

    signal: Signal
    """queue: requests that wait, per replica; kv: used share of the KV blocks (0 to 1), mean of the replicas; rate:
    requests/s sent to each replica since the last look."""
    scale_up_at: Annotated[float, Field(gt=0)]
    scale_down_at: Annotated[float, Field(ge=0)]
    min_replicas: Positive = 1
    max_replicas: Annotated[int, Field(gt=0, le=MAX_REPLICAS)]
    interval_s: Annotated[float, Field(gt=0, lt=4e9)] = 15.0
    """Between two looks at the signal."""
    startup_delay_s: Seconds = 0.0
    """From the decision for one more to its first request."""
    cooldown_s: Seconds = 0.0
    """After a decision, without another."""

    @model_validator(mode="after")
    def _has_room(self) -> Self:
        if self.scale_down_at >= self.scale_up_at:
            raise ValueError(
                f"scale_down_at {self.scale_down_at:g} must be below scale_up_at {self.scale_up_at:g}"
            )
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas {self.min_replicas} is above max_replicas {self.max_replicas}")
        return self


class Disaggregation(Config):
    """Prompts are computed by some replicas, answers by others; KV goes over a wire between them."""

    prefill_replicas: Positive
    decode_replicas: Positive
    kv_transfer_bandwidth: Annotated[float, Field(gt=0)] | None = None
    """Bytes/s of one transfer; None: no time."""
    kv_transfer_latency_s: Seconds = 0.0
    kv_bytes_per_token: Positive | None = None
    """What a transfer carries for each prompt token, all cards of a replica together."""

    @model_validator(mode="after")
    def _knows_its_bytes(self) -> Self:
        if self.kv_transfer_bandwidth is not None and self.kv_bytes_per_token is None:
            raise ValueError(
                "kv_transfer_bandwidth needs kv_bytes_per_token: without a model nothing says how much is sent"
            )
        return self


class ClusterConfig(Config):
    """How many replicas there are and who gets which request. The default is one engine and no router."""

    replicas: Annotated[int, Field(gt=0, le=MAX_REPLICAS)] = 1
    """At the start; with `disaggregation`: all of them, those that compute prompts first."""
    router: str | None = None
    """random | round_robin | least_requests | least_tokens | power_of_two | prefix_affinity | session |
    module:attribute. None: round_robin."""
    max_queued_requests: Positive | None = None
    """A request that finds so many waiting at its replica is refused."""
    failures: tuple[Failure, ...] = ()
    on_failure: OnFailure = "lost"
    """What becomes of the requests of a replica that fails."""
    autoscale: Autoscale | None = None
    disaggregation: Disaggregation | None = None

    @property
    def is_plain(self) -> bool:
        """One engine that takes every request, as if there were no cluster."""
        return self == ClusterConfig()

    @property
    def most_replicas(self) -> int:
        """As many as there can ever be."""
        return self.replicas if self.autoscale is None else max(self.replicas, self.autoscale.max_replicas)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        scale, split = self.autoscale, self.disaggregation
        if scale is not None and not scale.min_replicas <= self.replicas <= scale.max_replicas:
            raise ValueError(
                f"replicas {self.replicas} is not between min_replicas {scale.min_replicas} and max_replicas "
                f"{scale.max_replicas}"
            )
        if split is not None:
            self._check_split(split)
        self._check_failures()
        return self

    def _check_split(self, split: Disaggregation) -> None:
        if self.autoscale is not None:
            raise ValueError("autoscale does not go with prefill and decode replicas: say how many of each")
        if self.failures and self.on_failure == "retry":
            raise ValueError(
                "on_failure retry does not go with prefill and decode replicas: who computes answers cannot begin anew "
                "(allowed: lost, reroute)"
            )
        if self.replicas != split.prefill_replicas + split.decode_replicas:
            raise ValueError(
                f"replicas {self.replicas} must be prefill_replicas {split.prefill_replicas} + decode_replicas "
                f"{split.decode_replicas}, or be left out"
            )

    def _check_failures(self) -> None:
        ends: dict[int, float] = {}
        for failure in sorted(self.failures, key=lambda f: (f.replica, f.from_s)):
            if failure.replica >= self.most_replicas:
                raise ValueError(
                    f"failure of replica {failure.replica}: there are replicas 0 to {self.most_replicas - 1}"
                )
            if failure.from_s < ends.get(failure.replica, 0):
                raise ValueError(f"failures of replica {failure.replica} overlap at {failure.from_s:g} s")
            ends[failure.replica] = failure.to_s
