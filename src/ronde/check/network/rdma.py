"""Checks that InfiniBand and RoCE ports are up, fast and usable."""

import ctypes
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ronde.check.check import (
    FAIL,
    INFORM,
    WARN,
    Problem,
    Problems,
    Severity,
    check,
    each_host,
)
from ronde.check.fleet import Fleet, HostFacts, Value, Values
from ronde.check.network.interfaces import chooses, find_slower
from ronde.check.probing import FactReader
from ronde.topology.kernel_files import list_names, read_number, read_text
from ronde.topology.machine import parse_rate
from ronde.units import list_first

RDMA_ERRORS = "network.rdma_errors"  # fact: error counters, keyed by RDMA port
_PORTS, _VARIABLES = "network.rdma_ports", "network.variables"
_FILES, _LIBRARY = "network.rdma_device_files", "network.has_rdma_library"
_NUM_GPUS = "host.num_gpus"
_CHOICE, _INDEX = "NCCL_IB_HCA", "NCCL_IB_GID_INDEX"
_UP = ("ACTIVE", "LinkUp")
_CABLE = "look at its cable and transceiver, and at the switch's port"
_MEANT_DOWN = ("Disabled", "Sleep")
_ROCE_2 = "RoCE v2"
_LINK_LOCAL, _IPV4_LOCAL = "fe80:", ":ffff:a9fe:"

_IBVERBS = "libibverbs.so.1"
_MAX_GIDS = 64
_NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
_FLAPS = "link_downed"
_LINK_ERRORS = "symbol_error link_error_recovery link_downed port_rcv_errors"
_LOST = "out_of_sequence packet_seq_err implied_nak_seq_err local_ack_timeout_err"
_ERRORS = {
    "counters": f"{_LINK_ERRORS} local_link_integrity_errors".split(),
    "hw_counters": f"{_LOST} rnr_nak_retry_err".split(),
}
"""Error counters by directory of a port in sysfs.

Source: NCCL 2.30.7's manual, RDMA protocol statistics and Port error counters; Linux'
drivers/infiniband/hw/mlx5/counters.c.
"""

Port = Mapping[str, Any]


def read(reader: FactReader) -> None:
    root = reader.root
    reader.store(_PORTS, lambda: read_ports(root))
    reader.store(RDMA_ERRORS, lambda: read_errors(root))
    files = f"{root}/dev/infiniband"
    reader.values[_FILES] = {
        name: os.access(f"{files}/{name}", os.R_OK | os.W_OK)
        for name in list_names(files)
        if name.startswith("uverbs")
    }
    if list_names(f"{root}/sys/class/infiniband"):
        reader.values[_LIBRARY] = True
        try:
            ctypes.CDLL(_IBVERBS)
        except OSError:
            reader.values[_LIBRARY] = False


def _list_ports(root: str) -> Iterator[tuple[str, str, bool]]:
    """Yield each port's name and directory, and True if it is of a virtual function."""
    top = f"{root}/sys/class/infiniband"
    for adapter in list_names(top):
        is_function = Path(f"{top}/{adapter}/device/physfn").exists()
        for port in list_names(f"{top}/{adapter}/ports"):
            yield f"{adapter}:{port}", f"{top}/{adapter}/ports/{port}", is_function


def read_ports(root: str) -> dict[str, Value]:
    """Return the ports of all adapters, keyed by names such as ``mlx5_0:1``.

    ``downs`` is the number of link losses, or -1 if it is unknown. Empty GIDs are left
    out.
    """
    found: dict[str, Value] = {}
    for name, own, is_function in _list_ports(root):
        downs = -1 if is_function else read_number(f"{own}/counters/{_FLAPS}", -1)
        found[name] = {
            "state": _behind_colon(own, "state"),
            "physical_state": _behind_colon(own, "phys_state"),
            "mbit_per_s": parse_rate(read_text(f"{own}/rate")),
            "layer": read_text(f"{own}/link_layer"),
            "gids": _read_gids(own),
            "downs": downs,
        }
    return found


