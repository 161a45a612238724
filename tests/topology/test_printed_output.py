"""Output of nvidia-smi -q, ibstat, AMD's tools; and of programs that show no links."""

from pathlib import Path

import pytest
from tests.topology.hostile import bad_inputs, check_harmless

from ronde.cli import main
from ronde.errors import UsageError
from ronde.render import draw_tree
from ronde.topology import (
    GpuDevice,
    HostTopology,
    Level,
    Link,
    LinkKind,
    NetPort,
    Relation,
    Saved,
    Topology,
    classify,
    compare_hosts,
    lint_host,
    read_file,
)

ERROR, WARNING, NOTE = Level
QUERY = (Path(__file__).parents[1] / "check" / "nvidia-smi-query.txt").read_text()
XML = (Path(__file__).parents[1] / "check" / "nvidia-smi-gpu.xml").read_text()


def read(text: str) -> HostTopology:
    (host,) = read_file(Saved("gn1.txt", text.encode())).hosts
    return host


def query(*buses: str) -> str:
    gpus = (QUERY.replace("{bus}", bus) for bus in buses)
    return f"=====NVSMI LOG=====\n\nAttached GPUs : {len(buses)}\n" + "\n".join(gpus)


def test_gpus_with_their_pci_links():
    host = read(query("18", "2A"))
    assert [(gpu.bus_id, gpu.title, gpu.sm) for gpu in host.gpus] == [
        ("0000:18:00.0", "NVIDIA H200", 90),
        ("0000:2a:00.0", "NVIDIA H200", 90),
    ]
    device = host.devices[0]
    assert (device.speed, device.width) == ("32.0 GT/s PCIe", 16)
    assert (device.speed_now, device.width_now) == ("2.5 GT/s PCIe", 16)
    assert (host.name, host.remarks) == ("gn1", ())
    words = "gn1: 2 GPUs; the rest is not in this file\n"
    assert draw_tree(Topology((host,))).startswith(words)


def test_xml_and_text_are_read_alike():
    gpu = XML.format(bus="18", title="NVIDIA H200", width=16, hot="Not Active")
    other = read(f"<?xml version='1.0'?>\n<nvidia_smi_log>{gpu}</nvidia_smi_log>")
    assert other.devices == read(query("18")).devices


def test_a_link_at_rest_is_a_note_and_a_narrow_one_is_more():
    at_rest = read(query("18"))
    assert [(f.rule, f.severity) for f in lint_host(at_rest)] == [
        ("trained-down", NOTE)
    ]
    now, most = (f"{word:<39}: 16x" for word in ("Current", "Max"))
    narrow = query("18").replace(now, "Current : 8x")
    # The slot of GPUs that are alike may have no more lanes.
    (note,) = lint_host(read(narrow))
    assert (note.severity, "both ends" in note.seen) == (NOTE, False)
    (worse,) = (
        found
        for found in lint_host(read(narrow + query("2A")))
        if found.severity is not NOTE
    )
    assert worse.element == "0000:18:00.0"
    assert "eseat" not in worse.remedy
    other = read(query("18").replace(most, "Max : 8x").replace(now, "Current : 8x"))
    assert not compare_hosts(at_rest, other).is_equal


def test_sections_of_one_gpu_are_joined_and_missing_gpus_are_counted():
    text = query("18", "2A").replace("GPUs : 2", "GPUs : 8") + query("18")
    host = read(text.replace("\n", "\r\n"))
    assert [gpu.bus_id for gpu in host.gpus] == ["0000:18:00.0", "0000:2a:00.0"]
    assert host.remarks == ("2 of 8 GPUs are shown.",)
    section = "GPU 00000000:18:00.0\n    Compute Mode                 : Default\n"
    assert read(f"=NVSMI LOG=\n{section}").devices == ()


def test_an_error_in_place_of_gpus_leads_to_the_check():
    with pytest.raises(UsageError, match=r"ronde check read gn1\.txt"):
        read("=====NVSMI LOG=====\n\nAttached GPUs : 0\n")


