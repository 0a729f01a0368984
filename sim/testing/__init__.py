"""The proof kit for scheduling policies: invariants of an engine, made-up stories, and the shortest that goes wrong.

`check_policy("module:Class")` is all that most users need. The strategies and the state machine in
`servetwin.sim.testing.strategies` and `.machine` need the extra `test`.
"""

from servetwin.sim.testing import invariants
from servetwin.sim.testing.check import PolicyReport, check_policy
from servetwin.sim.testing.story import PolicyError

__all__ = ["PolicyError", "PolicyReport", "check_policy", "invariants"]
