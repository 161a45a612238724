import os
import re
import socket

import pytest
from hypothesis import given, strategies as st

from ronde.errors import UsageError
from ronde.launch import (
    SLOTS_OPEN,
    Host,
    HostShare,
    allocate,
    hosts_to_ask,
    is_here,
    limit_slots,
    parse_hostfile,
    read_allocation,
)


def hosts(**slots):
    return [Host(name, count) for name, count in slots.items()]


def never(host):
    raise AssertionError(host)


SLOTS = st.lists(st.integers(0, 4) | st.just(SLOTS_OPEN), min_size=1, max_size=8)


@given(SLOTS, st.integers(1, 4), st.none() | st.integers(1, 30))
def test_ranks_fill_the_slots_block_by_block(slots, open_slots, num_ranks) -> None:
    named = [Host(f"n{index}", count) for index, count in enumerate(slots)]
    usable = [host for host in named if host.slots]
    counts = [open_slots if n == SLOTS_OPEN else n for n in slots]
    is_any_number = len(usable) == 1 and usable[0].slots == SLOTS_OPEN and num_ranks
    wanted = sum(counts) if num_ranks is None else num_ranks
    if not usable or (wanted > sum(counts) and not is_any_number):
        with pytest.raises(UsageError):
            allocate(named, num_ranks, lambda _: open_slots)
        return
    shares = allocate(named, num_ranks, lambda _: open_slots)
    assert [rank for share in shares for rank in share.ranks] == list(range(wanted))
    order = [named.index(share.host) for share in shares]
    assert order == sorted(set(order))
    assert all(share.ranks for share in shares)
    if not is_any_number:
        # No rank is put on a later host while an earlier one has room.
        full = [len(s.ranks) == counts[i] for s, i in zip(shares, order, strict=True)]
        assert all(full[:-1])
        assert order == [i for i, n in enumerate(counts) if n][: len(order)]


@given(SLOTS, st.integers(1, 4), st.none() | st.integers(1, 30))
def test_all_hosts_that_may_get_ranks_are_asked(slots, most, num_ranks) -> None:
    named = [Host(f"n{index}", count) for index, count in enumerate(slots)]

    def place(open_slots):
        """Return the hosts of the ranks; None where there are too few slots."""
        try:
            shares = allocate(named, num_ranks, lambda _: open_slots)
        except UsageError:
            return None
        return [share.host.name for share in shares]

    try:
        asked = [host.name for host in hosts_to_ask(named, num_ranks)]
    except UsageError:
        assert place(1_000) is None, "it is refused before that is sure"
        return
    assert set(place(most) or ()) <= set(asked)
    # One GPU each is the least that an open host can have: then all are needed.
    assert place(1) in (asked, None)
    if SLOTS_OPEN not in slots:
        assert place(1) == asked


def test_rank_0_is_on_the_first_host_with_slots() -> None:
    shares = allocate(hosts(a=0, b=2, c=4, d=1), 3, never)
    assert shares == (
        HostShare(Host("b", 2), range(2)),
        HostShare(Host("c", 4), range(2, 3)),
    )
    assert hosts_to_ask(hosts(a=0, b=2, c=4, d=1), 3) == (Host("b", 2), Host("c", 4))


def test_too_many_ranks_are_refused_in_horovods_words() -> None:
    with pytest.raises(UsageError) as caught:
        allocate(hosts(a=2, b=1, c=0), 4, never)
    assert str(caught.value) == (
        "Requested more processes (4) than there are available slots (3)\n"
        "The slots are a:2,b:1. Give the hosts more slots, as in -H a:4 or --slots, or "
        "start fewer ranks."
    )


def test_a_job_must_have_a_slot() -> None:
    named = parse_hostfile("# ours\n\na slots=0\nb:0\n", "file")
    said = re.escape(
        "all hosts have 0 slots: a (file line 3), b (file line 4). Give one of them "
        "slots."
    )
    with pytest.raises(UsageError, match=said):
        allocate(named, None, never)
    with pytest.raises(UsageError, match=said):
        hosts_to_ask(named, 2)
    with pytest.raises(UsageError, match=r"n7 and 92 more\. Give"):
        allocate(hosts(**{f"n{index}": 0 for index in range(100)}), None, never)


def test_each_host_takes_as_many_ranks_but_none_that_is_kept_out() -> None:
    named = hosts(a=SLOTS_OPEN, b=4, c=0)
    assert limit_slots(named, None) == tuple(named)
    assert limit_slots(named, 3) == tuple(hosts(a=3, b=3, c=0))
    named = parse_hostfile("a slots=4\nb slots=2\n", "file")
    said = "must be at most the slots of every host, got 3, but b (file line 2) has 2."
    with pytest.raises(UsageError, match=re.escape(said)):
        limit_slots(named, 3)