def read_errors(root: str) -> dict[str, dict[str, int]]:
    """Return the error counters of each port, except those of virtual functions."""
    found: dict[str, dict[str, int]] = {}
    for port, own, is_function in _list_ports(root):
        for directory, names in _ERRORS.items() if not is_function else ():
            for name in names:
                count = read_number(f"{own}/{directory}/{name}", -1)
                if count >= 0:
                    found.setdefault(port, {})[name] = count
    return found


def _behind_colon(own: str, name: str) -> str:
    """Return the text after the colon of a sysfs file, such as ``4: ACTIVE``."""
    return Path(f"{own}/{name}").read_text(encoding="ascii").partition(":")[2].strip()


def _read_gids(own: str) -> dict[str, Value]:
    found: dict[str, Value] = {}
    indices = sorted(int(n) for n in list_names(f"{own}/gids") if n.isdecimal())
    for index in indices[:_MAX_GIDS]:
        address = read_text(f"{own}/gids/{index}")
        if address and address != _NO_GID:
            found[str(index)] = {
                "address": address,
                "type": read_text(f"{own}/gid_attrs/types/{index}"),
                "interface": read_text(f"{own}/gid_attrs/ndevs/{index}"),
            }
    return found


def _chosen(values: Values) -> dict[str, Port]:
    variables: Mapping[str, str] = values[_VARIABLES]
    is_off = variables.get("NCCL_IB_DISABLE") == "1"
    if is_off or variables.get("NCCL_NET", "").lower() == "socket":
        return {}
    setting = variables.get(_CHOICE, "")
    ports: dict[str, Port] = values[_PORTS]
    return {n: p for n, p in ports.items() if not setting or chooses(setting, n)}


def _is_up(port: Port) -> bool:
    return (port["state"], port["physical_state"]) == _UP


def _has_gpus(values: Values) -> bool:
    """Return False if a host is known to have no GPUs; NCCL uses no RDMA port there."""
    return values.get(_NUM_GPUS) != 0


@check(FAIL, _PORTS, _VARIABLES)
def rdma_port(fleet: Fleet) -> Problems:
    """RDMA ports are up.

    reads: state and phys_state in /sys/class/infiniband, of the ports that NCCL_IB_HCA
        selects
    threshold: ACTIVE and LinkUp. Disabled or Sleep is taken as intended, unless the
        host has four or more ports of this model and all others are up
    source: NCCL 2.30.7's manual, NIC-level diagnostics; Disabled and Sleep: AMD's
        Primus fd1eeab (preflight/node_smoke/cli.py); ronde's choice: a failure if the
        port is up on most hosts, or if NCCL_IB_HCA names it
    fix: look at its cable and transceiver, and at the switch's port; if nothing is
        plugged in, exclude it with NCCL_IB_HCA. In state INIT: start a subnet manager
    needs: an RDMA adapter
    why: NCCL silently skips the port: the host has half the bandwidth, or uses sockets
        instead of RDMA.
    """
    hosts = list(fleet.having(_PORTS, _VARIABLES))
    for facts in hosts:
        found: dict[Problem, list[str]] = {}  # ports with this problem
        for name, port in _chosen(facts.values).items():
            is_meant = port["physical_state"] in _MEANT_DOWN
            if _is_up(port) or (is_meant and not _is_odd(facts.values, port)):
                continue
            others = [
                each.values[_PORTS][name]
                for each in hosts
                if each is not facts and name in each.values[_PORTS]
            ]
            num_up = sum(map(_is_up, others))
            usual = f"ACTIVE/LinkUp on {num_up} host{'s' * (num_up > 1)}"
            problem = Problem(
                f"{port['state']}/{port['physical_state']}",
                _weigh_port(facts.values, port, num_up, len(others)),
                usual if num_up else "",
                host=facts.host,
            )
            found.setdefault(problem, []).append(name)
        for problem, names in found.items():
            message = f"{list_first(names, 4)} {'is' if len(names) == 1 else 'are'}"
            fix = _cure(facts.values, problem.message, names)
            yield problem._replace(message=f"{message} {problem.message}", fix=fix)


