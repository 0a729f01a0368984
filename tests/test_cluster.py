"""Several replicas behind a router: nothing gets lost, and the log is the same however steps are taken."""

from __future__ import annotations

from cluster_strategies import ROUTERS, ClusterCase, cluster_cases
from hypothesis import given
from hypothesis import strategies as st
from leaping_strategies import Case, cases

from servetwin.sim.cluster.config import ClusterConfig
from servetwin.sim.tables import differences


@given(cases(), st.sampled_from(ROUTERS))
def test_one_replica_is_the_engine_itself(case: Case, router: str) -> None:
    """Behind a router, whichever it is: every table, every row."""
    expected, error = case.run()
    found, other_error = ClusterCase(case, ClusterConfig(router=router)).run()
    assert differences(expected, found) == []
    assert other_error == error


@given(cluster_cases())
def test_a_cluster_is_the_same_with_leaps(case: ClusterCase) -> None:
    """Whatever happens to replicas: steps with plans, without plans, and many at once."""
    expected, error = case.run(plans=True)
    for how in ({"leaps": False}, {"leaps": True}):
        found, other_error = case.run(**how)
        assert differences(expected, found) == [], how
        assert other_error == error, how


@given(cluster_cases())
def test_every_request_ends_in_one_state(case: ClusterCase) -> None:
    """One row for each, with a reason unless the run stalled."""
    log, error = case.run()
    sent = {r.request_id for r in case.case.requests}
    rows = log.requests
    assert rows.request_id.is_unique
    if error is None:
        assert set(rows.request_id) == sent
        assert rows.finish_reason.notna().all()
