"""A host's network interfaces, and the variables that choose among them."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ronde import addresses
from ronde.check.facts import Value
from ronde.topology.kernel_files import list_names, read_number, read_text
from ronde.topology.pci import read_link

_LOOPBACK = "772"
_INFINIBAND = "32"
_PARAVIRTUAL = frozenset({"virtio_net", "hv_netvsc", "vmxnet3", "vif", "gve", "ena"})
"""Drivers whose links a hypervisor makes up: speed and carrier are what it likes."""

_PREFIXES = ("NCCL_SOCKET_", "NCCL_IB_", "NCCL_NET", "UCX_NET_DEVICES")
_EXACT = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def read_interfaces(root: str) -> dict[str, Value]:
    """Return by the interface's name what it is.

    Each has ``kind`` (``loopback``, ``bridge``, ``bridge-port``, ``infiniband``,
    ``physical``, ``paravirtual``: made up by a hypervisor, ``wireless`` or
    ``virtual``), ``state`` as the kernel calls it, ``mtu`` in bytes,
    ``mbit_per_s`` (0: not told), ``carrier_changes`` (-1: not told) and ``addresses``,
    which only this host itself has.

    Raises:
        OSError: There are none to be seen.
    """
    directory = f"{root}/sys/class/net"
    found: dict[str, dict[str, Any]] = {}
    for name in sorted(os.listdir(directory)):  # noqa: PTH208 - see kernel_files
        own = f"{directory}/{name}"
        if not Path(own).is_dir():
            # bonding_masters is a file.
            continue
        found[name] = {
            "kind": _kind(own),
            "state": read_text(f"{own}/operstate"),
            "mtu": read_number(f"{own}/mtu", 0),
            "mbit_per_s": max(0, read_number(f"{own}/speed", 0)),
            "carrier_changes": read_number(f"{own}/carrier_changes", -1),
            "addresses": [],
        }
    for each in addresses.read_interfaces() if not root else ():
        if each.interface in found:
            found[each.interface]["addresses"].append(each.address)
    return found


def _kind(own: str) -> str:
    kinds = {_LOOPBACK: "loopback", _INFINIBAND: "infiniband"}
    if kind := kinds.get(read_text(f"{own}/type")):
        return kind
    if list_names(f"{own}/bridge"):
        return "bridge"
    if Path(f"{own}/device").exists():
        if Path(f"{own}/phy80211").exists():
            return "wireless"
        driver = read_link(f"{own}/device/driver").rpartition("/")[2]
        return "paravirtual" if driver in _PARAVIRTUAL else "physical"
    return "bridge-port" if list_names(f"{own}/brport") else "virtual"


def read_variables(root: str, forwarded: Mapping[str, str]) -> dict[str, str]:
    """Return what chooses interfaces and adapters in the environment of ranks here.

    Args:
        root: Where ``proc`` is; empty for this machine.
        forwarded: What every rank is given on top of this host's own environment.

    Raises:
        OSError: The environment cannot be read.
    """
    # The file, and not the mapping: a saved tree has one, too.
    lines = Path(f"{root}/proc/self/environ").read_bytes().split(b"\0")
    pairs = (line.decode(errors="replace").partition("=") for line in lines)
    known = {name: value for name, _, value in pairs} | dict(forwarded)
    return {
        name: value
        for name, value in sorted(known.items())
        if name in _EXACT or name.startswith(_PREFIXES)
    }
