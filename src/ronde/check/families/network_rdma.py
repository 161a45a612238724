"""RDMA ports, InfiniBand's and RoCE's: up, as fast as elsewhere, and within reach."""

from collections.abc import Iterator, Mapping
from typing import Any

from ronde.check.check import Check, Family, Finding, Severity
from ronde.check.facts import HostFacts
from ronde.check.families.network_interfaces import find_slower
from ronde.check.families.network_names import chooses
from ronde.check.fleet import Fleet

_PORTS = "network.rdma_ports"
_ADAPTERS = "network.rdma_adapters"
_FILES = "network.rdma_device_files"
_LIBRARY = "network.has_rdma_library"
_VARIABLES = "network.variables"
_NUM_GPUS = "host.num_gpus"
_CHOICE = "NCCL_IB_HCA"
_INDEX = "NCCL_IB_GID_INDEX"
_UP = ("ACTIVE", "LinkUp")
_MEANT_DOWN = ("Disabled", "Sleep")
_ROCE_2 = "RoCE v2"
_LINK_LOCAL, _IPV4_LOCAL = "fe80:", ":ffff:a9fe:"

Port = Mapping[str, Any]


def _chosen(facts: HostFacts) -> dict[str, Port]:
    """Return the ports that NCCL would look at."""
    variables: Mapping[str, str] = facts.values[_VARIABLES]
    if variables.get("NCCL_IB_DISABLE") == "1":
        return {}
    if variables.get("NCCL_NET", "").lower() == "socket":
        return {}
    setting = variables.get(_CHOICE, "")
    ports: dict[str, Port] = facts.values[_PORTS]
    return {n: p for n, p in ports.items() if not setting or chooses(setting, n)}


def _is_up(port: Port) -> bool:
    return (port["state"], port["physical_state"]) == _UP


def _judge_ports(fleet: Fleet) -> Iterator[Finding]:
    hosts = list(fleet.having(_PORTS, _VARIABLES))
    for facts in hosts:
        for name, port in _chosen(facts).items():
            if _is_up(port) or port["physical_state"] in _MEANT_DOWN:
                continue
            others = [
                each.values[_PORTS][name]
                for each in hosts
                if each is not facts and name in each.values[_PORTS]
            ]
            num_up = sum(_is_up(other) for other in others)
            is_usual = bool(others) and 2 * num_up > len(others)
            severity = _weigh(facts, port, is_usual=is_usual, is_alone=not others)
            what = f"{name} is {port['state']}/{port['physical_state']}"
            hosts_up = f"{num_up} host{'s' * (num_up > 1)}"
            usual = f"ACTIVE/LinkUp on {hosts_up}" if num_up else ""
            yield Finding("rdma-port", severity, facts.host, what, usual)


def _weigh(facts: HostFacts, port: Port, *, is_usual: bool, is_alone: bool) -> Severity:
    """Return how bad a port is that is not up: many have one without a cable."""
    is_named = facts.values[_VARIABLES].get(_CHOICE, "").startswith("=")
    if is_usual or (is_named and not is_alone):
        return Severity.FAIL
    has_another = any(_is_up(each) for each in facts.values[_PORTS].values())
    if has_another or port["layer"] != "InfiniBand":
        return Severity.INFORM
    return Severity.WARN


def _judge_rates(fleet: Fleet) -> Iterator[Finding]:
    def pick(port: dict[str, Any]) -> int:
        return port["mbit_per_s"] if _is_up(port) else 0

    for host, name, rate, usual in find_slower(fleet, _PORTS, pick):
        what = f"{name} runs at {rate / 1000:g} Gbit/s"
        yield Finding("rdma-rate", Severity.FAIL, host, what, usual)


def _judge_gids(fleet: Fleet) -> Iterator[Finding]:
    if len(fleet.hosts) < 2:
        return
    hosts = list(fleet.having(_PORTS, _VARIABLES))
    for facts in hosts:
        index = facts.values[_VARIABLES].get(_INDEX, "")
        for name, port in _chosen(facts).items():
            if port["layer"] != "Ethernet" or not _is_up(port):
                continue
            severity, what = Severity.FAIL, _tell_index(name, port["gids"], index)
            if not _is_usable(port):
                severity = _weigh_gids(facts, name, hosts)
                what = f"{name} has no GID of RoCE v2 that is routable"
            if what:
                yield Finding("roce-gid", severity, facts.host, what)


