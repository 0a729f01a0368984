"""The state machine that makes up stories: arrivals, steps, aborts, late outputs and long pressure, in any order."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from servetwin.sim.config import EngineConfig
from servetwin.sim.testing.arrival import Arrival
from servetwin.sim.testing.ledger import PATIENCE_NS
from servetwin.sim.testing.strategies import arrivals, delays_ns, engine_configs, gaps_ns
from servetwin.sim.testing.trial import Trial

MOST_STEPS_AT_ONCE = 6
MOST_ROUNDS = 10


def run_machine(new_trial: Callable[[EngineConfig], Trial], *, examples: int, actions: int) -> None:
    """Tells `examples` stories of at most `actions` actions; raises what the shortest failing one raised.

    The same call tells the same stories. Nothing is printed, and no example is kept in a database.
    """
    run_state_machine_as_test(
        policy_machine(new_trial),
        settings=settings(
            max_examples=examples,
            stateful_step_count=actions,
            derandomize=True,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
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
            self.trial.arrive(arrival, gap_ns=gap_ns)

        @rule(count=st.integers(1, MOST_STEPS_AT_ONCE))
        def step(self, count: int) -> None:
            for _ in range(count):
                self.trial.step()

        @precondition(lambda self: self.trial.unfinished)
        @rule(choice=st.integers(0, 20))
        def abort(self, choice: int) -> None:
            unfinished = self.trial.unfinished
            self.trial.abort(unfinished[choice % len(unfinished)])

        @rule(length_ns=delays_ns())
        def stall(self, length_ns: int) -> None:
            self.trial.stall(length_ns)

        @rule(rounds=st.lists(st.tuples(_arrivals(), st.integers(1, 3)), min_size=1, max_size=MOST_ROUNDS))
        def press(self, rounds: list[tuple[Arrival, int]]) -> None:
            """Everybody who waits has waited for long, and others keep coming, each followed by some steps."""
            self.trial.wait(PATIENCE_NS)
            for arrival, steps in rounds:
                self.trial.arrive(arrival, gap_ns=1)
                for _ in range(steps):
                    self.trial.step()

        def teardown(self) -> None:
            # A broken story is over; and there is none if drawing the engine failed.
            if hasattr(self, "trial") and self.trial.failure is None:
                self.trial.drain()

    return PolicyMachine


def _arrivals() -> st.SearchStrategy[Arrival]:
    """Requests for the machine's own engine."""
    return st.runner().flatmap(lambda machine: arrivals(machine.config.model.max_model_len))


def _gaps() -> st.SearchStrategy[int]:
    return st.runner().flatmap(lambda machine: gaps_ns(machine.config))
