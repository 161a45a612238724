import re

import pytest
from tests.topology.sample_hosts import (
    B200,
    FILES,
    OCI_H100,
    PERLMUTTER,
    SAMPLES,
    sample_host,
)

from ronde.topology import (
    GpuDevice,
    HostTopology,
    Link,
    LinkKind,
    NetPort,
    NumaNode,
    PathKind,
    PciDevice,
    Relation,
    classify,
    find_paths,
)

B200_TEXT = "hgx_b200_8x_drv595.91.txt"
PERLMUTTER_TEXT = "perlmutter_a100_4x_drv580.159.txt"


def read_matrix(name: str) -> dict[str, list[str]]:
    """Return words, CPU affinity and NUMA affinity of each GPU of a text's matrix."""
    text = (SAMPLES / "nvsmi_topo_m" / name).read_text()
    rows = [line.split() for line in text.splitlines()]
    # The last column tells the GPU's own memory, N/A throughout.
    return {row[0]: row[1:-1] for row in rows if row and re.match(r"GPU\d", row[0])}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (B200, B200_TEXT),
        (B200_TEXT, B200_TEXT),
        (PERLMUTTER, PERLMUTTER_TEXT),
        (PERLMUTTER_TEXT, PERLMUTTER_TEXT),
    ],
)
def test_the_table_is_nvidia_smis_of_the_same_machine(name, text):
    matrix = read_matrix(text)
    table = classify(sample_host(name))
    num_gpus = len(table.names) - len(table.titles)
    assert num_gpus == len(matrix) > 0
    for place in range(num_gpus):
        *words, cpus, node = matrix[f"GPU{place}"]
        assert list(table.words[place][:num_gpus]) == words
        assert (table.cpus[place], table.nodes[place]) == (cpus, node)


def test_a_gpus_own_adapter_is_below_broadcoms_switches():
    # Both are below a switch of their own, and these below one: PXB to nvidia-smi.
    table = classify(sample_host(OCI_H100))
    assert table.titles[:3] == ("mlx5_0", "mlx5_1", "mlx5_3")
    first = dict(zip(table.labels, table.words[0], strict=True))
    assert [first[f"NIC{n}"] for n in (0, 1, 2, 7, 8, 15)] == [
        *("PXB", "PXB", "PHB", "PHB", "SYS", "SYS")
    ]
    ports = table.words[table.labels.index("NIC0")]
    assert ports[table.labels.index("NIC1")] == "PIX"


@pytest.mark.parametrize("name", FILES)
def test_the_table_agrees_with_nccls_kinds(name):
    # Without NVLink and without joined switches, both tell the same.
    host = sample_host(name)._replace(links=())
    plain = tuple(each._replace(vendor=0) for each in host.devices)
    host = host._replace(devices=plain)
    table = classify(host)
    paths = find_paths(host)
    for one, row in zip(table.names, table.words, strict=True):
        for other, word in zip(table.names, row, strict=True):
            kind = paths.between(one, other).kind
            # Ports of one adapter are at no distance to NCCL.
            expected = "PIX" if kind is PathKind.LOC and one != other else kind.value
            assert word == ("X" if one == other else expected)


def device(bus_id: str, parent: str = "", node: int = 0, class_code: int = 0x060400):
    return PciDevice(bus_id, parent, node, class_code)


NODES = (NumaNode(0, cpus=(0, 1, 2, 3, 8)), NumaNode(1, cpus=(4, 5)))


class TestWords:
    def test_links_to_processors_are_not_between_gpus(self):
        gpus = tuple(GpuDevice(f"0000:0{n}:00.0", n) for n in range(2))
        links = tuple(
            Link(LinkKind.NVLINK, each.name, target, 2, target_class=class_code)
            for each in gpus
            for target, class_code in (("numa/0", -1), ("0000:f0:00.0", 0x068001))
        )
        table = classify(HostTopology(numa_nodes=NODES, gpus=gpus, links=links))
        assert table.words[0][1] == "?"

    def test_a_source_that_knows_host_bridges_is_believed(self):
        host = HostTopology(
            numa_nodes=NODES,
            devices=(device("0000:01:00.0"), device("0000:02:00.0")),
            gpus=(GpuDevice("0000:01:00.0", 0), GpuDevice("0000:02:00.0", 1)),
        )

        def word(said: str) -> str:
            reported = Relation("0000:02:00.0", "0000:01:00.0", path=said)
            return classify(host._replace(relations=(reported,))).words[0][1]

        assert [word(""), word("PHB"), word("NODE")] == ["PHB", "PHB", "NODE"]
        # What the tree contradicts, it does not take.
        assert [word("SYS"), word("PIX")] == ["PHB", "PHB"]

    def test_words_of_a_source_stand_where_there_is_no_tree(self):
        host = HostTopology(
            gpus=(GpuDevice("", 0), GpuDevice("", 1)),
            ports=(NetPort("mlx5_0"), NetPort("docker0")),
            relations=(
                Relation("gpu/0", "net/mlx5_0", path="PXB"),
                Relation("gpu/0", "gpu/1", path="SYS"),
            ),
        )
        table = classify(host)
        assert table.labels == ("GPU0", "GPU1", "NIC0")
        assert table.words == (
            ("X", "SYS", "PXB"),
            ("SYS", "X", "?"),
            ("PXB", "?", "X"),
        )
        assert table.cpus == table.nodes == ("", "", "")

    def test_devices_whose_node_no_source_reports_are_not_guessed(self):
        devices = (device("0000:01:00.0", node=-1), device("0000:02:00.0", node=-1))
        gpus = (GpuDevice("0000:01:00.0", 0), GpuDevice("0000:02:00.0", 1))
        host = HostTopology(devices=devices, gpus=gpus)
        assert classify(host).words[0][1] == "?"
        assert classify(host._replace(numa_nodes=NODES)).words[0][1] == "?"
        # A virtual machine's only node has the number -1 in NCCL's files.
        one = host._replace(numa_nodes=(NumaNode(-1),))
        assert classify(one).words[0][1] == "PHB"
