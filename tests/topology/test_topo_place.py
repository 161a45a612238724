"""``ronde topo place``: plans of real hosts, as a table, as JSON and by hand."""

import json
import os

import pytest
from tests.commands import refusal
from tests.topology.sample_hosts import FILES, OCI_H100, sample_host, sample_path

from ronde.cli import main
from ronde.errors import UsageError
from ronde.render import tabulate_plan
from ronde.topology import (
    AlignmentRequest,
    Core,
    GpuDevice,
    HostTopology,
    NetPort,
    NumaNode,
    PciDevice,
    Policy,
    Saved,
    plan_host,
    read_file,
)


def run(words):
    return main(["topo", "place", *words])


PERLMUTTER = "perlmutter_a100_4x_slingshot_nccl2.29.7.xml"
# GPU by GPU, what nvidia-smi says of the same machine: CPU and NUMA affinity.
PERLMUTTER_AFFINITY = [
    ("48-63,112-127", 3),
    ("32-47,96-111", 2),
    ("16-31,80-95", 1),
    ("0-15,64-79", 0),
]


def expand(text: str) -> tuple[int, ...]:
    found: list[int] = []
    for part in text.split(","):
        first, last = part.split("-")
        found += range(int(first), int(last) + 1)
    return tuple(sorted(found))


def test_one_rank_a_gpu_has_what_nvidia_smi_calls_its_affinity():
    request = AlignmentRequest(4, Policy.SINGLE_NUMA_NODE)
    plan = plan_host(sample_host(PERLMUTTER), request)
    assert [(rank.cpus, rank.memory_nodes) for rank in plan.ranks] == [
        (expand(cpus), (node,)) for cpus, node in PERLMUTTER_AFFINITY
    ]
    # Each node has one adapter, and 16 cores of two threads.
    nics = [(nic.name, nic.path) for rank in plan.ranks for nic in rank.nics]
    assert nics == [(f"cxi{n}", "PHB") for n in (3, 2, 1, 0)]
    assert {rank.num_cores for rank in plan.ranks} == {16}
    assert {rank.nics[0].gb_per_s for rank in plan.ranks} == {24.0}
    # Slingshot is no InfiniBand: NCCL_IB_HCA is not for it.
    assert plan.env == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "0,1,2,3",
    }
    assert plan.ranks[0].command == "numactl --physcpubind=48-63,112-127 --preferred=3"


def test_equally_near_adapters_are_given_out_in_turn():
    plan = plan_host(sample_host("modal_gvisor_b200_vm_topo.xml"), AlignmentRequest(8))
    names = [f"mlx5_{n}" for n in range(5, 13)]
    assert [[nic.name for nic in rank.nics] for rank in plan.ranks] == [
        [name] for name in names
    ]
    assert plan.env["NCCL_IB_HCA"] == "=" + ",".join(f"{name}:1" for name in names)


def test_nccl_is_left_all_adapters_that_are_equally_near_to_a_gpu():
    # At the switch of each GPU is an adapter with two ports.
    plan = plan_host(sample_host(OCI_H100), AlignmentRequest(8))
    numbers = [*range(2), *range(3, 11), *range(12, 18)]
    assert plan.env["NCCL_IB_HCA"] == "=" + ",".join(f"mlx5_{n}:1" for n in numbers)
    half = plan_host(sample_host(OCI_H100), AlignmentRequest(4))
    assert half.env["NCCL_IB_HCA"] == "=" + ",".join(f"mlx5_{n}:1" for n in numbers[:8])


def test_nodes_that_all_claim_the_same_cpus_have_none():
    host = sample_host("superbench_ndv4_topo.xml")
    plan = plan_host(host, AlignmentRequest(8))
    assert [rank.cpus for rank in plan.ranks] == [()] * 8
    assert plan.notices[0].startswith("CPUs 0-15,32-47 are listed on several")
    with pytest.raises(UsageError, match="restricted needs the CPUs of the host"):
        plan_host(host, AlignmentRequest(8, Policy.RESTRICTED))


