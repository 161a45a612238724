"""``ronde plan``: memory by formulas and by a step of a program; traffic."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.commands import refusal
from tests.topology.sample_hosts import OCI_H100, PERLMUTTER, sample_path

from ronde.cli import main
from ronde.parallel import Precision, Sharding

NO_RATES = "azure_ncv4_a100pcie_topo.xml"

PROGRAM = """
import torch
from settings import WIDTH

def build():
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))

def batch():
    return [torch.ones(2, WIDTH)]

def loss_of(model, inputs):
    return model(inputs).sum()

def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
"""
PARAMS = ("--params", "64k")


def plan(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["plan", "memory", *words]) == code
    return capsys.readouterr().out


def test_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--mesh", "pp=2,dp_shard=-1,tp=2", "-n", "16", "--blocks", "6", "--json")
    found = json.loads(plan(capsys, *PARAMS, *words, "--precision", "bf16"))
    assert (found["form"], found["version"]) == ("ronde-plan-memory", 1)
    assert (found["mesh"], found["zero"]) == ("pp=2,dp_shard=4,tp=2", 3)
    # 16,000 parameters are a rank's share by pp and tp, in three blocks.
    wanted = Sharding(4, 3, Precision.BF16).peak([5334, 5333, 5333])
    assert found["terms_bytes"] == dict(wanted.terms)
    assert found["total_bytes"] == wanted.total_bytes
    assert (found["limit_bytes"], found["shortage"]) == (None, "")


@pytest.mark.parametrize(
    ("optimizer", "total"), [("adam", 16), ("sgd-momentum", 12), ("sgd", 8)]
)
def test_what_keeps_state(
    capsys: pytest.CaptureFixture[str], optimizer: str, total: int
) -> None:
    words = ("--mesh", "dp_shard=1", "--zero", "1", "--optimizer", optimizer, "--json")
    assert json.loads(plan(capsys, *PARAMS, *words))["total_bytes"] == total * 64_000


def test_a_limit(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*PARAMS, "--mesh", "dp_shard=8", "--zero", "1", "--limit")
    text = plan(capsys, *words, "1MB")
    assert text.startswith("dp_shard=8: 8 ranks, zero 1; a rank at the peak of a step")
    assert text.endswith(
        "\nActivations and the process itself are not counted.\n\n"
        "It fits: 414.1KiB of 976.6KiB are left.\n"
    )
    text = plan(capsys, *words, "500000", code=1)
    assert "It does not fit: a rank has 488.3KiB of memory, but needs" in text


def test_a_step_of_a_program(tmp_path: Path) -> None:
    (tmp_path / "settings.py").write_text("WIDTH = 64\n")
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    words = ("plan", "memory", str(program), "--mesh", "dp_shard=2", "--json")
    command = (sys.executable, "-m", "ronde", *words, "--device")
    on_cpu, on_gpu = (
        json.loads(subprocess.check_output([*command, device], text=True))
        for device in ("cpu", "cuda")
    )
    found = on_gpu["terms_bytes"]
    assert found["weights"] == 4 * 4 * (64 * 64 + 64) / 2
    assert "optimizer state" not in found
    # The interpreter and torch take more than all of it.
    base = {name: on_cpu["terms_bytes"].pop(name) for name in ("process", "allocator")}
    assert on_cpu["terms_bytes"] == found
    assert base["process"] > 100 << 20
    assert base["allocator"] == round(on_gpu["total_bytes"] / 2)
    assert on_cpu["total_bytes"] == on_gpu["total_bytes"] + sum(base.values())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--params 7B", "--mesh is required"),
        ("--mesh dp_shard=8", "a FILE or --params is required"),
        ("--params 7B --mesh dp_shard=-1", "-n is required with --mesh dp_shard=-1"),
        ("--params 7B --mesh dp_shard=3 -n 8", "must be the number of ranks"),
        ("--params 7B --mesh cp=2", "--mesh must have no cp here, got cp=2"),
        ("--params 7B --mesh dp_shard=8 --zero 4", "--zero must be a whole number"),
        ("--params many --mesh dp_shard=8", "--params must be a count"),
        ("--params 9 --mesh dp_shard=8", "--params must give each rank at least one"),
        ("--params 7B --mesh dp_shard=8 --precision fp8", "must be fp32 or bf16"),
        ("--params 7B --mesh dp_shard=8 --limit much", "--limit: size must be"),
        (
            "train.py --params 7B --mesh dp_shard=8",
            "--params cannot be used with a FILE",
        ),
        ("train.py --mesh pp=2", "--mesh must have no pp with a FILE"),
        ("train.py --mesh dp_shard=8 --zero 1", "--zero must be 2 or 3 with a FILE"),
        ("--params 7B --mesh dp_shard=8 --device cpu", "--device cpu needs a FILE"),
        ("nowhere.py --mesh dp_shard=8", "FILE must be a Python program, got 'nowh"),
        (f"{__file__} --mesh dp_shard=8", "must define build.*, but has no build"),
    ],
)
def test_bad_input(
    capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    assert re.search(message, refusal(capsys, "plan", "memory", *words.split()))


TRAFFIC = ("--params", "70B", "--precision", "bf16", "--blocks", "80")
ACTIVATIONS = ("--hidden", "8192", "--tokens", "8192")


def plan_traffic(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", "traffic", str(sample_path(OCI_H100)), *TRAFFIC, *words]) == 0
    return capsys.readouterr().out


def test_traffic_of_each_axis(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan_traffic(capsys, "--mesh", "pp=2,dp_shard=4,tp=8", *ACTIVATIONS)
    page = Path(__file__).parents[2] / "docs" / "topology-placement.md"
    assert text in page.read_text()
    assert text.splitlines()[3:6] == [
        "pp          128MiB    45  2.98ms  1/8 of 16 ports from mlx5_0",
        "dp_shard  18.34GiB    45   438ms  1/8 of 16 ports from mlx5_0",
        "tp           35GiB   450  83.5ms  18 NVLinks",
    ]


def test_traffic_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(plan_traffic(capsys, "--mesh", "dp_shard=-1", "--json"))
    assert (found["form"], found["version"]) == ("ronde-plan-traffic", 1)
    assert (found["mesh"], found["zero"]) == ("dp_shard=8", 3)
    [axis] = found["axes"]
    assert axis["sent_bytes"] == 3 * 140e9 * 7 / 8
    assert (axis["axis"], axis["gb_per_s"]) == ("dp_shard", 450)


def test_the_slowest_host_counts_and_unknown_links_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ("plan", "traffic", *TRAFFIC, *ACTIVATIONS, "--mesh")
    hosts = [str(sample_path(name)) for name in (OCI_H100, PERLMUTTER, NO_RATES)]
    assert main([*command, "dp_shard=-1,tp=4", "-n", "4", *hosts[:2]]) == 0
    text = capsys.readouterr().out
    assert "   25   2.1s  1/4 of 4 ports from cxi3" in text
    assert "  300  215ms  12 NVLinks" in text
    assert main([*command, "dp_shard=4,tp=4", hosts[2]]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "dp_shard: no network adapter with a rate was found",
        "tp: the source does not show the PCIe link of a GPU",
    ]


def test_hosts_must_fit_the_layout(capsys: pytest.CaptureFixture[str]) -> None:
    hosts = [str(sample_path(name)) for name in (OCI_H100, PERLMUTTER)]
    command = ("plan", "traffic", "--params", "7B")
    said = refusal(capsys, *command, "--mesh", "dp_shard=8", *hosts)
    assert "the hosts have different numbers of GPUs: oci_H100-topology 8" in said
    said = refusal(capsys, *command, "--mesh", "dp_shard=9", "-n", "9", hosts[0])
    assert said.startswith("-n must be at most 8, the number of GPUs of a host, got 9")
    said = refusal(capsys, *command, "--mesh", "dp_shard=2000000", hosts[0])
    assert said.startswith("the number of ranks must be at most 1048576, got 2000000.")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--mesh dp_shard=8", "--params is required"),
        ("--params 7B --mesh tp=8", "--hidden is required if --mesh has tp"),
        ("--params 7B --mesh pp=8 --hidden 4", "--tokens is required if"),
        ("--params 7B --mesh dp_shard=3", "must be a multiple of the"),
    ],
)
def test_bad_traffic(
    capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    command = ("plan", "traffic", str(sample_path(OCI_H100)))
    assert re.search(message, refusal(capsys, *command, *words.split()))


def test_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["memory"], ["traffic"]):
        assert main(["plan", *words, "--help"]) == 0
        usage = " ".join(["usage: ronde plan", *words])
        assert capsys.readouterr().out.startswith(usage)
    for words in ([], ["--help"]):
        assert main(["plan", *words]) == 0
        assert "ronde plan memory" in capsys.readouterr().out
    shown = refusal(capsys, "plan", "memroy")
    assert shown.startswith(
        "verb must be memory, traffic, points or validate, got 'memroy'"
    )
