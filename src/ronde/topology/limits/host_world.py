"""From a host to a world of hosts like it."""

from collections.abc import Collection, Sequence
from itertools import permutations
from typing import NamedTuple

from ronde.topology.graph import UNKNOWN, GpuDevice, HostTopology
from ronde.topology.limits.formulas import Layout
from ronde.topology.limits.gpu_mesh import mesh_of
from ronde.topology.limits.link_rates import Figures, pci_figures
from ronde.topology.limits.network_rates import network_rates
from ronde.topology.limits.world import Islands, Rate, World
from ronde.topology.paths.rules import LATEST
from ronde.topology.paths.speeds import smp_gb_per_s
from ronde.topology.probes.sysfs_tree import FORM as SYSFS

_SM_OF_NVLS = 90


class Given(NamedTuple):
    """Rates that the user knows better than the source.

    Attributes:
        network_gb_per_s: All network links of a node together; None looks at the host.
        gpu_gb_per_s: The way out of each GPU; None looks at the host.
        interface: The network interface that carries all bytes; empty for those that
            NCCL takes.
    """

    network_gb_per_s: float | None = None
    gpu_gb_per_s: float | None = None
    interface: str = ""


_NOTHING_GIVEN = Given()


def world_of(
    host: HostTopology,
    num_nodes: int,
    ranks_per_node: int,
    given: Given = _NOTHING_GIVEN,
) -> World:
    """Return the world of ranks on nodes that are like a host.

    Where a node has GPUs, rank i of it has GPU i; more ranks than GPUs share them, and
    what carries the bytes between those is not known.

    Args:
        host: One of the nodes.
        num_nodes: At least 1.
        ranks_per_node: At least 1.
        given: What the host is not asked.
    """
    layout = Layout(num_nodes * ranks_per_node, num_nodes, ranks_per_node)
    world = World(layout, has_gpus=bool(host.gpus) or given.gpu_gb_per_s is not None)
    if num_nodes > 1:
        world = with_network(world, host, given)
    if ranks_per_node == 1:
        return world
    if given.gpu_gb_per_s is not None:
        link = f"as given, {given.gpu_gb_per_s:.4g} GB/s a GPU"
        return world._replace(gpu=Rate(link, given.gpu_gb_per_s), has_nvls=True)
    if not host.gpus:
        why = "what memory carries is to be measured: ronde bench --limit does"
        return world.lacking(why)
    if ranks_per_node > len(host.gpus):
        why = f"{ranks_per_node} ranks share {len(host.gpus)} GPUs"
        return world.lacking(why)
    return with_gpus(world, host, host.gpus[:ranks_per_node])


def slowest(worlds: Sequence[World]) -> World:
    """Return the world where each link is the slowest of all nodes'.

    Args:
        worlds: At least one, of one layout.
    """
    first = worlds[0]
    rates = {
        name: min(
            (rate for world in worlds if (rate := getattr(world, name)) is not None),
            key=_gb_per_s,
            default=None,
        )
        for name in ("network", "path", "gpu", "islands")
    }
    return first._replace(
        **rates,
        has_gpus=any(world.has_gpus for world in worlds),
        has_nvls=all(world.has_nvls for world in worlds),
        unknown=tuple(dict.fromkeys(why for world in worlds for why in world.unknown)),
    )


def _gb_per_s(of: Rate | Islands) -> float:
    return of.way_out.gb_per_s if isinstance(of, Islands) else of.gb_per_s


def with_network(world: World, host: HostTopology, given: Given) -> World:
    """Return a world with the network links of its nodes, which are like a host."""
    if given.network_gb_per_s is not None:
        link = f"as given, {given.network_gb_per_s:.4g} GB/s"
        return world._replace(network=Rate(link, given.network_gb_per_s))
    rates = network_rates(host, given.interface)
    world = world._replace(network=rates.network, path=rates.path)
    return world.lacking(rates.remark)


def with_gpus(world: World, host: HostTopology, used: Sequence[GpuDevice]) -> World:
    """Return a world with the links of its nodes' GPUs, which are like a host's.

    Args:
        world: What is known so far.
        host: One of the nodes.
        used: Its GPUs that have a rank, at least one.
    """
    mesh = mesh_of(host, used)
    if len(mesh.islands) > 1:
        return _with_pcie(world, host, used, mesh.islands)
    if not mesh.slowest.gb_per_s:
        return world.lacking("the source does not tell how fast a GPU's links are")
    # AMD's files have the number of units where others have the capability.
    are_able = all(gpu.sm >= _SM_OF_NVLS and not gpu.gcn for gpu in used)
    return world._replace(gpu=mesh.slowest, has_nvls=mesh.has_switches and are_able)


def _with_pcie(
    world: World,
    host: HostTopology,
    used: Sequence[GpuDevice],
    islands: Sequence[Collection[str]],
) -> World:
    """Return a world where PCIe alone joins some GPUs."""
    sizes = sorted(len(island) for island in islands)
    least = _slowest_pcie(host, used)
    if not _tells_links(host, used):
        why = "the source does not tell whether NVLink joins the GPUs"
    elif least is None:
        why = "the source does not tell the PCIe link of a GPU"
    elif sizes[0] == 1:
        return world._replace(gpu=_alone(host, used, least))
    elif sizes[0] == sizes[-1]:
        return world._replace(islands=Islands(sizes[0], _together(least, sizes[0])))
    else:
        why = f"direct links join {sizes[0]} GPUs here and {sizes[-1]} there"
    return world.lacking(why)


def _tells_links(host: HostTopology, gpus: Sequence[GpuDevice]) -> bool:
    """Say whether a source would have told of direct links if there were any."""
    if any(gpu.gcn for gpu in gpus):
        return True
    # The kernel tells NVIDIA's models, and nothing of their links.
    is_kernel_alone = all(source.startswith(SYSFS) for source in host.sources)
    is_silent = host.sources and is_kernel_alone
    return not is_silent and any(gpu.sm != UNKNOWN for gpu in gpus)


def _slowest_pcie(host: HostTopology, gpus: Sequence[GpuDevice]) -> Figures | None:
    devices = {device.bus_id: device for device in host.devices}
    links = [devices[gpu.bus_id] for gpu in gpus if gpu.bus_id in devices]
    known = [
        figures for link in links if (figures := pci_figures(link)) and figures.is_told
    ]
    return min(known) if len(known) == len(gpus) else None


def _alone(host: HostTopology, gpus: Sequence[GpuDevice], pcie: Figures) -> Rate:
    """Return the way out of a GPU that has none but PCIe and the processors."""
    bus_ids = {gpu.bus_id for gpu in gpus}
    near = {device.node for device in host.devices if device.bus_id in bus_ids}
    nodes = [node for node in host.numa_nodes if node.number in near]
    between = min(
        (smp_gb_per_s(a, b, LATEST) for a, b in permutations(nodes, 2)),
        default=pcie.practical,
    )
    name = f"PCIe, {pcie.theory:.4g} GB/s a GPU"
    if between < pcie.practical:
        name += f" (NCCL counts {between:g} between processors)"
    return Rate(name, pcie.theory, min(between, pcie.practical))


def _together(pcie: Figures, num_gpus: int) -> Rate:
    theory = pcie.theory * num_gpus
    name = f"PCIe of {num_gpus} GPUs that have direct links, {theory:.4g} GB/s"
    return Rate(name, theory, pcie.practical * num_gpus)
