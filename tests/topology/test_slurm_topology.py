"""Slurm's topology.conf becomes switches between hosts."""

import re

import pytest
from tests.commands import refusal
from tests.topology.hostile import Hostile, bad_inputs, check_harmless

from ronde.cli import main
from ronde.errors import UsageError
from ronde.topology import (
    SLURM_TOPOLOGY,
    NetworkSwitch,
    Saved,
    Topology,
    lint_switches,
    read_file,
    read_topology,
    write_topology,
)

PROBE = SLURM_TOPOLOGY
SHOWN = """\
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=node[01-03]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=node[04-06]
SwitchName=spine Level=1 LinkSpeed=1 Nodes=node[01-06] Switches=leaf[1-2]
"""


def read(data: bytes | str) -> Topology:
    data = data.encode() if isinstance(data, str) else data
    return PROBE.read(Saved("topology.conf", data))


TREE = """\
# Two leaves and a spine
SwitchName=leaf1 Nodes=node[01-03,7] LinkSpeed=400G
switchname=leaf2 nodes="gpu[0-1],login"   # names in any case
SWITCHNAME=spine Switches=leaf[1-2] \\
    LinkSpeed=800G
"""


def test_a_tree():
    topology = read(TREE)
    assert topology == Topology(
        switches=(
            NetworkSwitch("leaf1", (), ("node01", "node02", "node03", "node7"), "400G"),
            NetworkSwitch("leaf2", (), ("gpu0", "gpu1", "login")),
            NetworkSwitch("spine", ("leaf1", "leaf2"), (), "800G"),
        )
    )
    assert PROBE.recognises(Saved("it", TREE.encode()))
    assert read_topology(write_topology(topology).encode(), "it") == topology


def test_blocks_are_switches():
    topology = read(
        "BlockName=b1 Nodes=n[1-2]\nBlockName=b2 Nodes=n[3-4]\nBlockSizes=2,4\n"
    )
    assert topology.switches == (
        NetworkSwitch("b1", (), ("n1", "n2")),
        NetworkSwitch("b2", (), ("n3", "n4")),
    )


def test_a_host_at_two_leaves_is_a_finding_and_switches_alone_are_judged(
    tmp_path, capsys
):
    file = tmp_path / "topology.conf"
    file.write_text("SwitchName=s1 Nodes=n[1-4]\nSwitchName=s2 Nodes=n[3-6]\n")
    assert main(["topo", "lint", str(file)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("2 switches with 6 hosts: 1 warning.\n")
    assert "WARNING host-at-two-switches: s1, s2\n  seen Both list n3, n4.\n" in out
    file.write_text(TREE)
    assert main(["topo", "lint", str(file)]) == 0
    assert "3 switches with 7 hosts: nothing found." in capsys.readouterr().out
    # Above leaves, scontrol repeats their hosts.
    assert lint_switches(read(SHOWN).switches) == ()
    nothing = write_topology(Topology())
    (tmp_path / "nothing.json").write_text(nothing)
    said = refusal(capsys, "topo", "lint", str(tmp_path / "nothing.json"))
    assert "the sources contain no host and no switch" in said


def test_what_scontrol_shows():
    """There a switch of a higher level tells the hosts below all its switches."""
    conf = (
        "SwitchName=leaf1 Nodes=node[01-03] LinkSpeed=1\n"
        "SwitchName=leaf2 Nodes=node[04-06] LinkSpeed=1\n"
        "SwitchName=spine Switches=leaf[1-2] LinkSpeed=1\n"
    )
    assert PROBE.recognises(Saved("it", SHOWN.encode()))
    assert read(SHOWN) == read(conf)


CIRCLE = """\
SwitchName=x Switches=a
SwitchName=a Switches=l,b
SwitchName=b Switches=a
SwitchName=l Nodes=n
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("SwitchName=a Nodes=n[1-", "line 1: brackets must be closed"),
        ("SwitchName=a Nodes=n[3-1]", "line 1: a range must be ascending"),
        ("SwitchName=a Nodes=n[1-99999]", "line 1: a list must name at most"),
        ("SwitchName=a Nodes=n1,n2,n1", "line 1: a must have each name once, got 'n1'"),
        (
            "SwitchName=a\n\nSwitchName=a",
            "line 3: a must be defined once, as it is in line 1",
        ),
        (
            "SwitchName=a Switches=b",
            "line 1: switches below a must be defined, got 'b'",
        ),
        (CIRCLE, "has a cycle of switches: 'a > b > a'"),
        ("SwitchName=a Speed=1", "line 1: a line must have SwitchName with"),
        ("SwitchName=a Nodes=n1 Nodes=n2", "line 1: a line must be names with a value"),
        ("# \\\n\nSwitchName=a \\\n Nodes=n1,n1", "line 3: a must have each name once"),
        ("# nothing\nBlockSizes=4", "defines no switches and no blocks"),
    ],
)
def test_what_slurm_would_not_take_is_refused_with_its_line(text, message):
    with pytest.raises(UsageError, match=f"^topology.conf.* {re.escape(message)}"):
        read(text)


def test_harm_does_none():
    assert check_harmless(read, bad_inputs(TREE.encode())) > 10


@pytest.mark.parametrize(
    "text",
    [
        "".join(f"SwitchName=s{n} Nodes=n[1-65536]\n" for n in range(1000)),
        "SwitchName=s0\n"
        + "".join(f"SwitchName=s{n + 1} Switches=s{n}\n" for n in range(20_000)),
        "\\\n" * 1_000_000,
        "SwitchName=a " + " " * 5_000_000 + "x",
    ],
    ids=range(4),
)
def test_much_of_it_takes_no_time(text):
    check_harmless(read, iter([Hostile("much", text.encode())]))


def test_a_yaml_file_is_refused_by_its_name():
    text = "---\n- topology: fabric\n  tree:\n    switches:\n      - switch: leaf\n"
    with pytest.raises(UsageError, match="Give it the output of: scontrol show"):
        read_file(Saved("topology.yaml", text.encode()))
