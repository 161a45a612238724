"""Two hosts compared: real pairs of files, and laws over all of them."""

import json
from collections import Counter
from pathlib import Path

import pytest
from tests.commands import refusal
from tests.topology.sample_hosts import H200, PERLMUTTER, sample_host

from ronde.cli import main
from ronde.render import draw_comparison
from ronde.topology import (
    NCCL_TOPOLOGY,
    HostTopology,
    NetPort,
    NumaNode,
    PathKind,
    Saved,
    compare_hosts,
)


def run(words):
    return main(["topo", "diff", *words])


SAMPLES = Path(__file__).parent / "samples"
FILES = sorted(
    path
    for form in ("nccl_topo", "rccl_topo")
    for path in SAMPLES.glob(f"{form}/*.xml")
)
OCI = "oci_topo-flattened.xml", "oci_topo-flattened-b4.xml"
BARE, VIRTUAL = "hgx_b200_8x_vastai_nccl2.27.3.xml", "modal_gvisor_b200_vm_topo.xml"


def load(path: Path) -> HostTopology:
    return NCCL_TOPOLOGY.read(Saved(path.name, path.read_bytes())).hosts[0]


def nccl(name: str) -> HostTopology:
    return load(SAMPLES / "nccl_topo" / name)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_host_is_like_itself(path: Path) -> None:
    host = load(path)
    comparison = compare_hosts(host, host)
    assert comparison.is_equal
    names = {element.name for element in (*host.gpus, *host.ports, *host.numa_nodes)}
    assert comparison.num_matched == len(names)
    num_gpus = len(host.gpus)
    assert comparison.paths[0].num_pairs == num_gpus * (num_gpus - 1) // 2
    assert draw_comparison("a", "a", comparison).count("\n") == 1


def test_files_for_two_shapes_of_a_cloud() -> None:
    first, second = map(nccl, OCI)
    comparison = compare_hosts(first, second)
    # Both files have 8 GPUs, 8 adapters and 4 nodes; of 4 GPUs and of 4 adapters the
    # addresses differ (51 and 50, 54 and 53, 8d and 8c, 92 and 91; ...).
    assert comparison.num_matched == 20
    moved = [(d.was, d.now) for d in comparison.differences if d.fact == "bus address"]
    assert moved[:4] == [
        (f"0000:{a}:00.0", f"0000:{b}:00.0")
        for a, b in (("51", "50"), ("54", "53"), ("8d", "8c"), ("92", "91"))
    ]
    facts = Counter(d.fact for d in comparison.differences)
    assert facts == {"bus address": 8, "port": 4, "CPUs": 4, "processor": 4}
    assert not any(each.changes for each in comparison.paths)
    assert comparison.only_first == comparison.only_second == ()


def test_what_a_virtual_machine_makes_of_its_host() -> None:
    comparison = compare_hosts(nccl(BARE), nccl(VIRTUAL))
    links = [d for d in comparison.differences if d.fact == "GPU links"]
    assert {(d.was, d.now) for d in links} == {("18 nvlink", "126 nvlink")}
    assert links[0].was_gb_per_s == pytest.approx(18 * 40.1)
    gpus, ports = comparison.paths
    # 8 GPUs have 28 pairs, and NCCL caps at 5000.
    assert len(gpus.changes) == gpus.num_pairs == 28
    rates = {(c.was.gb_per_s, c.now.gb_per_s) for c in gpus.changes if c.was and c.now}
    assert {(round(was, 3), now) for was, now in rates} == {(721.8, 5000.0)}
    assert ports.num_pairs == 0
    assert comparison.only_first == ("net/eth0",)
    assert len(comparison.only_second) == 13
    text = draw_comparison("a", "b", comparison)
    assert "NVL 721.8 GB/s -> NVL 5000 GB/s (+593%): 28 pairs:" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_a_gpu_that_is_gone_is_named_and_the_others_are_matched() -> None:
    whole = nccl("perlmutter_a100_4x_slingshot_nccl2.29.7.xml")
    lost = whole.gpus[1]
    comparison = compare_hosts(
        whole, whole._replace(gpus=(whole.gpus[0], *whole.gpus[2:]))
    )
    assert comparison.only_first == (lost.name,)
    assert comparison.only_second == ()
    assert comparison.differences == ()
    assert not comparison.is_equal


def test_memory_that_is_nearly_alike_is_no_difference() -> None:
    hosts = [
        HostTopology(numa_nodes=(NumaNode(0, (0,), memory_bytes=size),))
        for size in (1_000_000, 1_010_000, 1_050_000)
    ]
    assert compare_hosts(hosts[0], hosts[1]).is_equal
    (found,) = compare_hosts(hosts[0], hosts[2]).differences
    assert found.fact == "memory"


def test_what_one_does_not_report_is_no_difference() -> None:
    reported = nccl("perlmutter_a100_4x_slingshot_nccl2.29.7.xml")
    silent = reported._replace(
        gpus=tuple(gpu._replace(sm=-1, gdr=-1) for gpu in reported.gpus),
        numa_nodes=tuple(NumaNode(node.number) for node in reported.numa_nodes),
    )
    assert compare_hosts(reported, silent).differences == ()