IBSTAT = """\
CA 'mlx5_0'
\tCA type: MT4129
\tNumber of ports: 1
\tPort 1:
\t\tState: Active
\t\tPhysical state: LinkUp
\t\tRate: 400
\t\tLink layer: InfiniBand
CA 'mlx4_1'
\tCA type: MT4103
\tNumber of ports: 2
\tPort 1:
\t\tState: Active
\t\tPhysical state: LinkUp
\t\tRate: 56 (FDR10)
\t\tLink layer: InfiniBand
\tPort 2:
\t\tState: Down
\t\tPhysical state: Disabled
\t\tRate: 10
\t\tLink layer: Ethernet
"""


@pytest.mark.parametrize("tag", ["", "gn1: ", "0: "])
def test_ports_of_rdma_adapters(tag):
    host = read("".join(f"{tag}{line}\n" for line in IBSTAT.splitlines()))
    one = NetPort("mlx5_0", kind="infiniband", mbit_per_s=400_000, port=1)
    one = one._replace(card="mlx5_0", model="MT4129")
    assert host.ports == (
        one,
        one._replace(title="mlx4_1", mbit_per_s=56_000, card="mlx4_1", model="MT4103"),
        NetPort(
            "mlx4_1:2", kind="ethernet", mbit_per_s=10_000, port=2, is_up=False
        )._replace(card="mlx4_1", state="DOWN, Disabled", model="MT4103"),
    )
    tree = draw_tree(Topology((host,)))
    assert "NIC mlx5_0      400 Gb/s, PCI device unknown\n" in tree
    assert "gn1: 3 network ports; the rest is not in this file\n" in tree


def matrix(names: list[str], word: str, own: str) -> str:
    """Return a table in which all pairs have the same word."""
    head = " ".join(f"{name:<12}" for name in names)
    rows = (
        " ".join([f"{a:<12}", *(f"{own if a == b else word:<12}" for b in names)])
        for a in names
    )
    return "\n".join([f"             {head}", *rows]) + "\n"


GPUS = [f"GPU{n}" for n in range(4)]
NODES = "".join(
    f"GPU[{n}]\t\t: (Topology) Numa Node: {n // 2}\n"
    f"GPU[{n}]\t\t: (Topology) Numa Affinity: {n // 2}\n"
    for n in range(4)
)
ROCM = (
    "\n\n============ ROCm System Management Interface ============\n"
    f"======= Weight between two GPUs =======\n{matrix(GPUS, '15', '0')}\n"
    f"======= Hops between two GPUs =======\n{matrix(GPUS, '1', '0')}\n"
    f"======= Link Type between two GPUs =======\n{matrix(GPUS, 'XGMI', '0')}\n"
    f"======= Numa Nodes =======\n{NODES}======= End of ROCm SMI Log =======\n"
)