def _is_usable(port: Port) -> bool:
    """Say whether other hosts can be reached by a port."""
    is_roce = port["layer"] == "Ethernet"
    is_routable = any(_is_routable(gid) for gid in port["gids"].values())
    return _is_up(port) and (is_routable or not is_roce)


def _weigh_gids(facts: HostFacts, name: str, hosts: list[HostFacts]) -> Severity:
    """Return how bad a port without an address is.

    One for storage, or that a cloud gives to every machine, has none anywhere; NCCL
    takes the faster ones if there are any.
    """
    others = [each.values[_PORTS].get(name) for each in hosts if each is not facts]
    num_usable = sum(other is not None and _is_usable(other) for other in others)
    has_another = any(_is_usable(port) for port in _chosen(facts).values())
    is_needed = _has_gpus(facts) and not has_another
    is_missed = 2 * num_usable > len(others)
    return Severity.FAIL if is_missed or is_needed else Severity.INFORM


def _has_gpus(facts: HostFacts) -> bool:
    """Say whether NCCL may run there: without GPUs nobody else needs an adapter."""
    return facts.values.get(_NUM_GPUS) != 0


def _tell_index(name: str, gids: Mapping[str, Port], index: str) -> str:
    if index in ("", "-1"):
        return ""
    if index not in gids:
        return f"{_INDEX}={index} is an empty GID of {name}"
    if not _is_routable(gids[index]):
        kind = gids[index]["type"] or "of no known type"
        return f"{_INDEX}={index} is {gids[index]['address']} of {name}, {kind}"
    return ""


def _is_routable(gid: Port) -> bool:
    is_local = gid["address"].startswith(_LINK_LOCAL) or _IPV4_LOCAL in gid["address"]
    return gid["type"] == _ROCE_2 and not is_local


def _judge_managers(fleet: Fleet) -> Iterator[Finding]:
    if len(fleet.hosts) < 2:
        return
    for facts in fleet.having(_PORTS, _VARIABLES):
        for name, port in _chosen(facts).items():
            is_linked = port["physical_state"] == "LinkUp"
            is_missing = not (port["lid"] and port["manager_lid"])
            if port["layer"] == "InfiniBand" and is_linked and is_missing:
                what = f"{name} has LID {port['lid']}, its subnet manager's is "
                what += str(port["manager_lid"])
                yield Finding("subnet-manager", Severity.FAIL, facts.host, what)


def _judge_devices(fleet: Fleet) -> Iterator[Finding]:
    if len(fleet.hosts) < 2:
        return
    for facts in fleet.having(_PORTS, _VARIABLES, _FILES, _LIBRARY):
        up = [name for name, port in _chosen(facts).items() if _is_usable(port)]
        files: dict[str, bool] = facts.values[_FILES]
        if not up:
            continue
        missing: list[str] = []
        if not any(files.values()):
            missing.append(
                "no /dev/infiniband/uverbs* "
                + ("may be opened" if files else "is to be seen")
            )
        if not facts.values[_LIBRARY]:
            missing.append("libibverbs.so.1 is not installed")
        if missing:
            what = f"{', '.join(up)} up, but {' and '.join(missing)}"
            severity = Severity.FAIL if _has_gpus(facts) else Severity.WARN
            yield Finding("rdma-devices", severity, facts.host, what)


def _judge_firmware(fleet: Fleet) -> Iterator[Finding]:
    hosts = list(fleet.having(_ADAPTERS))
    for name in dict.fromkeys(
        name for each in hosts for name in each.values[_ADAPTERS]
    ):
        told = tuple(
            HostFacts(each.host, {name: _spell(each.values[_ADAPTERS][name])}, {}, {})
            for each in hosts
            if name in each.values[_ADAPTERS]
        )
        for host, value, usual in Fleet(told, {}).odd_ones(name):
            what = f"{name}: {value}"
            yield Finding("rdma-firmware", Severity.WARN, host, what, usual)


def _spell(adapter: Mapping[str, str]) -> str:
    firmware = f"firmware {adapter['firmware'] or '?'}"
    return " ".join(filter(None, [adapter["model"], adapter["board"], firmware]))


