"""The command ``ronde topo``: sources in, one of several forms out."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.limits import HANG_S

from ronde.errors import UsageError
from ronde.topology import read_file, read_saved, read_topology

SAMPLES = Path(__file__).parent / "samples"
PERLMUTTER = "nccl_topo/perlmutter_a100_4x_slingshot_nccl2.29.7.xml"
GRAPH = "nccl_graph/azure_ncv4_graph.xml"
B200 = "nccl_topo/hgx_b200_8x_vastai_nccl2.27.3.xml"


def topo(*words, stdin=b"", cwd=SAMPLES):
    return subprocess.run(
        [sys.executable, "-m", "ronde", "topo", *words],
        input=stdin,
        capture_output=True,
        timeout=HANG_S,
        cwd=cwd,
        check=False,
    )


def reported(*words, **options):
    done = topo(*words, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


def refused(*words, **options):
    done = topo(*words, **options)
    assert done.returncode == 64
    assert done.stdout == b""
    text = done.stderr.decode()
    assert text.startswith("ronde: ")
    assert "Traceback" not in text
    return text


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


def test_json_is_read_again_and_says_the_same(tmp_path):
    text = reported(B200, "--json")
    path = tmp_path / "node.json"
    path.write_text(text)
    topology = read_topology(text.encode(), "node")
    assert [len(h.gpus) for h in topology.hosts] == [8]
    text_of_tree = reported(B200)
    assert reported(str(path)) == text_of_tree
    assert reported("-", stdin=text.encode()) == text_of_tree


def test_each_source_is_a_host():
    text = reported(PERLMUTTER, B200, B200)
    assert text.startswith("perlmutter_a100_4x_slingshot_nccl2.29.7: 4 NUMA nodes")
    assert "2 hosts alike (hgx_b200_8x_vastai_nccl2.27.3, 2 times): " in text


def test_paths_have_kind_and_bandwidth():
    assert "NVL 80.0" in reported(PERLMUTTER, "--paths")


def test_a_saved_tree_is_read_like_the_machine(tmp_path):
    node = tmp_path / "sys/devices/system/node/node3"
    node.mkdir(parents=True)
    (node / "cpulist").write_text("0-1\n")
    (node / "cpumap").write_text("3\n")
    (node.parent / "online").write_text("3\n")
    cpu = tmp_path / "sys/devices/system/cpu"
    cpu.mkdir()
    (cpu / "online").write_text("0-1\n")
    assert "NUMA node 3" in reported("--root", str(tmp_path))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["absent.xml"], "cannot read absent.xml: No such file or directory"),
        (["."], "cannot read .: Is a directory"),
        (["SOURCES.md"], "SOURCES.md has no known format. Known formats: ronde top"),
        (["SOURCES.md"], "Slurm topology.conf."),
        (
            [GRAPH],
            "is a graph of NCCL's search, not a topology. Give it the file",
        ),
        (["diff", GRAPH, B200], "a graph of NCCL's search"),
        (["--root", "nccl_topo"], "a directory that contains sys, got nccl_topo"),
        ([PERLMUTTER, "--matrix", "--json"], "--json cannot be combined with --matrix"),
        (["--bogus"], "unknown option --bogus. Type: ronde topo --help"),
        (["diff", PERLMUTTER], "must be given"),
    ],
)
def test_bad_input_is_one_sentence(words, said):
    assert said in refused(*words)


def test_graphs_of_nccls_search_are_refused_by_name():
    graphs = list(SAMPLES.glob("nccl_graph/*"))
    assert len(graphs) == 3
    for path in graphs:
        with pytest.raises(UsageError, match="a graph of NCCL's search"):
            read_file(read_saved(str(path)))


def test_an_empty_source_is_refused():
    assert "standard input is empty" in refused("-", stdin=b"")


def test_json_of_something_else_is_refused():
    said = refused("-", stdin=json.dumps({"form": "other"}).encode())
    assert "is JSON, but not a ronde topology" in said


@pytest.mark.parametrize(
    "verb", [[], ["show"], ["lint"], ["diff"], ["place"], ["limit"], ["log"]]
)
def test_help_is_there_for_every_verb(verb):
    assert reported(*verb, "--help").startswith("usage: ronde topo")