def test_gpus_of_amd_and_their_links():
    host = read(ROCM)
    assert host.gpus == tuple(GpuDevice("", n, node=n // 2) for n in range(4))
    assert [node.number for node in host.numa_nodes] == [0, 1]
    assert "no CPUs" not in draw_tree(Topology((host,)))
    assert len(host.links) == 12
    assert host.links[0] == Link(LinkKind.XGMI, "gpu/0", "gpu/1", 1)
    assert {word for row in classify(host).words for word in row} == {"X", "XGMI"}
    assert read(ROCM.replace("GPU[", "GPU ").replace("]\t\t:", "         :")) == host
    assert read("".join(f"gn1: {line}\n" for line in ROCM.splitlines())) == host


def test_what_amd_smi_prints():
    names = [f"0000:{bus}:00.0" for bus in ("0c", "22", "9f", "af")]
    text = (
        f"ACCESS TABLE:\n{matrix(names, 'ENABLED', 'ENABLED')}\n"
        f"WEIGHT TABLE:\n{matrix(names, '15', '0')}\n"
        f"HOPS TABLE:\n{matrix(names, '1', '0')}\n"
        f"LINK TYPE TABLE:\n{matrix(names, 'XGMI', 'SELF')}\n"
        f"NUMA BW TABLE:\n{matrix(names, '50000-64000', 'N/A')}\n"
        f"CACHE COHERANCY TABLE:\n{matrix(names, 'C', 'SELF')}\n"
        "\nLegend:\n  SELF = Current GPU\n"
    )
    host = read(text)
    assert [gpu.bus_id for gpu in host.gpus] == names
    assert host.links[0] == Link(LinkKind.XGMI, names[0], names[1], 1, 64.0)


@pytest.mark.parametrize(("hops", "path"), [("2", "PHB"), ("3", "SYS")])
def test_gpus_that_only_the_bus_joins(hops, path):
    text = ROCM.replace("XGMI", "PCIE").replace(
        matrix(GPUS, "1", "0"), matrix(GPUS, hops, "0")
    )
    host = read(text)
    assert host.links == ()
    assert host.relations[0] == Relation("gpu/0", "gpu/1", path)


def test_the_table_of_types_alone_will_do():
    assert read(ROCM.replace("== Link Type between two GPUs ==", "")) == read(ROCM)
    assert len(read(matrix(GPUS, "XGMI", "0")).links) == 12
    assert read("======= Link Type between two GPUs =======\n GPU0\nGPU0 0\n").gpus
    assert len(read(NODES).gpus) == 4


def test_a_table_that_was_cut_is_refused():
    types = matrix(GPUS, "XGMI", "0")
    for num_lines in (1, 3, 4):
        with pytest.raises(UsageError, match="may be truncated"):
            read("".join(types.splitlines(keepends=True)[:num_lines]))
    with pytest.raises(UsageError, match="may be truncated"):
        read(types.replace("XGMI", "", 1))


OTHERS = {
    "output of numactl -H": "available: 2 nodes (0-1)\nnode 0 cpus: 0 1\n",
    "output of lscpu": "Architecture:                x86_64\n",
    "output of ip": "1: lo: <LOOPBACK,UP,LOWER_UP> mtu 65536 qdisc noqueue state\n",
    "output of ifconfig": "eth0: flags=4163<UP,BROADCAST,RUNNING>  mtu 1500\n",
    "nvidia-smi's table": "+----+\n| NVIDIA-SMI 570.133.20 |\n",
    "an AMD table without links": "=== ROCm System Management Interface ===\n",
    "AMD's JSON output": '[\n  {\n    "gpu": 0,\n     "link_type": "X"\n',
    "output of ibnetdiscover": "#\n# Topology file: generated on Thu\n",
    "output of ibv_devices": "    device          \t   node GUID\n    ------\n",
    "output of dcgmi discovery": "8 GPUs found.\n+--------+\n",
    "lstopo's drawing": "Machine (504GB total)\n  Package L#0\n",
    "a Python traceback": "Traceback (most recent call last):\n  File 'x'\n",
    "a page of HTML": "<!DOCTYPE html>\n<html>\n",
    "an archive": b"PK\x03\x04\x14",
    "packed": b"BZh91AY&SY",
    "a kernel log": "[    0.000000] Linux version 6.8.0\n",
    "output of nccl-tests": "#       size         count      type   redop    root\n",
    "a log of NCCL or torch": "gn1:7:9 [0] NCCL INFO NCCL version 2.27.3+cuda12.9\n",
}


@pytest.mark.parametrize(("name", "data"), OTHERS.items(), ids=OTHERS)
def test_other_files_are_named(name, data):
    data = data if isinstance(data, bytes) else data.encode()
    with pytest.raises(UsageError) as raised:
        read_file(Saved("it", data))
    message = str(raised.value)
    assert message.startswith(f"it is {name}, not a topology. ")
    assert "cut" not in message
    if name == "a Python traceback":
        assert message.endswith("has failed: run it again.")
    if name == "a kernel log":
        assert message.endswith("Type: ronde check read it")


def test_a_log_is_judged_as_topo_log_does(tmp_path, capsys):
    path = tmp_path / "job.log"
    path.write_text("gn1:7:9 [0] NCCL INFO NCCL version 2.27.3+cuda12.9\n")
    shown = [
        (main(["topo", *v, str(path)]), capsys.readouterr()) for v in ([], ["log"])
    ]
    assert shown[0] == shown[1]
    assert "NCCL 2.27.3" in shown[0][1].out
    assert main(["topo", "--matrix", "--json", str(path)]) == 64


def test_harm_is_none():
    def read_bytes(data: bytes) -> object:
        return read_file(Saved("a", data))

    assert check_harmless(read_bytes, bad_inputs(ROCM.encode())) > 5