CHECKS = (
    Check(
        id="rdma-port",
        family=Family.NETWORK,
        title="RDMA ports are up",
        reads=f"state and phys_state in /sys/class/infiniband, of ports that {_CHOICE} "
        "chooses",
        threshold="ACTIVE and LinkUp; Disabled and Sleep are meant so",
        source="the states of the InfiniBand specification; fatal where the port is up "
        "on most other hosts, or is chosen by name",
        severity=Severity.FAIL,
        fix="ibstat; then cable and transceiver. INIT: no subnet manager answers. If "
        f"nothing is plugged in, leave it out: {_CHOICE}.",
        needs="an RDMA adapter",
        why="NCCL leaves the port out: half the bandwidth, or sockets, without a word.",
        facts=(_PORTS, _VARIABLES),
        judge=_judge_ports,
    ),
    Check(
        id="rdma-rate",
        family=Family.NETWORK,
        title="RDMA ports run at the rate that they have elsewhere",
        reads="rate in /sys/class/infiniband, of ports that are up",
        threshold="what the port of the same name has on most hosts",
        source="most hosts' rate; where two rates are equally many, the faster one",
        severity=Severity.FAIL,
        fix="ibstat; ibdiagnet: reseat the cable or transceiver, look at the switch.",
        needs="several hosts with RDMA adapters",
        why="The slowest port sets the pace of every reduction.",
        facts=(_PORTS,),
        judge=_judge_rates,
    ),
    Check(
        id="roce-gid",
        family=Family.NETWORK,
        title="every RoCE port has an address that others can reach",
        reads=f"gids and gid_attrs in /sys/class/infiniband, and {_INDEX}",
        threshold="a GID of RoCE v2 that is not link-local; the chosen one is such. A "
        "port that has none on most hosts, beside one that has, is only told",
        source="NCCL's documentation of the variable; RoCE v2 is routed, v1 is not",
        severity=Severity.FAIL,
        fix=f"Give the port's interface an IP address; unset {_INDEX}: NCCL finds it. "
        f"Or leave the port out: {_CHOICE}=^NAME; if it is the only one, "
        "NCCL_IB_DISABLE=1.",
        needs="several hosts with RoCE adapters",
        why="Queue pairs do not connect: the run hangs, or ends in error 12.",
        facts=(_PORTS, _VARIABLES),
        judge=_judge_gids,
        besides=(_NUM_GPUS,),
    ),
    Check(
        id="subnet-manager",
        family=Family.NETWORK,
        title="a subnet manager knows every InfiniBand port",
        reads="lid and sm_lid in /sys/class/infiniband",
        threshold="neither is 0",
        source="the InfiniBand specification: LIDs from 1 on are given by the manager",
        severity=Severity.FAIL,
        fix="sminfo; start opensm on one host, or mend the switch's.",
        needs="several hosts with InfiniBand",
        why="Without an address no packet is routed; the port stays in INIT.",
        facts=(_PORTS, _VARIABLES),
        judge=_judge_managers,
    ),
    Check(
        id="rdma-devices",
        family=Family.NETWORK,
        title="ranks may use the RDMA adapters",
        reads="/dev/infiniband/uverbs* and libibverbs.so.1, where a port is up",
        threshold="one may be opened, and the library is there; a warning where there "
        "are no GPUs",
        source="what NCCL needs for its InfiniBand transport; no tool's number",
        severity=Severity.FAIL,
        fix="In a container: --device=/dev/infiniband --ulimit memlock=-1, and install "
        "rdma-core (Debian: libibverbs1, ibverbs-providers) in it.",
        needs="several hosts with RDMA adapters",
        why="NCCL takes TCP sockets instead, several times slower, and says nothing.",
        facts=(_PORTS, _VARIABLES, _FILES, _LIBRARY),
        judge=_judge_devices,
        besides=(_NUM_GPUS,),
    ),
    Check(
        id="rdma-firmware",
        family=Family.NETWORK,
        title="RDMA adapters have the same model and firmware everywhere",
        reads="fw_ver, hca_type and board_id in /sys/class/infiniband",
        threshold="what the adapter of the same name has on most hosts",
        source="most hosts'",
        severity=Severity.WARN,
        fix="mlxfwmanager --query; bring all to one release.",
        needs="several hosts with RDMA adapters",
        why="Adapters may differ in features and faults; slow hosts are hard to find.",
        facts=(_ADAPTERS,),
        judge=_judge_firmware,
    ),
)
"""RDMA."""