def test_amds_gpus_have_the_numbers_of_the_source():
    # Number 0 is behind number 2 on the bus, and HIP has no order of the bus.
    plan = plan_host(sample_host("topo_4p_942.xml"), AlignmentRequest(4))
    assert [(rank.gpus, rank.gpu_bus_ids[0], rank.cpus[0]) for rank in plan.ranks] == [
        ((0,), "0000:82:00.0", 48),
        ((1,), "0000:c2:00.0", 72),
        ((2,), "0000:02:00.0", 0),
        ((3,), "0000:42:00.0", 24),
    ]
    assert plan.env == {"HIP_VISIBLE_DEVICES": "0,1,2,3"}


@pytest.mark.parametrize("name", FILES)
def test_no_cpu_of_a_sample_is_given_to_two_ranks(name):
    host = sample_host(name)
    plan = plan_host(host, AlignmentRequest(3))
    taken = [cpu for rank in plan.ranks for cpu in rank.cpus]
    assert len(taken) == len(set(taken))
    assert set(taken) <= {cpu for node in host.numa_nodes for cpu in node.cpus}
    assert all(not rank.nics or rank.gpus for rank in plan.ranks)


def small_host(*ports: NetPort, num_gpus: int = 2) -> HostTopology:
    """Return one with two nodes; GPUs alternate between them, ports are on node 0."""
    buses = [f"0000:0{n}:00.0" for n in range(num_gpus)]
    return HostTopology(
        "n1",
        numa_nodes=(
            NumaNode(0, (0, 1, 4, 5), ((0, 4), (1, 5)), 8 << 30),
            NumaNode(1, (2, 3, 6, 7), ((2, 6), (3, 7)), 8 << 30),
        ),
        devices=tuple(PciDevice(bus, node=n % 2) for n, bus in enumerate(buses)),
        # In the source's own order, which is not the bus's.
        gpus=tuple(GpuDevice(bus, 9 - n) for n, bus in enumerate(buses)),
        ports=ports,
    )


def test_gpus_are_numbered_by_the_bus():
    plan = plan_host(small_host(), AlignmentRequest(2))
    assert [rank.gpu_bus_ids for rank in plan.ranks] == [
        ("0000:00:00.0",),
        ("0000:01:00.0",),
    ]
    assert [rank.cpus for rank in plan.ranks] == [(0, 1, 4, 5), (2, 3, 6, 7)]


@pytest.mark.parametrize(
    ("port", "hca"),
    [
        (NetPort("mlx5_0", node=0, kind="infiniband", port=1), "=mlx5_0:1"),
        # The kernel writes the second port so.
        (NetPort("mlx4_0:2", node=0, kind="ethernet", port=2), "=mlx4_0:2"),
        # In NCCL's files, which number adapters, a port above 1 may be a copy.
        (NetPort("mlx4_0", node=0, number=0, port=2), "=mlx4_0"),
        (NetPort("mlx5_3", node=0, number=0, port=4), "=mlx5_3:1"),
        (NetPort("mlx5_0+mlx5_1", node=0, number=0, port=1), "=mlx5_0:1,mlx5_1:1"),
        (NetPort("rdmap1s0", node=0, kind="infiniband", port=1), None),
        (NetPort("eth0", node=0, kind="ethernet"), None),
    ],
)
def test_adapters_are_named_as_nccl_names_them(port, hca):
    plan = plan_host(small_host(port), AlignmentRequest(2))
    assert plan.env.get("NCCL_IB_HCA") == hca


def test_a_gpu_near_memory_without_cpus_has_no_preference():
    host = small_host()
    bare = host._replace(
        numa_nodes=(*host.numa_nodes, NumaNode(250, memory_bytes=96 << 30)),
        devices=tuple(device._replace(node=250) for device in host.devices),
    )
    plan = plan_host(bare, AlignmentRequest(2, Policy.SINGLE_NUMA_NODE))
    assert [rank.nodes for rank in plan.ranks] == [(0,), (1,)]
    # Nobody knows which cores are near.
    assert not any(rank.is_preferred for rank in plan.ranks)


