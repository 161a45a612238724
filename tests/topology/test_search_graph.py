from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from tests.topology.hostile import bad_inputs, check_harmless

from ronde.errors import UsageError
from ronde.topology.graph import Level
from ronde.topology.probes.base import Saved
from ronde.topology.search_graph import (
    SearchGraph,
    check_search_graphs,
    read_search_graphs,
    recognises_search_graph,
)

SAMPLES = Path(__file__).parent / "samples"
AZURE = SAMPLES / "nccl_graph" / "azure_ncv4_graph.xml"
B200 = SAMPLES / "nccl_graph" / "hgx_b200_8x_vastai_nccl2.27.3.xml"

GRAPH = (
    'id="0" pattern="4" crossnic="1" nchannels="1" speedintra="12.5" speedinter="6" '
    'typeintra="NVL" typeinter="PIX" samechannels="0"'
)


def read(data: bytes) -> tuple[SearchGraph, ...]:
    return read_search_graphs(Saved("a.xml", data))


def graph(inside: str, attributes: str = GRAPH) -> tuple[SearchGraph, ...]:
    text = f'<graphs version="1"><graph {attributes}>{inside}</graph></graphs>'
    return read(text.encode())


def channel(*names: str) -> str:
    """Return a channel of elements such as ``gpu 0x1f``."""
    elements = (name.split() for name in names)
    return (
        "<channel>"
        + "".join(f'<{tag} dev="{dev}"/>' for tag, dev in elements)
        + "</channel>"
    )


# Of the files: id, pattern, nchannels, speedintra, typeintra, typeinter, same channels,
# and GPUs of a channel.
@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (
            "azure_ncv4_graph.xml",
            [
                (0, 4, 2, 12, "SYS", "PIX", False, 4),
                (1, 1, 4, 12, "SYS", "PIX", False, 4),
                (2, 3, 4, 12, "SYS", "PIX", False, 4),
            ],
        ),
        (
            "azurehpc_nc48v4_graph.xml",
            [
                (0, 4, 2, 12, "SYS", "PIX", False, 2),
                (1, 1, 4, 12, "SYS", "PIX", False, 2),
                (2, 3, 4, 12, "SYS", "PIX", False, 2),
            ],
        ),
        (
            "hgx_b200_8x_vastai_nccl2.27.3.xml",
            [
                (0, 4, 16, 45, "NVL", "PIX", True, 8),
                (1, 1, 16, 40, "NVL", "PIX", True, 8),
                (4, 6, 0, 0, "LOC", "LOC", False, 0),
                (2, 3, 0, 0, "LOC", "LOC", False, 0),
                (3, 5, 8, 80, "NVL", "PIX", False, 1),
            ],
        ),
    ],
)
def test_samples_are_read_as_they_stand(file: str, expected: list[tuple[object, ...]]):
    saved = Saved(file, (SAMPLES / "nccl_graph" / file).read_bytes())
    graphs = read_search_graphs(saved)

    assert recognises_search_graph(saved)
    for found, (*head, same, num_gpus) in zip(graphs, expected, strict=True):
        assert [
            *(found.id, found.pattern, found.num_channels, found.intra_gb_per_s),
            *(found.intra_type, found.inter_type),
        ] == head
        assert found.has_same_channels is same
        assert not found.is_crossing_nics
        assert [len(channel) for channel in found.channels] == (
            [num_gpus] * found.num_channels
        )
    assert check_search_graphs(graphs) == ()


def test_nccls_estimate_of_a_ring():
    ring, *_ = read(B200.read_bytes())

    assert ring.pattern_name == "ring"
    assert (ring.num_channels, ring.intra_gb_per_s) == (16, 45)
    assert ring.channels[0] == tuple(f"gpu/{dev}" for dev in range(8))


def test_devices_are_hexadecimal_and_may_be_of_another_host():
    (found,) = graph(channel("net 0", "gpu 0x1f", "gpu 10", "net 1"))
    assert found.channels == (("net/0", "gpu/31", "gpu/16", "net/1"),)
    assert found.inter_gb_per_s == 6
    assert found.is_crossing_nics

    # The number of the host stands in the highest byte.
    (found,) = graph(channel("gpu 0x200000000000003"))
    assert found.channels == (("gpu/2-3",),)


@pytest.mark.parametrize(
    ("inside", "rule", "what"),
    [
        (
            channel("gpu 0", "gpu 1") + channel("gpu 0", "gpu 1"),
            "channel-count",
            "nchannels is 1, and 2 channels are listed",
        ),
        ("", "channel-count", "nchannels is 1, and 0 channels are listed"),
        (channel("gpu 0", "gpu 1", "gpu 0"), "broken-ring", "0 has gpu/0 twice"),
        (
            channel("net 0", "gpu 0", "net 0", "net 1"),
            "broken-ring",
            "has 3 network adapters",
        ),
    ],
)
def test_what_nccl_would_follow_into_an_error(inside: str, rule: str, what: str):
    (finding,) = check_search_graphs(graph(inside))

    assert finding.rule == rule
    assert finding.severity is Level.ERROR
    assert finding.element == "line 1"
    assert what in finding.what


def test_a_channel_lacks_a_gpu_of_another():
    attributes = GRAPH.replace('nchannels="1"', 'nchannels="2"')
    inside = channel("gpu 0", "gpu 1") + channel("gpu 1")

    (finding,) = check_search_graphs(graph(inside, attributes))

    assert finding.what == "Graph 0 (ring): Channel 1 lacks gpu/0."


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<system/>", "a.xml must begin with the element graphs, got system"),
        (
            "<graphs>\n<graph id='0'/></graphs>",
            "pattern of graph must be a whole number, got none at line 2 of a.xml",
        ),
        (
            f"<graphs><graph {GRAPH.replace('12.5', 'inf')}/></graphs>",
            "speedintra of graph must be a number of GB/s, got 'inf'",
        ),
        (
            f"<graphs><graph {GRAPH}>\n{channel('gpu x')}</graph></graphs>",
            "dev of gpu must be a hexadecimal number, got 'x' at line 2",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, message: str):
    with pytest.raises(UsageError, match=message):
        read(text.encode())


def test_hostile_files_are_refused_or_read():
    def read_and_check(data: bytes) -> None:
        check_search_graphs(read(data))

    inputs = bad_inputs(AZURE.read_bytes(), root="graphs", tag="channel")
    assert check_harmless(read_and_check, inputs) > 60


def test_other_forms_are_not_recognised():
    for path in SAMPLES.glob("*/*.xml"):
        is_graph = path.parent.name == "nccl_graph"
        assert recognises_search_graph(Saved("x", path.read_bytes())) is is_graph


@given(st.integers(1, 12).flatmap(lambda n: st.permutations(range(n))), st.data())
def test_only_permutations_are_rings(order: list[int], data: st.DataObject):
    names = [f"gpu 0x{dev:x}" for dev in order]
    assert check_search_graphs(graph(channel(*names))) == ()

    # One more of any of them is one too many.
    again = data.draw(st.sampled_from(names))
    at = data.draw(st.integers(0, len(names)))
    (finding,) = check_search_graphs(graph(channel(*names[:at], again, *names[at:])))
    assert finding.rule == "broken-ring"
