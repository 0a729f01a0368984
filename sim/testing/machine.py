"""The state machine that makes up stories: arrivals, steps, aborts, late outputs and long pressure, in any order."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from servetwin.sim.config import EngineConfig
from servetwin.sim.testing.actions import Abort, Arrive, Stall, Step, Wait
from servetwin.sim.testing.arrival import Arrival
from servetwin.sim.testing.ledger import PATIENCE_NS
from servetwin.sim.testing.strategies import arrivals, engine_configs, gaps_ns
from servetwin.sim.testing.trial import Trial
from servetwin.sim.units import NS_PER_S

MOST_STEPS_AT_ONCE = 6
MOST_ROUNDS = 6
MOST_STEPS_A_ROUND = 4


def run_machine(new_trial: Callable[[EngineConfig], Trial], *, examples: int, actions: int) -> None:
    """Tells `examples` stories of at most `actions` actions; raises what the first failing one raised.

    The same call tells the same stories. Nothing is printed, and no example is kept in a database. Shortening a
    failing story is not done here (see `sim/testing/shorten.py`).
    """
    run_state_machine_as_test(
        policy_machine(new_trial),
        settings=settings(
            max_examples=examples,
            stateful_step_count=actions,
            derandomize=True,
            database=None,
            deadline=None,
            phases=(Phase.generate,),
            report_multiple_bugs=False,
            print_blob=False,
            suppress_health_check=list(HealthCheck),
            verbosity=Verbosity.quiet,
        ),
    )


def policy_machine(new_trial: Callable[[EngineConfig], Trial]) -> type[RuleBasedStateMachine]:
    """A machine class whose runs are trials. `new_trial` begins one on an engine that the machine has drawn."""

    class PolicyMachine(RuleBasedStateMachine):
        """Each rule is an action of a trial, which checks every invariant; the end drains the engine."""

        trial: Trial
        config: EngineConfig

        @initialize(config=engine_configs())
        def begin(self, config: EngineConfig) -> None:
            self.config = config
            self.trial = new_trial(config)

        @rule(arrival=_arrivals(), gap_ns=_gaps())
        def arrive(self, arrival: Arrival, gap_ns: int) -> None:
            self.trial.perform(Arrive(arrival, gap_ns))

        @rule(count=st.integers(1, MOST_STEPS_AT_ONCE))
        def step(self, count: int) -> None:
            for _ in range(count):
                self.trial.perform(Step())

        @rule(place=st.integers(0, 20))
        def abort(self, place: int) -> None:
            self.trial.perform(Abort(place))

        @rule(length_ns=st.sampled_from([1, NS_PER_S]))
        def stall(self, length_ns: int) -> None:
            self.trial.perform(Stall(length_ns))

        @rule(
            patient=_arrivals(),
            other=_arrivals(),
            rounds=st.integers(1, MOST_ROUNDS),
            steps=st.integers(1, MOST_STEPS_A_ROUND),
        )
        def press(self, patient: Arrival, other: Arrival, rounds: int, steps: int) -> None:
            """One request waits for long, and then others like `other` keep coming."""
            self.trial.perform(Arrive(patient, gap_ns=1))
            self.trial.perform(Wait(PATIENCE_NS))
            for _ in range(rounds):
                self.trial.perform(Arrive(other, gap_ns=1))
                for _ in range(steps):
                    self.trial.perform(Step())

        def teardown(self) -> None:
            # A broken story is over, and there is none if its first line broke it.
            if hasattr(self, "trial") and self.trial.broken is None:
                self.trial.drain()

    return PolicyMachine


def _arrivals() -> st.SearchStrategy[Arrival]:
    """Requests for the machine's own engine."""
    return st.runner().flatmap(lambda machine: arrivals(machine.config.model.max_model_len))


def _gaps() -> st.SearchStrategy[int]:
    return st.runner().flatmap(lambda machine: gaps_ns(machine.config))