def _cure(values: Values, state: str, names: list[str]) -> str:
    adapter, _, number = names[0].partition(":")
    if state.endswith("Disabled"):
        return f"sudo ibportstate -C {adapter} -D 0 {number} enable"
    if state.endswith("LinkUp"):  # INIT or ARMED
        return (
            f"sminfo -C {adapter} -P {number}; if none answers, start a subnet manager"
        )
    leave_out = f"export NCCL_IB_HCA=^={','.join(names)}"
    has_another = any(map(_is_up, values[_PORTS].values()))
    return _CABLE + f"; if it has no cable on purpose: {leave_out}" * has_another


def _is_odd(values: Values, port: Port) -> bool:
    """Return True if exactly one of four or more ports of this model is not up."""
    kind = port.get("model"), port["layer"]
    ports = values[_PORTS].values() if kind[0] else ()
    alike = [_is_up(each) for each in ports if (each["model"], each["layer"]) == kind]
    return sum(alike) == len(alike) - 1 > 2


def _weigh_port(values: Values, port: Port, num_up: int, num_others: int) -> Severity:
    is_named = values[_VARIABLES].get(_CHOICE, "").startswith("=")
    if 2 * num_up > num_others or (is_named and num_others):
        return FAIL
    has_another = any(_is_up(each) for each in values[_PORTS].values())
    if port["physical_state"] == _UP[1] and port["layer"] == "InfiniBand":
        # The port has a cable, but no subnet manager has activated it.
        return WARN if has_another else FAIL
    if _is_odd(values, port):
        return WARN
    if has_another or port["layer"] != "InfiniBand":
        return INFORM
    # One or two ports may be unused; a saved file is of a host that runs jobs.
    return FAIL if port.get("model") and len(values[_PORTS]) > 3 else WARN


@check(FAIL, _PORTS)
def rdma_rate(fleet: Fleet) -> Problems:
    """RDMA ports are as fast as on the other hosts.

    reads: rate in /sys/class/infiniband, of ports that are up
    threshold: the rate of the port of the same name on most hosts
    source: ronde's choice: hosts of a job have equal ports; of two equally frequent
        rates the faster one counts
    fix: ibstat; ibdiagnet; then reseat the cable or transceiver, and look at the
        switch.
    needs: several hosts with RDMA adapters
    why: The slowest port sets the pace of every reduction.
    """

    def pick(port: dict[str, Any]) -> int:
        return port["mbit_per_s"] if _is_up(port) else 0

    return (problem for _, problem in find_slower(fleet, _PORTS, pick))


@check(FAIL, _PORTS, _VARIABLES, optional=(_NUM_GPUS,))
def roce_gid(fleet: Fleet) -> Problems:
    """Every RoCE port has an address that other hosts can reach.

    reads: gids and gid_attrs in /sys/class/infiniband, and NCCL_IB_GID_INDEX
    threshold: a routable GID of RoCE v2; only a note if most hosts lack one, unless
        NCCL needs this port
    source: NCCL 2.30.7's manual, RoCE: the index should be unset since 2.21; NCCL's
        net_ib/connect.cc skips link-local GIDs; RoCE v2 is routed, v1 is not
    fix: Give the port's interface an IP address, and unset NCCL_IB_GID_INDEX, since
        NCCL finds it. Or exclude the port: NCCL_IB_HCA=^NAME; if it is the only one:
        NCCL_IB_DISABLE=1.
    needs: several hosts with RoCE adapters
    why: Queue pairs do not connect: the run hangs, or ends with error 12.
    """
    hosts = list(fleet.having(_PORTS, _VARIABLES)) if len(fleet.hosts) > 1 else []
    for facts in hosts:
        index = facts.values[_VARIABLES].get(_INDEX, "")
        for name, port in _chosen(facts.values).items():
            if port["layer"] != "Ethernet" or not _is_up(port):
                continue
            severity, message = FAIL, _wrong_index(name, port["gids"], index)
            if not _is_usable(port):
                severity = _weigh_gids(facts, name, hosts)
                message = f"{name} has no routable GID of RoCE v2"
            adapter = name.partition(":")[0]
            fix = f"give the interface of {name} an IP address; or export "
            fix += (
                f"NCCL_IB_HCA=^{adapter}; or, if it is the only one, NCCL_IB_DISABLE=1"
            )
            if index and _is_usable(port):
                fix = f"unset {_INDEX}  # NCCL finds it"
            if message:
                yield Problem(message, severity, fix=fix, host=facts.host)


