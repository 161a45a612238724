"""Horovod's reduce-scatter of tensors: one or a group, synchronous and with handles.

As in ``reductions``, save that ``op`` is Average (default) or Sum, and that dimension 0
is split over the ranks: where the size of the set does not divide it, the first ranks
take one row more.
"""

from collections.abc import Sequence

from torch import Tensor

from ronde.collectives import Work
from ronde.collectives.torch_modes import outside_compiler
from ronde.data_parallel import Compression, Compressor
from ronde.torch.autograd import ReducescatterFunction, carry_out, start
from ronde.torch.operators import Average
from ronde.torch.process_sets import ProcessSet, global_process_set
from ronde.torch.session import current_session
from ronde.torch.works import Only


@outside_compiler
def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce over all ranks and return this rank's rows of dimension 0."""
    scatter = ReducescatterFunction(
        op, name or "", process_set, prescale_factor, postscale_factor
    )
    wire, context = compression.compress(tensor)
    return compression.decompress(carry_out(scatter, (wire,))[0], context)


@outside_compiler
def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start ``reducescatter``."""
    scatter = ReducescatterFunction(
        op, name or "", process_set, prescale_factor, postscale_factor
    )
    return current_session().handles.add(Only(start(scatter, (tensor,))))


@outside_compiler
def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reduce several tensors and return this rank's rows of each."""
    group = ReducescatterFunction(
        op, name or "", process_set, prescale_factor, postscale_factor, is_group=True
    )
    compressed = [compression.compress(tensor) for tensor in tensors]
    if not compressed:
        return []
    scattered = carry_out(group, [wire for wire, _ in compressed])
    return [
        compression.decompress(tensor, context)
        for tensor, (_, context) in zip(scattered, compressed, strict=True)
    ]


@outside_compiler
def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start ``grouped_reducescatter``; the handle's result is a tuple."""
    group = ReducescatterFunction(
        op, name or "", process_set, prescale_factor, postscale_factor, is_group=True
    )
    work = start(group, tensors) if tensors else Work[tuple[Tensor, ...]](())
    return current_session().handles.add(work)
