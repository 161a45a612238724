"""``--expect``: the equipment that each host must have."""

import pytest
from tests.check.test_network_family import ETH0

from ronde.check import Check, Fleet, HostFacts, expected, judge, read_expected
from ronde.cli import read_check_request
from ronde.errors import UsageError

CHECKS = [each for each in vars(expected).values() if isinstance(each, Check)]
GIB = 1 << 30
PORT = {"state": "ACTIVE", "mbit_per_s": 400_000}
WHOLE = {
    "gpu.count": 8,
    "gpu.titles": ["NVIDIA H100 80GB HBM3"] * 8,
    "network.interfaces": {"eth0": ETH0},
    "network.rdma_ports": {f"mlx5_{n}:1": PORT for n in range(8)},
    "host.memory_bytes": 2015 * GIB,
}


def find(words, **changes):
    facts = WHOLE | {name.replace("__", "."): each for name, each in changes.items()}
    host = HostFacts("a", facts, {}, {})
    settings = {expected.EXPECTED: read_expected(words)} if words else {}
    found = judge(Fleet((host,), settings), CHECKS).findings
    return [(each.check, each.message, each.usual) for each in found]


@pytest.mark.parametrize("words", ["8xH100,8x400G,2TiB", "8xh100", "4x200Gb/s", ""])
def test_expected_equipment_is_no_finding(words):
    assert find(words) == []


def test_a_node_that_shows_no_gpus_is_found():
    assert find("8xH100", gpu__count=0, gpu__titles=[]) == [
        ("expected-gpus", "0 GPUs H100", "8 expected")
    ]


def test_gpus_of_another_model_do_not_count():
    titles = ["NVIDIA H100 80GB HBM3"] * 6 + ["NVIDIA H100 PCIe", "NVIDIA A100", None]
    assert find("8xH100 80GB", gpu__count=9, gpu__titles=titles) == [
        (
            "expected-gpus",
            "6 GPUs H100 80GB, and 3 others (?, NVIDIA A100, NVIDIA H100 PCIe)",
            "8 expected",
        )
    ]


def test_a_port_that_is_down_or_slower_does_not_count():
    down, slow = PORT | {"state": "DOWN"}, PORT | {"mbit_per_s": 200_000}
    ports = WHOLE["network.rdma_ports"] | {"mlx5_0:1": down, "mlx5_1:1": slow}
    assert find("8x400G", network__rdma_ports=ports) == [
        ("expected-ports", "6 ports of 400 Gbit/s are up", "8 expected")
    ]
    own = {f"eth{n}": ETH0 | {"mbit_per_s": 100_000} for n in range(2)}
    assert find("2x100G", network__interfaces=own, network__rdma_ports={}) == []


def test_less_memory_is_found():
    assert find("2TiB", host__memory_bytes=1512 * GIB) == [
        ("expected-memory", "1.477TiB of memory", "2TiB expected")
    ]


def test_the_value_may_be_a_file(tmp_path):
    file = tmp_path / "node.txt"
    file.write_text("8xH100  # SXM\n\n8x400G, 2TiB\n")
    assert read_expected(str(file)) == read_expected("8xH100,8x400G,2TiB")


@pytest.mark.parametrize(
    ("word", "gb_per_s"),
    [
        ("10GB/s", 10),
        ("100Gbit/s", 12.5),
        ("100Gbps", 12.5),
        ("2.5 MB/s", 0.0025),
        ("800kbit/s", 0.0001),
        ("1TB/s", 1000),
    ],
)
def test_a_rate_between_hosts_is_measured(word, gb_per_s):
    words = ["--expect", f"8xH100,{word}"]
    settings = read_check_request([*words, "-H", "a,b"], {}).settings
    assert settings["expected"]["gb_per_s"] == pytest.approx(gb_per_s)
    assert settings["bandwidth"] == "auto"
    with pytest.raises(UsageError, match="but there is only one host"):
        read_check_request(words, {})


@pytest.mark.parametrize(
    "words", ["", "8", "H100", "10G/s", "4GB/s,1GB/s", "8xH100,4xA100", "8x", "x400G,"]
)
def test_bad_values_are_refused(words):
    with pytest.raises(UsageError, match=r"--expect must name .* Type, for example"):
        read_expected(words)
