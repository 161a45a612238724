"""Which GPU each rank of a host is to use, and the variables that say so."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ronde.errors import UsageError
from ronde.topology.machine import VISIBLE_DEVICES, Gpu, select_gpus


class GpuView(StrEnum):
    """Which GPUs a rank sees."""

    ALL = "all"
    """All of its host's; ``LOCAL_RANK`` says which is its own, as under torchrun."""

    ONE = "one"
    """Its own alone, as device 0."""


@dataclass(frozen=True, slots=True)
class RankDevice:
    """A rank's GPU.

    Attributes:
        gpu: The one it is expected to use; None where it has none of its own.
        env: Variables that make it so.
    """

    gpu: Gpu | None
    env: dict[str, str]


def choose_gpus(
    gpus: Sequence[Gpu], wanted: Sequence[str], said_at: str
) -> tuple[Gpu, ...]:
    """Return the GPUs that a host's ranks may use, in the order that is wanted.

    Args:
        gpus: Those that a program there sees.
        wanted: Positions among them, or what else names one; empty for all.
        said_at: Where that is wanted, for the message.

    Raises:
        UsageError: One of them is not there, or is wanted twice.
    """
    chosen: list[Gpu] = []
    for item in wanted:
        is_position = item.isdecimal() and int(item) < len(gpus)
        found = gpus[int(item)] if is_position else None
        if not item.isdecimal():
            found = next(iter(select_gpus(gpus, item)), None)
        if found is None or found in chosen:
            raise UsageError(
                f"gpus must name each GPU that the host lets be used, of {len(gpus)} "
                f"counted from 0, once, got {item!r} ({said_at}). Correct it."
            )
        chosen.append(found)
    return tuple(chosen) if wanted else tuple(gpus)


def assign_gpus(
    gpus: Sequence[Gpu], num_ranks: int, view: GpuView, *, is_choice: bool, host: str
) -> tuple[RankDevice, ...]:
    """Give each rank of a host the GPU of its local rank.

    Where there are more ranks than GPUs no rank has one of its own: they may share, or
    use none.

    Args:
        gpus: Those that the host's ranks may use.
        num_ranks: Ranks of the host.
        view: Which of them each rank sees.
        is_choice: A program there would see more than these.
        host: Its name, for the message.

    Raises:
        UsageError: Each rank is to see one, and there are fewer.
    """
    if view is GpuView.ONE:
        if num_ranks > len(gpus):
            raise UsageError(
                f"--gpu-view one must have a GPU for each rank of a host, got "
                f"{num_ranks} ranks and {len(gpus)} GPUs on {host}. Start fewer ranks "
                "there, or leave --gpu-view out: all ranks see all GPUs then, and may "
                "share."
            )
        return tuple(RankDevice(gpu, _seeing([gpu])) for gpu in gpus[:num_ranks])
    env = _seeing(gpus) if is_choice and gpus else {}
    if num_ranks > len(gpus):
        return (RankDevice(None, env),) * num_ranks
    return tuple(RankDevice(gpu, env) for gpu in gpus[:num_ranks])


def _seeing(gpus: Sequence[Gpu]) -> dict[str, str]:
    maker = gpus[0].maker
    env = {VISIBLE_DEVICES[maker]: ",".join(gpu.visible_as for gpu in gpus)}
    if maker == "nvidia":
        # Our numbers are those of the bus; CUDA would count the fastest first.
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return env
