import os

from ronde.topology import Core, Machine, count_cores, count_slots, usable_cores


def test_cores_are_no_more_than_may_be_used():
    assert 1 <= count_cores() <= len(os.sched_getaffinity(0))


def test_the_visible_gpus_are_the_slots_and_without_any_the_cores():
    assert count_slots({"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b,MIG-c"}) == 3
    assert count_slots({"CUDA_VISIBLE_DEVICES": ""}) == count_cores()


def test_a_quota_cuts_the_cores_but_leaves_one():
    cores = tuple(Core((cpu,), 0) for cpu in range(8))
    assert usable_cores(Machine(cores, 0.0, (), {})) == 8
    assert usable_cores(Machine(cores, 2.5, (), {})) == 2
    assert usable_cores(Machine(cores, 0.5, (), {})) == 1
    assert usable_cores(Machine(cores, 99.0, (), {})) == 8