def _is_usable(port: Port) -> bool:
    is_roce = port["layer"] == "Ethernet"
    is_routable = any(map(_is_routable, port["gids"].values()))
    return _is_up(port) and (is_routable or not is_roce)


def _weigh_gids(facts: HostFacts, name: str, hosts: Iterable[HostFacts]) -> Severity:
    """Return the severity for a port without an address.

    A port that is used for storage may not need an address.
    """
    others = [each.values[_PORTS].get(name) for each in hosts if each is not facts]
    num_usable = sum(other is not None and _is_usable(other) for other in others)
    has_another = any(map(_is_usable, _chosen(facts.values).values()))
    is_needed = _has_gpus(facts.values) and not has_another
    return FAIL if 2 * num_usable > len(others) or is_needed else INFORM


def _wrong_index(name: str, gids: Mapping[str, Port], index: str) -> str:
    if index in ("", "-1"):
        return ""
    if index not in gids:
        return f"{_INDEX}={index} is an empty GID of {name}"
    if not _is_routable(gids[index]):
        kind = gids[index]["type"] or "of unknown type"
        return f"{_INDEX}={index} is {gids[index]['address']} of {name}, {kind}"
    return ""


def _is_routable(gid: Port) -> bool:
    is_local = gid["address"].startswith(_LINK_LOCAL) or _IPV4_LOCAL in gid["address"]
    return gid["type"] == _ROCE_2 and not is_local


@each_host(FAIL, _PORTS, _VARIABLES, _FILES, _LIBRARY, optional=(_NUM_GPUS,))
def rdma_devices(values: Values, fleet: Fleet) -> Problems:
    """Ranks may use the RDMA adapters.

    reads: /dev/infiniband/uverbs* and libibverbs.so.1, if a port is up
    threshold: at least one file can be opened, and the library is installed; on hosts
        without GPUs a warning
    source: NCCL 2.30.7 loads this library (src/misc/ibvsymbols.cc), which opens the
        files
    fix: In a container: --device=/dev/infiniband --ulimit memlock=-1, and install
        rdma-core (Debian: libibverbs1, ibverbs-providers) in it.
    pod: Request the adapter from its device plugin (ronde kubernetes --resource
        rdma/hca=1), and install rdma-core in the image
    needs: several hosts with RDMA adapters
    why: NCCL silently uses TCP sockets instead, which are several times slower.
    """
    up = [name for name, port in _chosen(values).items() if _is_usable(port)]
    files: dict[str, bool] = values[_FILES]
    missing: list[str] = []
    if not any(files.values()):
        how = "may be opened" if files else "exists"
        missing.append(f"no /dev/infiniband/uverbs* {how}")
    if not values[_LIBRARY]:
        missing.append(f"{_IBVERBS} is not installed")
    if len(fleet.hosts) > 1 and up and missing:
        message = f"{', '.join(up)} up, but {' and '.join(missing)}"
        yield Problem(message, FAIL if _has_gpus(values) else WARN)
