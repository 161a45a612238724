"""Whether NCCL may use the network adapters that are near the GPUs."""

from collections.abc import Iterator, Mapping
from typing import Any

from ronde.check.check import Check, Family, Finding, Severity
from ronde.check.facts import HostFacts
from ronde.check.families.network_names import chooses
from ronde.check.fleet import Fleet

_NEAR = "gpu.near_adapters"
_VIRTUAL = "gpu.is_virtual"
_PORTS = "network.rdma_ports"
_VARIABLES = "network.variables"
_CHOICE = "NCCL_IB_HCA"


def _judge(fleet: Fleet) -> Iterator[Finding]:
    if len(fleet.hosts) < 2:
        return
    for facts in fleet.having(_NEAR, _VIRTUAL, _PORTS, _VARIABLES):
        up = _ports_up(facts)
        setting = facts.values[_VARIABLES].get(_CHOICE, "")
        left_out: dict[str, list[str]] = {}
        far: list[str] = []
        for card, adapters in facts.values[_NEAR].items():
            ports = [port for port in up if port.partition(":")[0] in adapters]
            if not ports:
                far += [card] if up else []
            elif setting and not any(chooses(setting, port) for port in ports):
                left_out.setdefault(", ".join(ports), []).append(card)
        for ports, cards in left_out.items():
            what = (
                f"{_CHOICE}={setting} leaves out {ports}, the nearest to {_name(cards)}"
            )
            yield Finding("gpu-adapter", Severity.WARN, facts.host, what)
        # What a virtual machine shows of the bus is made up.
        if far and not facts.values[_VIRTUAL]:
            what = f"no RDMA adapter that is up shares a PCI bridge with {_name(far)}"
            fix = "nothing, where the host is built so; else move an adapter"
            yield Finding("gpu-adapter", Severity.INFORM, facts.host, what, fix=fix)


def _ports_up(facts: HostFacts) -> list[str]:
    """Return the RDMA ports that NCCL could use; none where it is told not to."""
    variables: Mapping[str, str] = facts.values[_VARIABLES]
    is_off = variables.get("NCCL_IB_DISABLE") == "1"
    if is_off or variables.get("NCCL_NET", "").lower() == "socket":
        return []
    ports: dict[str, Mapping[str, Any]] = facts.values[_PORTS]
    return [name for name, port in ports.items() if port["state"] == "ACTIVE"]


def _name(cards: list[str]) -> str:
    return f"the GPU{'s' * (len(cards) > 1)} at {', '.join(cards)}"


CHECKS = (
    Check(
        id="gpu-adapter",
        family=Family.GPU,
        title="NCCL may use the RDMA adapter that is nearest to each GPU",
        reads="the PCI bridges above GPUs and RDMA adapters in /sys, which ports are "
        f"up, and {_CHOICE}",
        threshold=f"{_CHOICE} leaves in one of the adapters that are the fewest "
        "bridges away; that none shares a bridge with a GPU is only told, and not of "
        "virtual machines",
        source="NCCL's manual: NCCL_IB_HCA, and NCCL_NET_GDR_LEVEL: by default "
        "GPUDirect RDMA goes through PCI bridges alone",
        severity=Severity.WARN,
        fix=f"unset {_CHOICE}, or name the adapter in it; ronde topo shows all ways",
        needs="several hosts, GPUs and RDMA adapters",
        why="Traffic of the GPU goes through the processor, or through another GPU's "
        "adapter, which both then share.",
        facts=(_NEAR, _VIRTUAL, _PORTS, _VARIABLES),
        judge=_judge,
    ),
)
