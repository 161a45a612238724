"""Calls of NCCL, which this machine has not, from a recorder of simulated counts."""

import json
from types import SimpleNamespace

from ronde.status import FlightRecorderSource


class NcclRecorder:
    """The counts of two groups, and no records: they must not be read."""

    counts = ((4, 4), (0, 0))  # enqueued and complete calls

    def _dump_nccl_trace_json(self, *, includeCollectives):  # noqa: N803  torch's
        assert not includeCollectives
        groups = {
            str(number): {
                "last_enqueued_collective": str(enqueued),
                "last_completed_collective": str(complete),
            }
            for number, (enqueued, complete) in enumerate(self.counts)
        }
        return json.dumps({"pg_status": groups}).encode()


class Group:
    def __init__(self, description):
        self.group_desc = description


def test_a_call_of_nccl_is_reported_once_two_samples_have_found_it_pending():
    first, second = Group(""), Group("tensor_parallel")
    config = "cpu:gloo,cuda:nccl"
    world = SimpleNamespace(
        pg_names={first: "0", second: "1"},
        pg_backend_config={first: config, second: config},
        pg_group_ranks={first: {0: 0, 1: 1, 2: 2}, second: {0: 0, 2: 1}},
    )
    distributed = SimpleNamespace(_world=world, get_world_size=lambda: 3)
    recorder = NcclRecorder()
    source = FlightRecorderSource(distributed, recorder)
    found = []
    for counts in [
        ((4, 4), (0, 0)),
        ((9, 6), (3, 2)),
        ((9, 7), (3, 2)),
        ((9, 7), (3, 2)),
    ]:
        recorder.counts = counts
        calls = source.report().collectives
        found.append([(call.group, call.sequence, call.ranks) for call in calls])
    slow = ("tensor_parallel", 3, (0, 2))
    assert found == [[], [], [slow], [("group 0", 8, ()), slow]]
    world.pg_names = {}
    assert source.report().collectives == []