def test_the_command_and_its_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    names = [str(SAMPLES / "nccl_topo" / name) for name in OCI]
    assert run([names[0], names[0]]) == 0
    assert "are alike: 20 elements" in capsys.readouterr().out
    assert run([*names, "--json"]) == 1
    reported = json.loads(capsys.readouterr().out)
    assert reported["form"] == "ronde-topology-diff"
    assert reported["comparison"]["num_matched"] == 20
    assert run(["--help"]) == 0
    said = refusal(capsys, "topo", "diff", "/nowhere", names[0])
    assert "/nowhere" in said


@pytest.mark.parametrize(
    ("name", "text", "untold"),
    [
        (PERLMUTTER, "perlmutter_a100_4x_drv580.159.txt", ("network ports",)),
        (BARE, "hgx_b200_8x_drv595.91.txt", ("network ports",)),
        (H200, "hgx_h200_8x_topo_p2p_n.txt", ("NUMA nodes", "network ports")),
    ],
)
def test_two_sources_of_one_machine_are_alike(
    name: str, text: str, untold: tuple[str, ...]
) -> None:
    first, second = sample_host(name), sample_host(text)
    there, back = compare_hosts(first, second), compare_hosts(second, first)
    assert there.is_equal
    assert back.is_equal
    assert there.missing_second == back.missing_first == untold
    assert there.missing_first == back.missing_second == ()
    said = draw_comparison("a", "b", there).splitlines()
    assert said[1] == f"B has no {' and no '.join(untold)}: not compared."


def test_what_is_left_over_is_matched_by_number_and_name() -> None:
    host = sample_host(PERLMUTTER)
    anew = host._replace(
        gpus=tuple(g._replace(bus_id="", node=3 - g.number) for g in host.gpus[::-1]),
        ports=tuple(
            NetPort(f"mlx5_{n}", bus_id=f"00ff:0{n % 10}:00.{n // 10}")
            for n in (10, 2, 1, 9)
        ),
        links=(),
    )
    found = compare_hosts(host, anew).differences
    assert not [each for each in found if each.fact == "NUMA node"]
    names = {each.was: each.now for each in found if each.fact == "port"}
    assert names == {
        "cxi0": "mlx5_1",
        "cxi1": "mlx5_2",
        "cxi2": "mlx5_9",
        "cxi3": "mlx5_10",
    }


def test_a_chip_that_is_not_reported_is_no_loss_and_one_that_is_reported_is() -> None:
    host = sample_host(BARE)
    unknown = host._replace(gpus=tuple(gpu._replace(sm=-1) for gpu in host.gpus))
    assert compare_hosts(host, unknown).is_equal
    older = host._replace(gpus=tuple(gpu._replace(sm=90) for gpu in host.gpus))
    assert len(compare_hosts(host, older).paths[0].changes) == 28
    cut = unknown._replace(links=unknown.links[1:])
    changes = compare_hosts(host, cut).paths[0].changes
    assert len(changes) == 7
    assert all(each.now.kind >= PathKind.PIX for each in changes)


LSPCI = """\
00:01.0 PCI bridge: Intel Corporation Device 352a (rev 04)
\tBus: primary=00, secondary=01, subordinate=01, sec-latency=0
\t\tLnkCap:\tPort #1, Speed 32GT/s, Width x16, ASPM not supported
\t\tLnkSta:\tSpeed 32GT/s (ok), Width x16 (ok)
01:00.0 3D controller: NVIDIA Corporation GH100 [H100 SXM5 80GB] (rev a1)
\t\tLnkCap:\tPort #0, Speed 32GT/s, Width x16, ASPM not supported
\t\tLnkSta:\tSpeed 32GT/s (ok), Width x16 (ok)
"""


@pytest.mark.parametrize(
    ("now", "link"),
    [
        ("Speed 32GT/s (ok), Width x4 (downgraded)", "32.0 GT/s PCIe x4"),
        ("Speed 8GT/s (downgraded), Width x16 (ok)", "8.0 GT/s PCIe x16"),
        ("Speed 2.5GT/s (downgraded), Width x16 (ok)", ""),
    ],
)
def test_links_are_compared_as_they_run_but_not_at_rest(now, link, tmp_path, capsys):
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    head, sign, tail = LSPCI.rpartition("Speed 32GT/s (ok), Width x16 (ok)")
    files[0].write_text(LSPCI)
    files[1].write_text(head + now + tail)
    assert sign
    assert run([str(file) for file in files]) == (1 if link else 0)
    out = capsys.readouterr().out
    assert f"PCI link: 32.0 GT/s PCIe x16 (48 GB/s) -> {link}" in out or not link


def test_a_path_that_lost_links_in_one_direction_is_named() -> None:
    host = sample_host(PERLMUTTER)
    (lost, *rest) = host.links
    fewer = lost._replace(num_links=1)
    for links in (fewer, *rest), (*rest, fewer):
        (change,) = compare_hosts(host, host._replace(links=links)).paths[0].changes
        assert set(change.ends) == {lost.source, lost.target}
        assert (change.was.gb_per_s, change.now.gb_per_s) == (80.0, 20.0)
    changes = compare_hosts(host, host._replace(links=tuple(rest))).paths[0].changes
    assert [each.now.kind for each in changes] == [PathKind.NVB]
