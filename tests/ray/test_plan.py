"""The resources that ``ronde run --launcher ray`` asks of Ray's nodes."""

import pytest

from ronde.errors import UsageError
from ronde.launch import plan_bundles

SLOTS_GPUS, SLOTS_CORES = -2, -3  # --nproc-per-node gpu and cpu
CPUS = [{"CPU": 4.0, "memory": 1e9}, {"CPU": 8.0}, {"memory": 1e9}]
GPUS = [{"CPU": 16.0}, {"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0, "GPU": 4.0}]


@pytest.mark.parametrize(
    ("nodes", "asked", "slots"),
    [
        (CPUS, {}, [1, 1]),
        (CPUS, {"num_ranks": 1}, [1]),
        (CPUS, {"num_ranks": 3}, [2, 2]),
        (CPUS, {"each": SLOTS_CORES}, [8, 4]),
        (CPUS, {"each": 5}, [5]),
        (CPUS, {"each": 2, "num_nodes": (1, 1)}, [2]),
        (CPUS, {"num_ranks": 6, "num_nodes": (1, 1)}, [6]),
        (CPUS, {"each": 2, "num_nodes": (2, 5)}, [2, 2]),
        (GPUS, {}, [4, 2]),
        (GPUS, {"num_ranks": 4}, [4]),
        (GPUS, {"num_ranks": 5, "each": SLOTS_GPUS}, [4, 2]),
        (GPUS, {"each": 2}, [2, 2]),
        (GPUS, {"num_ranks": 2, "each": 1}, [1, 1]),
    ],
)
def test_slots_of_each_node(nodes, asked, slots):
    kind = "GPU" if nodes is GPUS else "CPU"
    assert [each[kind] for each in plan_bundles(nodes, **asked)] == slots


def test_with_gpus_ranks_on_cpus_are_asked_for_by_name():
    bundles = plan_bundles(GPUS, each=SLOTS_CORES)
    assert bundles == [{"CPU": 16}, {"CPU": 8}, {"CPU": 8}]


@pytest.mark.parametrize(
    ("nodes", "asked", "wanted"),
    [
        (CPUS, {"num_nodes": (3, 3)}, "3 CPUs, 1 or more on each of at least 3 nodes"),
        (CPUS, {"num_ranks": 20}, "20 CPUs, 10 or more on each of at least 1 node,"),
        (CPUS, {"each": SLOTS_GPUS}, "1 GPU, 1 or more on each of at least 1 node,"),
        (GPUS, {"num_ranks": 7}, "got nodes with: 4, 2. See: ray status"),
        (GPUS, {"each": 8}, "8 GPUs, 8 or more on each of at least 1 node, got"),
        ([], {}, "1 CPU, 1 or more on each of at least 1 node, got nodes with: none."),
    ],
)
def test_more_than_ray_has_is_refused(nodes, asked, wanted):
    with pytest.raises(UsageError) as caught:
        plan_bundles(nodes, **asked)
    assert wanted in str(caught.value)
