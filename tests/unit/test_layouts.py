"""What ranks tell each other before tensors of unequal sizes move: how much that is."""

import torch

from ronde.collectives.layouts import Agreement


def test_what_an_all_gather_exchanges_does_not_grow_with_the_square_of_ranks() -> None:
    """Each rank takes in one row a rank, of the same few numbers at any size."""
    size = 1024
    received = []

    def gather(own):
        gathered = own.expand(size, -1)
        received.append(gathered.numel() * gathered.element_size())
        return gathered

    agreement = Agreement(0, size, gather)
    tensor = torch.ones(3, 2)
    assert agreement.on_rows("all_gather", tensor, None) == [3] * size
    assert sum(received) <= 32 * size
    received.clear()
    assert agreement.on_splits(tensor, [1] * 3 + [0] * 1021, None)[9][:4] == [
        1,
        1,
        1,
        0,
    ]
    assert sum(received) <= (32 + 8 * size) * size
