"""One-line faults of the cluster (`sim/cluster/`), each with the tests that notice it."""

from __future__ import annotations

from mutation import Mutation

CLUSTER = "test_cluster.py"
DRIVER, DOOR = "sim/cluster/replica_driver.py", "sim/cluster/front_door.py"

CLUSTERS = (
    Mutation(
        "a replica schedules before all steps of the instant are over",
        0,
        DRIVER,
        "return Moment(self.env, turn_of(self._index)) if self.env.peek() == self.env.now else None",
        "return None",
        (f"{CLUSTER}::test_who_arrives_as_a_step_ends_is_in_the_next[False]",),
    ),
    Mutation(
        "what reaches a replica amid a leap waits for its end",
        0,
        DRIVER,
        "        if steps < self._steps:\n",
        "        if False:\n",
        (f"{CLUSTER}::test_a_cluster_is_the_same_with_leaps",),
    ),
    Mutation(
        "a leap goes on past a failure",
        0,
        DRIVER,
        "return self.dies_ns if abort_ns is None else min(abort_ns, self.dies_ns)",
        "return abort_ns",
        (f"{CLUSTER}::test_a_step_that_ends_at_the_instant_of_a_failure_is_lost",),
    ),
    Mutation(
        "the autoscaler sees the blocks of a leap's beginning",
        0,
        DRIVER,
        "used += self._scheduler.blocks_begun(self._planned.begun_before(self.now))",
        "used += 0",
        (f"{CLUSTER}::test_the_share_of_blocks_is_that_of_the_instant",),
    ),
    Mutation(
        "what has ended stays in flight for the router",
        0,
        DOOR,
        "        replica.view.requests -= 1\n",
        "",
        (f"{CLUSTER}::test_arrivals_are_routed_when_all_steps_of_their_instant_are_over",),
    ),
    Mutation(
        "a full queue takes one more",
        0,
        DOOR,
        "return replica.driver.num_waiting >= self._max_queued",
        "return replica.driver.num_waiting > self._max_queued",
        (f"{CLUSTER}::test_a_full_queue_refuses",),
    ),
    Mutation(
        "KV comes over the wire at once",
        0,
        "sim/cluster/hand_over.py",
        "return latency_ns + seconds_to_ns(prompt_tokens * each / bandwidth)",
        "return latency_ns",
        (f"{CLUSTER}::test_a_prompt_goes_over_the_wire",),
    ),
    Mutation(
        "gaps are taken between steps of different replicas",
        0,
        "sim/tables.py",
        "begun, before = seen.get(replica, (0, 0))",
        "begun, before = next(reversed(seen.values()), (0, 0))",
        (f"{CLUSTER}::test_outputs_and_gaps_of_a_cluster_agree",),
    ),
    Mutation(
        "a gone replica is still known for its prefixes",
        0,
        "sim/cluster/prefix_affinity.py",
        "self._sent.pop(index, None)",
        "pass",
        ("test_cluster_routers.py::test_affinity_ends_at_the_cap_and_with_the_replica",),
    ),
)
