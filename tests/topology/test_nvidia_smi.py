"""What nvidia-smi prints becomes a graph, in all the ways it was ever pasted."""

from pathlib import Path

import pytest
from tests.topology.hostile import Hostile, bad_inputs, check_harmless

from ronde.errors import UsageError
from ronde.topology import (
    NVIDIA_SMI,
    NVSWITCH,
    UNKNOWN,
    HostTopology,
    Saved,
    classify,
    find_paths,
    members,
    parse_list,
    read_topology,
    write_topology,
)

SAMPLES = Path(__file__).parent / "samples"
MATRICES = SAMPLES / "nvsmi_topo_m"
B200 = MATRICES / "hgx_b200_8x_drv595.91.txt"
H200 = MATRICES / "hgx_h200_8x_topo_p2p_n.txt"
PERLMUTTER = MATRICES / "perlmutter_a100_4x_drv580.159.txt"
PROBE = NVIDIA_SMI


def read(data: bytes | str) -> HostTopology:
    data = data.encode() if isinstance(data, str) else data
    (host,) = PROBE.read(Saved("topo.txt", data)).hosts
    return host


def cpus(text: str) -> tuple[int, ...]:
    return tuple(members(parse_list(text)))


def words(host: HostTopology) -> dict[tuple[str, str], str]:
    """Return the path of each pair, from both ends."""
    found = {(each.source, each.target): each.path for each in host.relations}
    return found | {(target, source): path for (source, target), path in found.items()}


@pytest.mark.parametrize("path", [B200, H200, PERLMUTTER], ids=lambda path: path.name)
def test_samples_are_recognised_and_go_through_json(path):
    saved = Saved(path.name, path.read_bytes())
    assert PROBE.recognises(saved)
    topology = PROBE.read(saved)
    assert topology.hosts[0].sources == (f"nvidia-smi topo -m {path.name}",)
    assert topology.hosts[0].remarks == ()
    assert read_topology(write_topology(topology).encode(), "it") == topology


def test_four_gpus_joined_directly():
    host = read(PERLMUTTER.read_bytes())
    assert [gpu.node for gpu in host.gpus] == [3, 2, 1, 0]
    assert [node.number for node in host.numa_nodes] == [0, 1, 2, 3]
    assert host.numa_nodes[3].cpus == cpus("48-63,112-127")
    assert len(host.links) == 4 * 3
    assert {link.num_links for link in host.links} == {4}
    assert {(link.source, link.target) for link in host.links} == {
        (f"gpu/{a}", f"gpu/{b}") for a in range(4) for b in range(4) if a != b
    }


def test_access_to_each_other_s_memory():
    host = read(H200.read_bytes())
    assert len(host.gpus) == 8
    assert len(host.relations) == 28
    assert {(each.path, each.peer) for each in host.relations} == {("", "OK")}
    assert not host.links
    assert not host.numa_nodes


def test_an_empty_file_is_refused_with_what_it_may_mean():
    path = SAMPLES / "sysfs_snapshots" / "gpud_nvidia-smi.nvlink.status.a10"
    saved = Saved("status", path.read_bytes())
    assert not PROBE.recognises(saved)
    with pytest.raises(UsageError, match="prints no table"):
        PROBE.read(saved)


def test_cpus_that_overlap_are_no_nodes():
    rows = "GPU0\t X \tSYS\t0,2,4\nGPU1\tSYS\t X \t0-5\n"
    host = read(f"\tGPU0\tGPU1\tCPU Affinity\n{rows}")
    assert host.numa_nodes == ()
    assert [gpu.node for gpu in host.gpus] == [UNKNOWN, UNKNOWN]
    assert "overlap" in host.remarks[0]


NICS = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\tPIX\tNODE\t0-15\t0\t\tN/A
GPU1\tNV12\t X \tNODE\tPXB\t0-15\t0\t\tN/A
NIC0\tPIX\tNODE\t X \tNODE\t\t\t\t
NIC1\tNODE\tPXB\tNODE\t X \t\t\t\t

