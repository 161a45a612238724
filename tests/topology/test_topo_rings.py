"""What NCCL's search has found, in words."""

from pathlib import Path

from ronde.render import draw_search
from ronde.topology import Saved, read_search_graphs

SAMPLES = Path(__file__).parent / "samples" / "nccl_graph"


def tell(name):
    path = SAMPLES / name
    return draw_search(read_search_graphs(Saved(name, path.read_bytes())))


def test_orders_are_reported_once_with_their_number():
    assert tell("azurehpc_nc48v4_graph.xml").splitlines()[:3] == [
        "ring (graph 0): 2 channels of 12 GB/s, 24 GB/s together",
        "  between GPUs SYS, to an adapter PIX with 12 GB/s a channel",
        "  gpu/0 gpu/1   2 times",
    ]


def test_what_was_not_found_is_said():
    text = tell("hgx_b200_8x_vastai_nccl2.27.3.xml")
    assert "ring (graph 0): 16 channels of 45 GB/s, 720 GB/s together\n" in text
    assert "tree (graph 2): none found\n" in text
