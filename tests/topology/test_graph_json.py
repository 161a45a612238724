"""The graph's JSON form: what is written is read, and nothing else is let in."""

import json

import pytest
from hypothesis import given, strategies as st

from ronde.errors import UsageError
from ronde.plain_values import to_plain
from ronde.topology import (
    GpuDevice,
    HostTopology,
    Link,
    LinkKind,
    NetPort,
    NetworkSwitch,
    NumaNode,
    PciDevice,
    Relation,
    Topology,
    read_topology,
    write_topology,
)

TEXT = st.text(max_size=5)
NUMBER = st.integers(-1, 1 << 40)
NUMA = st.builds(
    NumaNode, number=NUMBER, cpus=st.lists(NUMBER, max_size=3).map(tuple), vendor=TEXT
)
LINK = st.builds(Link, st.sampled_from(LinkKind), TEXT, TEXT, NUMBER, st.floats(0, 1e6))
PORT = st.builds(NetPort, TEXT, is_up=st.booleans())
HOST = st.builds(
    HostTopology,
    name=TEXT,
    devices=st.just(()),
    numa_nodes=st.lists(NUMA, max_size=2).map(tuple),
    gpus=st.lists(st.builds(GpuDevice, TEXT, NUMBER), max_size=2).map(tuple),
    ports=st.lists(PORT, max_size=2).map(tuple),
    links=st.lists(LINK, max_size=2).map(tuple),
    relations=st.lists(st.builds(Relation, TEXT, TEXT), max_size=2).map(tuple),
)
ONE = Topology((HostTopology("a", devices=(PciDevice("b"), PciDevice("c", "b"))),))


@given(st.lists(HOST, max_size=2))
def test_what_is_written_is_read(hosts):
    topology = Topology(tuple(hosts))
    assert read_topology(write_topology(topology).encode(), "x") == topology


def test_a_file_that_is_cut_is_refused_wherever_it_is_cut():
    whole = write_topology(ONE).encode()
    for end in range(len(whole) - 2):
        with pytest.raises(UsageError, match=r"node\.json"):
            read_topology(whole[:end], "node.json")


def changed(**fields):
    values = json.loads(write_topology(ONE))
    values["hosts"][0] |= fields
    return json.dumps(values).encode()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"[]", "is JSON, but not a ronde topology"),
        (b'{"form": "ronde-topology", "version": 2}', "has format version 2, but"),
        (b'{"form": "ronde-topology", "version": 3}', "the fields"),
        (b"[" * 100_000, "not valid JSON"),
        (changed(name=5), r"hosts\[0\]\.name must be str, got 5"),
        (changed(gpus=[{}]), r"hosts\[0\]\.gpus\[0\] must have the fields"),
        (changed(extra=1), "must have the fields"),
        (
            changed(
                links=[to_plain(Link(LinkKind.C2C, "a", "b", 1)) | {"kind": "magic"}]
            ),
            "must be one of nvlink, .*, got 'magic'",
        ),
        (changed(devices=[to_plain(PciDevice("b"))] * 2), "must be listed once"),
        (
            changed(devices=[to_plain(PciDevice(*"ab")), to_plain(PciDevice(*"ba"))]),
            "after their parents, got 'a'",
        ),
        (
            changed(
                devices=[to_plain(PciDevice(f"{n}", f"{n - 1}")) for n in range(300)]
            ),
            "nested at most 256 deep",
        ),
    ],
)
def test_what_is_no_topology_is_refused(data, said):
    with pytest.raises(UsageError, match=said):
        read_topology(data, "node.json")


@pytest.mark.parametrize(
    ("switches", "said"),
    [
        (
            [NetworkSwitch("a", ("b",)), NetworkSwitch("b", ("a",))],
            "a cycle of switches",
        ),
        ([NetworkSwitch("a"), NetworkSwitch("a")], "a switch more than once"),
        ([NetworkSwitch(f"{n}", (f"{n + 1}",)) for n in range(300)], "at most 256"),
    ],
)
def test_switches_in_no_order_are_refused(switches, said):
    text = write_topology(Topology((), tuple(switches)))
    with pytest.raises(UsageError, match=said):
        read_topology(text.encode(), "x")
