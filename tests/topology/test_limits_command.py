"""``ronde topo limit``: what it prints, and what it refuses."""

import json
from pathlib import Path

import pytest
from tests.commands import refusal

from ronde.cli import main
from ronde.render import compare_with_limit
from ronde.topology import Limit


def run(words):
    return main(["topo", "limit", *words])


SAMPLES = Path(__file__).parent / "samples"
H100 = str(SAMPLES / "nccl_topo/oci_H100-topology.xml")
A100 = str(SAMPLES / "nccl_topo/perlmutter_a100_4x_slingshot_nccl2.29.7.xml")
CLOUD = str(SAMPLES / "nccl_topo/azure_ndv5_h100_topo.xml")


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = run(words)
    return code, capsys.readouterr().out


def test_two_nodes_of_eight(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = printed(capsys, H100, "--nodes", "2")
    assert code == 0
    lines = text.splitlines()
    assert lines[0] == "2 nodes with 8 GPUs each, GB/s in one direction"
    assert lines[1].split(maxsplit=1) == ["network", "16 ports from mlx5_0, 360 GB/s"]
    rows = {line.split()[0]: line.split()[1:3] for line in lines[4:16] if line}
    assert rows["collective"] == ["bound", "NCCL's"]
    # 450 and 18 * 20.6, * 15/14
    assert rows["all_reduce"] == ["482.1", "397.3"]
    assert rows["alltoall"] == ["84.38", "84.38"]  # 360/8 * 2 * 15/16
    assert len(rows) == 12
    assert "(NVLS) allow 675 GB/s" in text
    assert max(len(line) for line in lines) <= 80


def test_a_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    words = (H100, "--nodes", "2", "--measured", "471.22")
    code, text = printed(capsys, *words)
    assert code == 0
    assert text.splitlines()[-1] == (
        "measured 471.22 GB/s: 97.7 % of the bound, 118.6 % of NCCL's."
    )
    assert printed(capsys, *words, "--threshold", "97")[0] == 0
    assert printed(capsys, *words, "--threshold", "98")[0] == 1


def test_more_than_the_bound_is_reported() -> None:
    text = compare_with_limit(Limit(400, "8 ports, 400 GB/s"), 500)
    assert text.startswith("measured 500 GB/s: 125.0 % of the bound.\n125 % of")
    assert "NVLS" in text
    assert "NVLS" not in compare_with_limit(Limit(400, "8 ports, 400 GB/s"), 400)


def test_several_files_are_a_node_each(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = printed(capsys, H100, A100, "--json")
    reported = json.loads(text)
    assert (reported["num_nodes"], reported["ranks_per_node"]) == (2, 4)
    limits = {each["collective"]: each for each in reported["limits"]}
    # The slower adapters and GPUs are one host's: 100 and 300 GB/s.
    assert limits["all_reduce"]["bound_gb_per_s"] == 100 * 2 * 7 / 8
    assert limits["all_reduce"]["practical_gb_per_s"] == 96 * 2 * 7 / 8
    assert limits["gather"]["link"] == "4 ports from cxi3, 100 GB/s"


def test_rates_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--nodes", "16", "--ranks-per-node", "8", "--link-rate", "400")
    words += ("--gpu-rate", "450", "--collective", "all_reduce", "--json")
    (found,) = json.loads(printed(capsys, CLOUD, *words)[1])["limits"]
    assert f"{found['bound_gb_per_s']:.1f}" == "423.3"
    assert found["link"] == "as given, 400 GB/s"


def test_what_is_unknown_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = printed(capsys, CLOUD, "--nodes", "2")
    assert "bounds may be lower: the source does not show whether NVLink" in text
    code, text = printed(capsys, CLOUD)
    assert code == 0
    assert "all_reduce             -  the source does not show" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--nodes", "0"), "--nodes must be a whole number from 1 to 1048576"),
        (("--ranks-per-node", "9" * 5000), "--ranks-per-node must be a whole number"),
        (("--link-rate", "nan"), "--link-rate must be a number above 0, got 'nan'"),
        (("--measured", "-1"), "--measured must be a number above 0"),
        (("--measured", "inf"), "--measured must be a number above 0"),
        (("--collective", "allreduce"), "--collective must be all_reduce, all_gather"),
        (("--threshold", "80"), "--threshold requires --measured"),
        (
            ("--measured", "1", "--collective", "gather", "--collective", "reduce"),
            "--measured is the busbw of one collective, but",
        ),
        (("--measured", "1"), "there is no bound to compare --measured with"),
    ],
)
def test_what_is_refused(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    assert message in refusal(capsys, "topo", "limit", CLOUD, *words)
