"""GPUs that a source tells without bus addresses are found among those of others."""

from collections.abc import Mapping, Sequence

from ronde.topology import pci
from ronde.topology.graph import GpuDevice, HostTopology, PciDevice


def rename_elements(host: HostTopology, names: Mapping[str, str]) -> HostTopology:
    """Return a host whose links and relations call elements by other names.

    Args:
        host: Its elements stay as they are.
        names: New names by old ones; what leads to an empty one is left out.
    """

    def ends(each: tuple[str, str]) -> dict[str, str]:
        source, target = (names.get(name, name) for name in each)
        return {"source": source, "target": target}

    links = [each._replace(**ends((each.source, each.target))) for each in host.links]
    relations = [
        each._replace(**ends((each.source, each.target))) for each in host.relations
    ]
    return host._replace(
        links=tuple(each for each in links if each.source and each.target),
        relations=tuple(each for each in relations if each.source and each.target),
    )


def address_gpus(
    hosts: Sequence[HostTopology], remarks: list[str]
) -> list[HostTopology]:
    """Return hosts with all GPUs under their bus addresses, if any source tells those.

    GPUs are found by their UUIDs, else by their numbers, which drivers give by bus
    address. Where a source tells of more or fewer, it cannot be said which they are:
    they are left out.

    Args:
        hosts: What sources say of one host.
        remarks: Gets a sentence for each source whose GPUs are left out.
    """
    known = {gpu.bus_id: gpu for host in hosts for gpu in host.gpus if gpu.bus_id}
    if not known:
        return list(hosts)
    uuids = {gpu.uuid: gpu.bus_id for h in hosts for gpu in h.gpus if gpu.bus_id}
    ordered = sorted(known, key=pci.bus_order)
    return [_address(host, uuids, ordered, remarks) for host in hosts]


def _address(
    host: HostTopology,
    uuids: Mapping[str, str],
    ordered: Sequence[str],
    remarks: list[str],
) -> HostTopology:
    unplaced = [gpu for gpu in host.gpus if not gpu.bus_id]
    if not unplaced:
        return host
    by_number = sorted(host.gpus, key=lambda gpu: gpu.number)
    found: dict[str, str] = {}
    if len(by_number) == len(ordered):
        found = {gpu.name: at for gpu, at in zip(by_number, ordered, strict=True)}
    found |= {g.name: uuids[g.uuid] for g in unplaced if g.uuid and g.uuid in uuids}
    lost = [gpu for gpu in unplaced if gpu.name not in found]
    if lost:
        remarks.append(
            f"{source_of(host)} tells of {len(by_number)} GPUs and the other sources "
            f"of {len(ordered)}; without bus addresses, {len(lost)} of them cannot be "
            "found there and are left out."
        )
    names = {gpu.name: found.get(gpu.name, "") for gpu in unplaced}
    devices = [
        PciDevice(names[gpu.name], node=gpu.node) for gpu in unplaced if names[gpu.name]
    ]
    gpus = [_placed(gpu, names) for gpu in host.gpus if names.get(gpu.name, gpu.bus_id)]
    return rename_elements(host, names)._replace(
        gpus=tuple(gpus), devices=(*host.devices, *devices)
    )


def _placed(gpu: GpuDevice, names: Mapping[str, str]) -> GpuDevice:
    if gpu.bus_id:
        return gpu
    # The PCI device has the node.
    return gpu._replace(bus_id=names[gpu.name], node=PciDevice("").node)


def source_of(host: HostTopology) -> str:
    """Return what to call a host's source in a remark."""
    return host.sources[0] if host.sources else "a source without a name"