def slurm(nodes, **variables):
    told = {f"SLURM_{name}": str(value) for name, value in variables.items()}
    return {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": nodes} | told


# Names and values as salloc, sbatch and srun of Slurm 22.05 give them.
ALLOCATIONS = {
    "tasks asked for a host": (
        slurm("n[1-3]", NTASKS=11, TASKS_PER_NODE="4(x2),3"),
        {"n1": 4, "n2": 4, "n3": 3},
    ),
    "an old name": (
        {"SLURM_JOB_ID": "7", "SLURM_NODELIST": "a,b", "SLURM_NTASKS_PER_NODE": "2"},
        {"a": 2, "b": 2},
    ),
    "one task and many GPUs a host": (
        slurm("n[1-2]", NTASKS_PER_NODE=1, TASKS_PER_NODE="1(x2)", GPUS_ON_NODE=8),
        {"n1": 8, "n2": 8},
    ),
    "salloc's interactive step, which has the job's numbers": (
        slurm("n[1-2]", NTASKS=4, TASKS_PER_NODE="3,1", STEP_ID=4294967290),
        {"n1": 3, "n2": 1},
    ),
    "a step on one of the hosts, which has its own": (
        slurm("n[1-2]", NTASKS=1, TASKS_PER_NODE="1", STEP_ID=0),
        {"n1": SLOTS_OPEN, "n2": SLOTS_OPEN},
    ),
    "a step on one of the hosts of a job with tasks a host": (
        slurm("n[1-2]", NTASKS=1, NTASKS_PER_NODE=2, TASKS_PER_NODE="1", STEP_ID=0),
        {"n1": 2, "n2": 2},
    ),
    "CPUs that nobody asked to be tasks": (
        slurm("n[1-2]", TASKS_PER_NODE="64(x2)"),
        {"n1": SLOTS_OPEN, "n2": SLOTS_OPEN},
    ),
    "GPUs that nobody asked to be tasks": (
        slurm("n[1-2]", TASKS_PER_NODE="64(x2)", GPUS_ON_NODE=4),
        {"n1": 4, "n2": 4},
    ),
    "a total of GPUs, which may be uneven": (
        slurm("n[1-2]", TASKS_PER_NODE="64(x2)", GPUS_ON_NODE=4, GPUS=6),
        {"n1": SLOTS_OPEN, "n2": SLOTS_OPEN},
    ),
    "a component of one": (slurm("n1", HET_SIZE=1, NTASKS_PER_NODE=2), {"n1": 2}),
}


@pytest.mark.parametrize(("environ", "slots"), ALLOCATIONS.values(), ids=ALLOCATIONS)
def test_slurms_allocation(environ, slots) -> None:
    found = read_allocation(environ)
    assert {host.name: host.slots for host in found} == slots
    assert {host.named_at for host in found} == set(environ) & {
        "SLURM_JOB_NODELIST",
        "SLURM_NODELIST",
    }


@pytest.mark.parametrize(
    "environ", [{}, {"SLURM_JOB_NODELIST": "n1"}, {"SLURM_JOB_ID": "7"}, slurm("")]
)
def test_outside_of_an_allocation(environ) -> None:
    assert read_allocation(environ) is None


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (slurm("n1", HET_SIZE=2), "SLURM_HET_SIZE is 2"),
        ({"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2"}, "SLURM_HET_SIZE is 2"),
        (slurm("n[1-", NTASKS=1), "SLURM_JOB_NODELIST: brackets must be closed"),
        (slurm("(null)"), "SLURM_JOB_NODELIST: a host must be a name"),
        (
            slurm("n[1-2]", NTASKS=2, TASKS_PER_NODE="2"),
            "2 counts, one for each host in SLURM_JOB_NODELIST=n[1-2], got 1 in '2'. ",
        ),
        (slurm("n1", NTASKS=2, TASKS_PER_NODE="x"), "SLURM_TASKS_PER_NODE must be"),
        (slurm("n1", NTASKS_PER_NODE="x"), "SLURM_NTASKS_PER_NODE must be a whole"),
        (slurm("n1", GPUS_ON_NODE="x"), "SLURM_GPUS_ON_NODE must be a whole number"),
    ],
)
def test_an_allocation_that_cannot_be(environ, said) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        read_allocation(environ)


@pytest.mark.parametrize(
    "name", ["localhost", "127.0.0.1", "127.0.0.2", "::1", os.uname().nodename]
)
def test_this_machine_has_many_names(name) -> None:
    assert is_here(Host(name))


def test_an_address_of_this_machine_is_here() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no route to anywhere")
        assert is_here(Host(probe.getsockname()[0]))
