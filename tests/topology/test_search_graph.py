from pathlib import Path

import pytest
from tests.topology.hostile import bad_inputs, check_harmless

from ronde.errors import UsageError
from ronde.topology import (
    Saved,
    SearchGraph,
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


# Of the files: id, pattern, nchannels, speedintra, typeintra, typeinter
# and GPUs of a channel.
@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (
            "azure_ncv4_graph.xml",
            [
                (0, "ring", 2, 12, "SYS", "PIX", 4),
                (1, "balanced tree", 4, 12, "SYS", "PIX", 4),
                (2, "tree", 4, 12, "SYS", "PIX", 4),
            ],
        ),
        (
            "azurehpc_nc48v4_graph.xml",
            [
                (0, "ring", 2, 12, "SYS", "PIX", 2),
                (1, "balanced tree", 4, 12, "SYS", "PIX", 2),
                (2, "tree", 4, 12, "SYS", "PIX", 2),
            ],
        ),
        (
            "hgx_b200_8x_vastai_nccl2.27.3.xml",
            [
                (0, "ring", 16, 45, "NVL", "PIX", 8),
                (1, "balanced tree", 16, 40, "NVL", "PIX", 8),
                (4, "direct to the network's switches", 0, 0, "LOC", "LOC", 0),
                (2, "tree", 0, 0, "LOC", "LOC", 0),
                (3, "NVLS", 8, 80, "NVL", "PIX", 1),
            ],
        ),
    ],
)
def test_samples_are_read_as_they_stand(file: str, expected: list[tuple[object, ...]]):
    saved = Saved(file, (SAMPLES / "nccl_graph" / file).read_bytes())
    graphs = read_search_graphs(saved)

    assert recognises_search_graph(saved)
    for found, (*head, num_gpus) in zip(graphs, expected, strict=True):
        assert [*found[:4], found.intra_type, found.inter_type] == head
        assert [len(channel) for channel in found.channels] == (
            [num_gpus] * found.num_channels
        )


def test_nccls_estimate_of_a_ring():
    ring, *_ = read(B200.read_bytes())

    assert ring.pattern == "ring"
    assert (ring.num_channels, ring.intra_gb_per_s) == (16, 45)
    assert ring.channels[0] == tuple(f"gpu/{dev}" for dev in range(8))


def test_devices_are_hexadecimal_and_may_be_of_another_host():
    (found,) = graph(channel("net 0", "gpu 0x1f", "gpu 10", "net 1"))
    assert found.channels == (("net/0", "gpu/31", "gpu/16", "net/1"),)
    assert found.inter_gb_per_s == 6

    # The number of the host stands in the highest byte.
    (found,) = graph(channel("gpu 0x200000000000003"))
    assert found.channels == (("gpu/2-3",),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<system/>", "a.xml must begin with the element graphs, got system"),
        (
            "<graphs>\n<graph id='0'/></graphs>",
            "a.xml, line 2: pattern of graph must be a whole number, got 'none'",
        ),
        (
            f"<graphs><graph {GRAPH.replace('12.5', 'inf')}/></graphs>",
            "speedintra of graph must be a number of GB/s, got 'inf'",
        ),
        (
            f"<graphs><graph {GRAPH}>\n{channel('gpu x')}</graph></graphs>",
            "line 2: dev of gpu must be a hexadecimal number, got 'x'",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, message: str):
    with pytest.raises(UsageError, match=message):
        read(text.encode())


def test_hostile_files_are_refused_or_read():
    inputs = bad_inputs(AZURE.read_bytes(), root="graphs", tag="channel")
    assert check_harmless(read, inputs) > 60


def test_other_forms_are_not_recognised():
    for path in SAMPLES.glob("*/*.xml"):
        is_graph = path.parent.name == "nccl_graph"
        assert recognises_search_graph(Saved("x", path.read_bytes())) is is_graph
