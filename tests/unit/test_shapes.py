"""What ranks tell each other before tensors of unequal sizes move: how much that is."""

import torch

from ronde.collectives import Communicator, SoloEngine, Work

SIZE = 1024


class Crowd(SoloEngine):
    """One of many ranks that all say the same; counts the bytes that are told."""

    size = SIZE

    def __init__(self):
        super().__init__()
        self.num_bytes = 0

    def gather_numbers(self, own, call):
        gathered = super().gather_numbers(own, call).expand(SIZE, -1)
        self.num_bytes += gathered.numel() * gathered.element_size()
        return gathered

    def all_gather(self, own, out, counts):
        assert out.numel() == sum(counts)
        return Work(None)

    def all_to_all(self, sent, received, plan):
        return Work(None)


def test_what_an_all_gather_exchanges_does_not_grow_with_the_square_of_ranks() -> None:
    """Each rank takes in one row a rank, of the same few numbers at any size."""
    crowd = Crowd()
    communicator = Communicator(crowd)
    tensor = torch.ones(3, 2)
    assert communicator.all_gather(tensor).wait().shape == (3 * SIZE, 2)
    assert crowd.num_bytes <= 32 * SIZE
    crowd.num_bytes = 0
    splits = [3] + [0] * (SIZE - 1)
    received, counts = communicator.all_to_all(tensor, splits).wait()
    assert received.shape == (3 * SIZE, 2)
    assert counts == [3] * SIZE
    assert crowd.num_bytes <= (32 + 8 * SIZE) * SIZE
