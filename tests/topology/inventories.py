"""What a host has for ranks, in a few numbers."""

from ronde.topology import Core, Inventory, NearDevice, Nearness, RankPlacement


def inventory(
    cores: dict[int, int],
    *,
    gpus: tuple[int, ...] = (),
    nics: int = 0,
    near: dict[tuple[int, int], Nearness] | None = None,
) -> Inventory:
    """Return one with so many cores a node, of two threads, and devices by node."""
    numbered = [node for node, count in cores.items() for _ in range(count)]
    return Inventory(
        tuple(Core((n, n + len(numbered)), node) for n, node in enumerate(numbered)),
        gpus=tuple(NearDevice(str(n), node) for n, node in enumerate(gpus)),
        nics=tuple(f"mlx5_{n}" for n in range(nics)),
        nearness=near or {},
        host="n1",
    )


def homes(places: tuple[RankPlacement, ...]) -> list[set[int]]:
    """Return the memory nodes of each rank's cores."""
    return [{core.node for core in each.cores} for each in places]
