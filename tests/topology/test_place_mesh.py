"""``ronde topo place --mesh``: groups of a layout on real hosts, and their links."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from tests.commands import refusal
from tests.topology.sample_hosts import B200, H200, OCI_H100, PERLMUTTER, sample_path

from ronde.cli import main

# GPUs 0, 2, 3 and 6 are a ring of xGMI links, the others another.
ISLANDS = "topo_8p_ts1_n4_2.xml"
NO_RATES = "azure_ncv4_a100pcie_topo.xml"


def with_samples(words: Iterable[str]) -> list[str]:
    return [str(sample_path(w)) if w.endswith(".xml") else w for w in words]


def place(capsys: pytest.CaptureFixture[str], mesh: str, *words: str) -> str:
    assert main(["topo", "place", "--mesh", mesh, *with_samples(words)]) == 0
    return capsys.readouterr().out


def test_one_host_stands_for_all(capsys: pytest.CaptureFixture[str]) -> None:
    text = place(capsys, "pp=2,dp_shard=4,tp=8", OCI_H100)
    assert text.splitlines() == [
        "pp=2,dp_shard=4,tp=8: 64 ranks on 8 hosts, 8 each",
        "",
        "axis      groups   first         hosts  GB/s  slowest link of a group",
        "pp        32 of 2  0, 32         2        45  1/8 of 16 ports from mlx5_0",
        "dp_shard  16 of 4  0, 8, 16, 24  4        45  1/8 of 16 ports from mlx5_0",
        "tp        8 of 8   0-7           1       450  18 NVLinks",
    ]


def test_the_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(place(capsys, "dp_shard=-1,tp=2", PERLMUTTER, "--json"))
    assert (found["form"], found["version"]) == ("ronde-mesh", 1)
    plan = found["plan"]
    assert (plan["mesh"], plan["num_ranks"]) == ("dp_shard=2,tp=2", 4)
    assert (plan["num_hosts"], plan["ranks_per_host"], plan["gpus"]) == (1, 4, [])
    assert [axis["groups"] for axis in plan["axes"]] == [
        [[0, 2], [1, 3]],
        [[0, 1], [2, 3]],
    ]
    # Of 12 NVLinks of a GPU, 4 lead to the other one of its group.
    assert [axis["gb_per_s"] for axis in plan["axes"]] == [100, 100]


def test_gpus_are_taken_along_their_links(capsys: pytest.CaptureFixture[str]) -> None:
    for tp, rate in ((2, "46"), (4, "92")):
        lines = place(capsys, f"dp_shard=-1,tp={tp}", ISLANDS).splitlines()
        row = next(line.split() for line in lines if line.startswith("tp"))
        assert row[-4:] == [rate, str(tp // 2), "xGMI", "links"]
        assert lines[-1] == "  HIP_VISIBLE_DEVICES=0,3,2,6,5,4,1,7"


def test_fewer_ranks_than_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    text = place(capsys, "dp_shard=2,tp=2", B200, "-n", "4")
    assert text.splitlines()[0] == "dp_shard=2,tp=2: 4 ranks on 1 host"
    assert text.endswith("  CUDA_VISIBLE_DEVICES=0,1,2,3\n")


def test_of_several_hosts_the_slowest_counts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = place(capsys, "dp_shard=-1,tp=4", OCI_H100, PERLMUTTER, "-n", "4")
    assert "dp_shard  4 of 2  0, 4   2        25  1/4 of 4 ports from cxi3" in text
    assert "tp        2 of 4  0-3    1       300  12 NVLinks" in text
    assert "variables of all ranks on oci_H100-topology:" in text


def test_tp_spans_hosts_if_asked(capsys: pytest.CaptureFixture[str]) -> None:
    text = place(capsys, "tp=16", OCI_H100, "--allow", "tp=host")
    assert "tp    1 of 16  0-15   2       360  16 ports from mlx5_0" in text


def test_unknown_links_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    lines = place(capsys, "dp_shard=4,tp=4", NO_RATES).splitlines()
    assert [line.split()[-2:] for line in lines[3:5]] == [["-", "unknown"]] * 2
    assert lines[5:] == [
        "dp_shard: no network adapter with a rate was found",
        "tp: the source does not show the PCIe link of a GPU",
    ]


def test_a_host_without_gpus(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "sys").mkdir()
    root = ("--root", str(tmp_path))
    text = place(capsys, "dp_shard=2,tp=2", "-n", "2", *root)
    assert text.splitlines()[0] == "dp_shard=2,tp=2: 4 ranks on 2 hosts, 2 each"
    assert "tp: ronde bench --limit measures memory" in text
    text = place(capsys, "tp=1", "-n", "1", *root)
    assert text == "dp_shard=1: 1 rank on 1 host\n\nno groups\n"
    said = refusal(capsys, "topo", "place", "--mesh", "tp=2", *root)
    assert said.startswith("-n must be given for hosts without GPUs")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("tp=16", OCI_H100),
            (
                "tp must divide the ranks of a host, 8, to stay on it, got tp=16. Take "
                "tp=8, or type: --allow tp=host"
            ),
        ),
        (
            ("dp_shard=2,tp=4", PERLMUTTER, "-n", "2"),
            "tp must divide the ranks of a host, 2, to stay on it, got tp=4. Take tp=2",
        ),
        (
            ("dp_shard=3,tp=2", OCI_H100),
            (
                "pp*dp_replicate*dp_shard*cp*tp must be a multiple of the ranks of a "
                "host: 1*1*3*1*2 = 6, got 8 ranks of a host. Type: -n 6, or "
                "change a size."
            ),
        ),
        (
            ("pp=3,dp_shard=-1", OCI_H100),
            (
                "pp*dp_replicate*cp*tp must divide the number of ranks, as dp_shard is "
                "-1: 3*1*1*1 = 3, got 8 ranks."
            ),
        ),
        (
            ("dp_shard=4,tp=4", OCI_H100, B200, H200),
            (
                "pp*dp_replicate*dp_shard*cp*tp must be the number of ranks: "
                "1*1*4*1*4 = 16, got 24 ranks. dp_shard=6 fits."
            ),
        ),
        (
            ("tp=4", OCI_H100, PERLMUTTER),
            (
                "hosts must have as many GPUs each, got oci_H100-topology 8, "
                "perlmutter_a100_4x_slingshot_nccl2.29.7 4. Type: -n 4"
            ),
        ),
        (
            ("tp=9", OCI_H100, "-n", "9"),
            "-n must be at most the GPUs of a host, 8, got",
        ),
        (("tp=8", OCI_H100, "-n", ""), "-n must be a whole number of at least 1"),
        (("dp_shard=2000000", OCI_H100), "ranks must be at most 1048576, got 2000000."),
        (("dp=8", OCI_H100), "axis must be pp, dp_replicate, dp_shard, cp or tp, got"),
        (("tp=8", OCI_H100, "--policy", "none"), "--mesh must stand alone, got --poli"),
        (("tp=8", OCI_H100, "--allow", "pp=host"), "--allow: invalid choice"),
    ],
)
def test_what_does_not_fit_is_refused(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    said = refusal(capsys, "topo", "place", "--mesh", *with_samples(words))
    assert said.startswith(message)


def test_allow_is_for_meshes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("-n", "1", "--allow", "tp=host", str(sample_path(B200)))
    said = refusal(capsys, "topo", "place", *words)
    assert said.startswith("--allow must come with --mesh, got it al")