Legend:

  X    = Self
  NODE = Connection traversing PCIe as well as the interconnect between Host Bridges
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_bond_0
"""


def check_nics(host: HostTopology) -> None:
    assert [port.title for port in host.ports] == ["mlx5_0", "mlx5_bond_0"]
    assert words(host) == {
        pair: path
        for a, b, path in [
            ("gpu/0", "gpu/1", "NV12"),
            ("gpu/0", "net/mlx5_0", "PIX"),
            ("gpu/0", "net/mlx5_bond_0", "NODE"),
            ("gpu/1", "net/mlx5_0", "NODE"),
            ("gpu/1", "net/mlx5_bond_0", "PXB"),
            ("net/mlx5_0", "net/mlx5_bond_0", "NODE"),
        ]
        for pair in ((a, b), (b, a))
    }
    assert [(node.number, node.cpus) for node in host.numa_nodes] == [(0, cpus("0-15"))]
    assert [gpu.node for gpu in host.gpus] == [0, 0]
    assert host.remarks == ()


@pytest.mark.parametrize(
    "text",
    [
        NICS.expandtabs(8),
        NICS.replace("\t", "    "),
        NICS.replace("\t", " ").replace("  ", " "),
        NICS.replace("\n", "\r\n"),
        "\ufeff" + NICS,
        NICS.replace("\x1b[4m", "").replace("\x1b[0m", ""),
        NICS.replace("NV12\tPIX", "NV12PIX").replace("NODE\tNODE", "NODENODE"),
        "$ nvidia-smi topo -m\n" + NICS + "$ ",
        # Twice the same is once.
        NICS + NICS,
        # Without what is no GPU's.
        NICS + "  NIC7: mlx5_7\nGPU0 is fine\n",
    ],
)
def test_however_it_was_pasted(text):
    assert PROBE.recognises(Saved("it", text.encode()))
    check_nics(read(text))


@pytest.mark.parametrize(
    ("header", "row", "nodes"),
    [
        # A container without CPUs of a node.
        ("CPU Affinity\tNUMA Affinity\tGPU NUMA ID", "\t1\t\tN/A", {1: 0}),
        (
            "CPU Affinity    NUMA Affinity   GPU NUMA ID",
            "        1          N/A",
            {1: 0},
        ),
        ("CPU Affinity\tNUMA Affinity", "\t1", {1: 0}),
        # One tab more before what is not told.
        ("CPU Affinity\tNUMA Affinity\tGPU NUMA ID", "0-7\t\tN/A\t\tN/A", {0: 8}),
        ("CPU Affinity\tNUMA Affinity", "0-7\t\tN/A", {0: 8}),
        ("CPU Affinity\tNUMA Affinity", "0-7", {0: 8}),
        # Tabs until it looked well.
        ("CPU Affinity\tNUMA Affinity", "\t\t0-3,8-11\t\t1", {1: 8}),
        ("CPU Affinity\tNUMA Affinity\tGPU NUMA ID", "0-7\t1\t2", {1: 8, 2: 0}),
        ("CPU Affinity", "0-7", {0: 8}),
        ("CPU Affinity", "", {}),
    ],
)
def test_what_stands_behind_the_words(header, row, nodes):
    host = read(f"\tGPU0\tNIC0\t{header}\nGPU0\t X \tPIX\t{row}\nNIC0\tPIX\t X \n")
    assert {node.number: len(node.cpus) for node in host.numa_nodes} == nodes


def test_several_nodes_near_a_gpu_are_said():
    host = read("\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-127\t0,8,252-255\n")
    assert [node.number for node in host.numa_nodes] == [0, 8, 252, 253, 254, 255]
    assert [len(node.cpus) for node in host.numa_nodes] == [128, 0, 0, 0, 0, 0]
    assert host.gpus[0].node == 0
    assert "0,8,252-255" in host.remarks[0]


def status(number: int, *, num_active: int, num_inactive: int = 0, rate="25") -> str:
    lines = [f"\t Link {n}: {rate} GB/s" for n in range(num_active)]
    lines += [
        f"\t Link {n}: <inactive>" for n in range(num_active, num_active + num_inactive)
    ]
    head = f"GPU {number}: NVIDIA A100-SXM4-40GB (UUID: GPU-{number})"
    return "\n".join([head, *lines]) + "\n"


def test_all_outputs_in_one_file():
    text = PERLMUTTER.read_text()
    peers = H200.read_text().replace("OK", "NS")
    text = f"$ nvidia-smi topo -m\n{text}\n$ nvidia-smi topo -p2p n\n{peers}"
    for number in range(4):
        text += status(number, num_active=12)
    host = read(text)
    assert len(host.gpus) == 8
    assert (host.gpus[0].title, host.gpus[0].uuid) == ("NVIDIA A100-SXM4-40GB", "GPU-0")
    assert [gpu.sm for gpu in host.gpus] == [80] * 4 + [UNKNOWN] * 4
    reported = {
        (each.source, each.target): (each.path, each.peer) for each in host.relations
    }
    assert len(reported) == 28
    assert reported["gpu/0", "gpu/3"] == ("NV4", "NS")
    assert reported["gpu/0", "gpu/4"] == ("", "NS")
    assert len(host.links) == 12
    assert host.remarks == ()


def test_links_that_are_down_show():
    text = PERLMUTTER.read_text() + status(0, num_active=11, num_inactive=1)
    host = read(text)
    assert host.remarks == (
        "GPU0 has 11 active NVLinks, and of 12 it is known where they lead.",
    )


def test_rates_show_a_switch_where_the_matrix_does_not():
    # Of three GPUs with 6 links each, 2 * 6 are fewer than the 18 of a later GPU.
    rows = ["\tGPU0\tGPU1\tGPU2", "GPU0\tX\tNV6\tNV6", "GPU1\tNV6\tX\tNV6"]
    text = "\n".join([*rows, "GPU2\tNV6\tNV6\tX\n"])
    assert {link.target for link in read(text).links} == {"gpu/0", "gpu/1", "gpu/2"}
    text += "".join(status(n, num_active=6) for n in range(3))
    host = read(text)
    assert {(link.target, link.num_links) for link in host.links} == {(NVSWITCH, 6)}
    assert host.remarks == ()


def test_rates_alone_do_not_show_where_links_lead():
    host = read(status(0, num_active=17) + status(1, num_active=18, rate="25.781"))
    assert [gpu.uuid for gpu in host.gpus] == ["GPU-0", "GPU-1"]
    links = [(link.source, link.target, link.num_links) for link in host.links]
    assert links == [("gpu/0", "", 17), ("gpu/1", "", 18)]
    assert host.remarks == ()
    assert find_paths(host).between("gpu/0", "gpu/1") is None


def test_links_of_an_unknown_model_carry_what_their_signalling_leaves():
    text = "\tGPU0\tGPU1\nGPU0\tX\tNV2\nGPU1\tNV2\tX\n"
    text += status(0, num_active=2, rate="106.25").replace("A100-SXM4-40GB", "Z9")
    assert [link.gb_per_s for link in read(text).links] == [200.0, 0.0]


def test_a_matrix_without_nvlinks_contradicts_none():
    plain = NICS.replace("NV12", "PHB")
    for text in (NICS + plain, plain + NICS):
        host = read(text)
        assert words(host)["gpu/0", "gpu/1"] == "NV12"
        assert host.remarks == ()


def test_contradictions_are_said():
    host = read(NICS.replace("NIC0\tPIX", "NIC0\tSYS"))
    assert words(host)["gpu/0", "net/mlx5_0"] == "PIX"
    assert host.remarks == ("GPU0 and NIC0 are given as PIX and SYS.",)
    host = read(NICS + NICS.replace("PXB", "SYS"))
    assert host.remarks == ("GPU1 and NIC1 are given as PXB and SYS.",)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("NV12\tPIX\tNODE", "NV12\tPIX", "line 2: the row of GPU0 must have 4 columns"),
        (
            "NV12\tPIX\tNODE",
            "NV12\tPIX\tNODE\tSYS",
            "line 2: .* with X in its own|line 2",
        ),
        ("GPU1\tNV12\t X \tNODE", "GPU1\t X \tNV12\tNODE", "line 3: .* X in its own"),
        ("PXB", "FAR", "line 3: the row of GPU1"),
        ("GPU1\tNV12", "GPU7\tNV12", "line 1: .* a row for each GPU .*none for GPU1"),
        ("GPU1\tNIC0", "GPU0\tNIC0", "line 1: columns must be different"),
        ("0-15", "0-99999", "line 2: an affinity must be a list"),
        ("0-15", "all", "line 2: an affinity must be a list"),
    ],
)
def test_what_does_not_hold_together_is_refused(old, new, message):
    assert old in NICS
    with pytest.raises(UsageError, match=f"^topo.txt, {message}"):
        read(NICS.replace(old, new, 1))


@pytest.mark.parametrize(
    "text",
    [
        "Link 0: 25 GB/s\n",
        status(0, num_active=2) + "\t Link 2: 2",
        status(0, num_active=2) + "\t Link 2: <inac",
    ],
)
def test_links_that_are_cut_are_refused(text):
    with pytest.raises(UsageError, match=r"line [0-9]+: a link must stand below"):
        read(text)


def test_two_hosts_in_one_file_are_not_one():
    text = status(0, num_active=12)
    assert len(read(text + text).gpus) == 1
    with pytest.raises(UsageError, match=r"line 14: GPU 0 must have one UUID"):
        read(text + text.replace("GPU-0", "GPU-9"))


def test_harm_does_none():
    assert check_harmless(read, bad_inputs(B200.read_bytes())) > 10


@pytest.mark.parametrize(
    "text",
    [
        "\t" + "\t".join(f"GPU{n}" for n in range(250_000)),
        status(0, num_active=50_000),
        "GPU 0: " + " " * 5_000_000 + "x",
        "\tGPU0\tNIC0\n" + "NIC0 \n" * 200_000,
    ],
    ids=range(4),
)
def test_much_of_it_takes_no_time(text):
    check_harmless(read, iter([Hostile("much", text.encode())]))
    PROBE.recognises(Saved("it", text.encode()))


SOCKETS = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tNIC2\tNIC3\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV18\tNV18\tNV18\tPXB\tNODE\tSYS\tSYS\t0-55,112-167\t0
GPU1\tNV18\t X \tNV18\tNV18\tNODE\tPXB\tSYS\tSYS\t0-55,112-167\t0
GPU2\tNV18\tNV18\t X \tNV18\tSYS\tSYS\tPIX\tSYS\t56-111,168-223\t1
GPU3\tNV18\tNV18\tNV18\t X \tSYS\tSYS\tNODE\tSYS\t56-111,168-223\t1
NIC0\tPXB\tNODE\tSYS\tSYS\t X \tNODE\tSYS\tSYS\t\t
NIC1\tNODE\tPXB\tSYS\tSYS\tNODE\t X \tSYS\tSYS\t\t
NIC2\tSYS\tSYS\tPIX\tNODE\tSYS\tSYS\t X \tSYS\t\t
NIC3\tSYS\tSYS\tSYS\tSYS\tSYS\tSYS\tSYS\t X \t\t

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
  NIC2: mlx5_4
  NIC3: mlx5_7
"""


def test_adapters_are_at_the_node_of_the_gpus_near_them():
    host = read(SOCKETS)
    assert [port.title for port in host.ports] == [
        "mlx5_0",
        "mlx5_1",
        "mlx5_4",
        "mlx5_7",
    ]
    assert [port.node for port in host.ports] == [0, 0, 1, UNKNOWN]
    table = classify(host)
    assert table.nodes == ("0", "0", "1", "1", "0", "0", "1", "")
    assert table.cpus[6:] == ("56-111,168-223", "")
    rows = {row[0]: row[1:] for row in map(str.split, SOCKETS.splitlines()) if row}
    for label, said in zip(table.labels, table.words, strict=True):
        assert said == tuple(rows[label][:8])
