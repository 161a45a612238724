"""Why ranks could not be aligned, in words."""

from collections.abc import Iterable, Mapping, Sequence

from ronde.errors import UsageError
from ronde.topology.placement.hints import Hint
from ronde.topology.placement.policies import Policy
from ronde.topology.placement.stock import Demand, Stock
from ronde.topology.placement.supply import Supply
from ronde.units import format_size

_NOWHERE = {
    "gpu": "near no node whose cores may be used",
    "nic": "left near no node whose cores may be used",
    "cpu": "not free",
    "memory": "not free on nodes that no other rank has together with further ones",
}


class PlacementError(UsageError):
    """A policy refuses ranks; nothing was started.

    Args:
        message: What is refused and what to do.
        ranks: Local ranks that could not be aligned.
        reasons: Of each resource at fault, a sentence.
    """

    def __init__(
        self, message: str, ranks: Sequence[int], reasons: Sequence[str]
    ) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.reasons = tuple(reasons)


def refusal(
    supply: Supply, policy: Policy, ranks: Sequence[int], reasons: Sequence[str]
) -> PlacementError:
    """Return the error that says which ranks a policy refuses, and why."""
    where = f" on {supply.host}" if supply.host else ""
    who = f"rank {ranks[0]}{where}"
    if len(ranks) > 1:
        who = f"ranks 0-{ranks[-1]}{where} together"
    return PlacementError(
        f"policy must be one that every rank can keep, got {policy} and {who}: "
        f"{'; '.join(reasons)}. Ask for less a rank, or take best-effort.",
        ranks,
        reasons,
    )


def explain(
    supply: Supply, stock: Stock, demand: Demand, policy: Policy
) -> tuple[str, ...]:
    """Return why a demand is not aligned: each resource at fault, and how.

    Args:
        supply: All that there is.
        stock: What was left when the demand was looked at.
        demand: What is asked for.
        policy: Whether one node is the only good answer.
    """
    hints = stock.hints(demand)
    is_one = policy is Policy.SINGLE_NUMA_NODE
    good = {name: _good_masks(of_one, is_one=is_one) for name, of_one in hints.items()}
    faulty = [name for name, masks in good.items() if not masks]
    wants = _wants(supply, demand)
    if not faulty:
        return tuple(
            f"{name}: {wants[name]} {_places(supply, masks)}"
            for name, masks in good.items()
            if None not in masks
        )
    free = stock.free_amounts(demand)
    return tuple(
        f"{name}: {wants[name]} {_obstacle(supply, name, hints[name])}"
        + _free_text(supply, name, free)
        for name in faulty
    )


def _good_masks(hints: Iterable[Hint], *, is_one: bool) -> list[int | None]:
    masks = [hint.mask for hint in hints if hint.is_preferred]
    return [m for m in masks if not is_one or m is None or m.bit_count() == 1]


def _wants(supply: Supply, demand: Demand) -> dict[str, str]:
    names = [supply.gpus[gpu].name or str(gpu) for gpu in demand.gpus]
    gpus = f"GPU{'s' * (demand.num_gpus > 1)}"
    return {
        "gpu": f"{gpus} {', '.join(names)}" if names else f"{demand.num_gpus} {gpus}",
        "nic": f"{demand.num_nics} adapter{'s' * (demand.num_nics > 1)}",
        "cpu": f"{demand.num_cores} core{'s' * (demand.num_cores > 1)}",
        "memory": format_size(demand.memory_bytes),
    }


def _places(supply: Supply, masks: Sequence[int | None]) -> str:
    """Say where something could come from: ``near node 0 or nodes 1+2``."""
    smallest = sorted(
        (mask for mask in masks if mask), key=lambda m: (m.bit_count(), m)
    )
    texts = [_nodes(supply, mask) for mask in smallest]
    shown = " or ".join(texts[:4]) + (" or more" if len(texts) > 4 else "")
    return f"only on {shown}"


def _obstacle(supply: Supply, name: str, hints: Sequence[Hint]) -> str:
    masks = [hint.mask for hint in hints if hint.mask]
    if not masks:
        return _NOWHERE[name]
    smallest = min(masks, key=lambda mask: (mask.bit_count(), mask))
    return f"not on fewer than {_nodes(supply, smallest)}"


def _nodes(supply: Supply, mask: int) -> str:
    numbers = supply.numbers_of(mask)
    if len(numbers) == 1:
        return f"node {numbers[0]}"
    return f"nodes {'+'.join(map(str, numbers))} together"


def _free_text(supply: Supply, name: str, free: Mapping[str, Sequence[int]]) -> str:
    if name not in free:
        return ""
    write = format_size if name == "memory" else str
    texts = [
        f"{write(count)} on node {node.number}"
        for count, node in zip(free[name], supply.nodes, strict=True)
    ]
    return f" (free: {', '.join(texts)})"
