"""Parameters that torch's own wrappers average or shard already."""

import gc
import sys
from collections.abc import Iterable

from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from ronde.errors import UsageError


def _is_sharded(tensor: Tensor) -> bool:
    """Return whether this rank has only a part: FSDP2, tensor parallel."""
    if type(tensor) is Tensor:
        return False
    # Nobody has a DTensor who has not imported it, which takes a while.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def require_whole(tensors: Iterable[Tensor]) -> None:
    """Refuse tensors of which each rank has another part.

    Raises:
        UsageError: One is a DTensor.
    """
    for tensor in tensors:
        if _is_sharded(tensor):
            raise UsageError(
                "a tensor of a collective must not be sharded, got a DTensor of shape "
                f"{list(tensor.shape)}. Give it to_local() or full_tensor()."
            )


def refuse_sharded(named: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse parameters of which each rank has another part.

    Raises:
        UsageError: One is a DTensor, or was flattened by FullyShardedDataParallel.
    """
    for name, parameter in named:
        if _is_sharded(parameter) or getattr(parameter, "_fsdp_flattened", False):
            raise UsageError(
                "the parameters of a DistributedOptimizer must not be sharded, got "
                f"{name}, which FSDP or tensor parallelism has split over the ranks. "
                "They reduce its gradient themselves: use the plain optimizer."
            )


def refuse_averaged(parameters: Iterable[Tensor]) -> None:
    """Refuse parameters of a model that torch's DistributedDataParallel averages.

    It hands out gradients of its own, and both would write to ``grad``. It leaves no
    mark on parameters, hence the search, in programs that use torch.distributed.

    Raises:
        UsageError: There is such a model.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    own = {id(parameter) for parameter in parameters}
    for model in gc.get_objects():
        # Not isinstance(): that asks objects for a __class__ that may run anything.
        if not issubclass(type(model), DistributedDataParallel):
            continue
        if any(id(parameter) in own for parameter in model.parameters()):
            raise UsageError(
                "the model of a DistributedOptimizer must not be wrapped in "
                "DistributedDataParallel, got one that is: both average its gradients. "
                "Give DistributedOptimizer the bare model, or use the plain optimizer."
            )