@pytest.mark.parametrize(
    ("rows", "aligned"),
    [
        ("0-7 0,0-7 0, 1, 1", [True, True, False, False]),
        ("0-7 0,0-7 0,8-15 1,8-15 1", [True] * 4),
        ("0-7 0,0-7 0,8-15 1,N/A N/A", [True, True, True, False]),
    ],
)
def test_a_rank_is_aligned_only_where_cores_near_its_gpu_are_known(rows, aligned):
    """As in a container that shows the CPUs of one node, and GPUs of both."""
    text = "\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    for number, row in enumerate(rows.split(",")):
        words = ["X" if n == number else "NV18" for n in range(4)]
        cpus, _, node = row.partition(" ")
        text += "\t".join([f"GPU{number}", *words, cpus, node, "", "N/A"]) + "\n"
    (host,) = read_file(Saved("it", text.encode())).hosts
    assert not plan_host(host, AlignmentRequest(4, Policy.NONE)).ranks[3].reasons
    plan = plan_host(host, AlignmentRequest(4, Policy.SINGLE_NUMA_NODE))
    assert [rank.is_preferred for rank in plan.ranks] == aligned
    plan = plan_host(host, AlignmentRequest(4))
    assert [rank.is_preferred for rank in plan.ranks] == aligned
    reasons = ("gpu: no usable CPU is known to be near it",)
    assert [r.reasons for r in plan.ranks] == [
        () if fits else reasons for fits in aligned
    ]


def test_the_table_shows_each_rank_and_why_it_is_not_aligned():
    port = NetPort("mlx5_0", node=0, kind="infiniband", port=1)
    allowed = (Core((0, 4), 0), Core((1, 5), 0))
    plan = plan_host(small_host(port), AlignmentRequest(2), allowed)
    lines = tabulate_plan(plan).splitlines()
    assert lines[0] == "n1: 2 ranks, policy best-effort"
    rows = [" ".join(line.split()) for line in lines[2:5]]
    assert rows == [
        "rank GPU bus cores CPUs memory adapter aligned",
        "0 0 00:00.0 1 0,4 - mlx5_0 (PHB) yes",
        "1 1 01:00.0 1 1,5 - mlx5_0 (SYS) no",
    ]
    assert lines[5] == (
        "note: rank 1 not aligned: gpu: GPU 1 near no node with usable cores"
    )
    assert "rank 1: adapter at another processor (SYS); aligned is" in lines[6]
    assert "  NCCL_IB_HCA==mlx5_0:1" in lines
    assert lines[-1] == "  1: numactl --physcpubind=1,5"


def test_more_ranks_than_gpus_and_cores_are_reported():
    plan = plan_host(small_host(), AlignmentRequest(5))
    assert plan.notices == (
        "5 ranks and only 2 GPUs: no rank has one of its own.",
        "5 ranks share 4 cores.",
    )


def test_the_command_prints_a_plan_of_a_file_or_json(capsys):
    file = str(sample_path(PERLMUTTER))
    assert run(["-n", "4", file]) == 0
    assert "0     0    03:00.0  16     48-63,112-127  3       cxi3 (PHB)  yes" in (
        capsys.readouterr().out
    )
    words = ["-n", "4", "--json", "--policy", "restricted", "--scope", "job", file]
    assert run(words) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    assert (plan["policy"], plan["scope"]) == ("restricted", "job")
    assert [rank["nics"][0]["name"] for rank in plan["ranks"]] == [
        f"cxi{n}" for n in (3, 2, 1, 0)
    ]


def test_on_this_machine_the_plan_keeps_to_the_cpus_of_this_process(capsys):
    allowed = os.sched_getaffinity(0)
    assert run(["-n", "2", "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    taken = {cpu for rank in plan["ranks"] for cpu in rank["cpus"]}
    assert taken
    assert taken <= allowed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-n 0", "-n must be a whole number of at least 1, got '0'. Type: -n 1"),
        ("-n 1 --policy strict", "--policy must be none, best-effort, restricted or"),
        ("-n 1 --scope pod", "--scope must be rank or job, got 'pod'"),
        ("", "-n is required. See: ronde topo place --help"),
    ],
)
def test_words_that_make_no_sense_are_refused(capsys, words, message):
    file = str(sample_path(PERLMUTTER))
    said = refusal(capsys, "topo", "place", *words.split(), file)
    assert said.startswith(message)
