"""AMD's tables, and output of programs that show no topology."""

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
    Relation,
    Saved,
    Topology,
    classify,
    read_file,
)

ERROR, WARNING, NOTE = Level


def read(text: str) -> HostTopology:
    (host,) = read_file(Saved("gn1.txt", text.encode())).hosts
    return host


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
    "nvidia-smi's table": "+----+\n| NVIDIA-SMI 570.133.20 |\n",
    "an AMD table without links": "=== ROCm System Management Interface ===\n",
    "AMD's JSON output": '[\n  {\n    "gpu": 0,\n     "link_type": "X"\n',
    "output of nvidia-smi -q": "=====NVSMI LOG=====\n\nAttached GPUs : 0\n",
    "output of ibstat": "CA 'mlx5_0'\n\tCA type: MT4129\n\tPort 1:\n",
    "lstopo's drawing": "Machine (504GB total)\n  Package L#0\n",
    "a Python traceback": "Traceback (most recent call last):\n  File 'x'\n",
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
    if name in ("a kernel log", "output of nvidia-smi -q", "output of ibstat"):
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
