"""The command ``ronde topo``: sources in, one of several forms out."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.commands import refusal
from tests.limits import HANG_S

from ronde.cli import main
from ronde.topology import read_topology

SAMPLES = Path(__file__).parent / "samples"
PERLMUTTER = "nccl_topo/perlmutter_a100_4x_slingshot_nccl2.29.7.xml"
GRAPH = "nccl_graph/azure_ncv4_graph.xml"
B200 = "nccl_topo/hgx_b200_8x_vastai_nccl2.27.3.xml"


@pytest.fixture(autouse=True)
def _in_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SAMPLES)


def test_this_machine_is_shown_without_torch():
    program = (
        "import sys\n"
        "from ronde.cli import main\n"
        "code = main(['topo'])\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] == 'torch'))\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=HANG_S, check=True
    )
    lines = done.stdout.decode().splitlines()
    assert "NUMA node" in lines[0]
    assert lines[1].split()[1:3] == ["NUMA", "node"]
    assert lines[-1] == "[]"


def test_json_is_read_again_and_shows_the_same(tmp_path, capsys):
    def shown(*words: str) -> str:
        assert main(["topo", *words]) == 0
        return capsys.readouterr().out

    text = shown(B200, "--json")
    path = tmp_path / "hgx_b200_8x_vastai_nccl2.27.3.json"
    path.write_text(text)
    topology = read_topology(text.encode(), "node")
    assert [len(h.gpus) for h in topology.hosts] == [8]
    tree = shown(B200)
    assert shown(str(path)) == tree
    piped = subprocess.run(
        [sys.executable, "-m", "ronde", "topo", "-"],
        input=text,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    assert piped.stdout == tree
    assert "NVL 80.0" in shown(PERLMUTTER, "--paths")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["absent.xml"], "cannot read absent.xml: No such file or directory"),
        (["."], "cannot read .: Is a directory"),
        (["SOURCES.md"], "SOURCES.md has no known format. Known formats: ronde top"),
        ([GRAPH], "is a graph of NCCL's search, not a topology. Give it the file"),
        (["diff", GRAPH, B200], "a graph of NCCL's search"),
        (["--root", "nccl_topo"], "a directory that contains sys, got nccl_topo"),
        ([PERLMUTTER, "--matrix", "--json"], "--json cannot be combined with --matrix"),
        (["--bogus"], "unknown option --bogus. Type: ronde topo --help"),
        (["diff", PERLMUTTER], "is required"),
    ],
)
def test_bad_input_is_refused(words, message, capsys):
    assert message in refusal(capsys, "topo", *words)


@pytest.mark.parametrize(
    "verb", [[], ["show"], ["lint"], ["diff"], ["place"], ["limit"], ["log"]]
)
def test_every_verb_has_help(verb, capsys):
    assert main(["topo", *verb, "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: ronde topo")
