"""Checks of network interfaces, the host name, and variables that choose interfaces."""

import math
import os
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ronde import addresses
from ronde.addresses import is_loopback
from ronde.check.check import FAIL, WARN, Problem, Problems, check, each_host
from ronde.check.fleet import ENVIRONMENT, Fleet, Value, Values
from ronde.check.probing import FactReader
from ronde.topology.kernel_files import list_names, read_number, read_text
from ronde.topology.kernel_log import read_log
from ronde.topology.pci import read_link

# Fact: this host's address for the other hosts; empty if they have no route.
ADDRESS = "network.address"
VIRTUAL = "network.is_virtual"  # fact: the host is a virtual machine
_LOOKUP_S = 2.0
_MIN_FLAPS = 5
_DAY_S = 86400

INTERFACES, _UPTIME = "network.interfaces", "network.uptime_s"
_DOWNS = "network.link_downs"
_VARIABLES, _OWN_NAME = "network.variables", "network.own_name"

_LOOPBACK, _INFINIBAND = "772", "32"
_MBIT_PER_GB = 8000  # Mbit/s in a GB/s
# Interfaces whose traffic other interfaces carry, in packets of about the same size.
_PASSING_ON = re.compile(r"^DEVTYPE=(vlan|bond|bridge|macvlan|ipvlan)$", re.MULTILINE)
# Drivers of virtual links, whose speed and carrier mean nothing.
_PARAVIRTUAL = frozenset({"virtio_net", "hv_netvsc", "vmxnet3", "vif", "gve", "ena"})
_GLOO = "GLOO_SOCKET_IFNAME"
# The message of most drivers: "eth0: NIC Link is Down".
_LINK_DOWN = re.compile(r"(?P<name>[\w.@-]+): (?:NIC )?[Ll]ink (?:is )?[Dd]own")
_BY_PREFIX = ("NCCL_SOCKET_IFNAME",)
_BY_NAME = (_GLOO, "TP_SOCKET_IFNAME")
_PREFIXES = ("NCCL_SOCKET_", "NCCL_IB_", "NCCL_NET", "UCX_NET_DEVICES")
_OF_CONTAINERS = re.compile(
    r"(docker|podman|nerdctl|virbr|lxcbr|lxdbr|cni|veth).*|br-[0-9a-f]{12}"
)
"""Interfaces that lead only to containers or virtual machines of this host."""

Interfaces = Mapping[str, Mapping[str, Any]]


def read(reader: FactReader) -> None:
    root = reader.root
    wait_for_name = look_up_own_name(socket.gethostname(), _resolve)
    reader.store(INTERFACES, lambda: read_interfaces(root))
    forwarded = reader.settings.get(ENVIRONMENT, {})
    reader.store(_VARIABLES, lambda: read_variables(root, forwarded))
    uptime = Path(f"{root}/proc/uptime")
    reader.store(_UPTIME, lambda: float(uptime.read_text("ascii").split()[0]))
    reader.store(_DOWNS, lambda: read_link_downs(root, reader.values))
    reader.store(_OWN_NAME, wait_for_name)


def read_interfaces(root: str) -> dict[str, Value]:
    """Return the network interfaces by name; those of a saved tree have no addresses.

    An unknown ``mbit_per_s`` is 0, and an unknown ``carrier_changes`` -1.
    """
    directory = f"{root}/sys/class/net"
    found: dict[str, dict[str, Any]] = {}
    for name in sorted(os.listdir(directory)):  # noqa: PTH208 - see kernel_files
        own = f"{directory}/{name}"
        if not Path(own).is_dir():  # bonding_masters is a file
            continue
        found[name] = {
            "kind": _kind(own),
            "state": read_text(f"{own}/operstate"),
            "mtu": read_number(f"{own}/mtu", 0),
            "mbit_per_s": max(0, read_number(f"{own}/speed", 0)),
            "carrier_changes": read_number(f"{own}/carrier_changes", -1),
            "carriers": list_carriers(directory, name),
            "addresses": [],
        }
    for each in addresses.read_interfaces() if not root else ():
        if each.interface in found:
            found[each.interface]["addresses"].append(each.address)
    return found


def read_link_downs(root: str, values: Values) -> dict[str, int]:
    """Return the number of times that each physical link went down in 24 hours.

    The numbers come from the kernel log. On the first day after the boot, the kernel's
    counter is used if it is higher.
    """
    links = values.get(INTERFACES, {})
    own = {name: i for name, i in links.items() if i["kind"] == "physical"}
    downs = dict.fromkeys(own, 0)
    # Each loss of a link is two changes: down, and up again.
    if is_first_day := values.get(_UPTIME, math.inf) <= _DAY_S:
        downs = {name: i["carrier_changes"] // 2 for name, i in own.items()}
    try:
        log = read_log(root)
    except OSError:
        if is_first_day:
            return downs
        raise
    ages = ((age_s, _LINK_DOWN.search(text)) for age_s, text in log)
    logged = Counter(at["name"] for age_s, at in ages if at and age_s <= _DAY_S)
    return {name: max(count, logged[name]) for name, count in downs.items()}


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


def list_carriers(directory: str, name: str) -> list[str]:
    """Return the adapters that carry an interface's traffic: several for a bond."""
    own = f"{directory}/{name}"
    if _kind(own) in ("physical", "infiniband"):
        return [name]
    if not _PASSING_ON.search(read_text(f"{own}/uevent")):
        return []
    names = [n.removeprefix("lower_") for n in list_names(own) if n[:6] == "lower_"]
    return sorted({each for n in names for each in list_carriers(directory, n)})


def find_name(values: Values) -> str:
    """Return the interface with the host's ``ADDRESS``, or "" if it is unknown."""
    interfaces: Interfaces = values.get(INTERFACES, {})
    address = values.get(ADDRESS)
    found = (name for name, each in interfaces.items() if address in each["addresses"])
    return next(found, "")


class HostLink(NamedTuple):
    """The link from a host to the other hosts, and its rate."""

    text: str  # with a verb: ``eth0 carries 25 Gbit/s``
    gb_per_s: float | None  # of one adapter; None if unknown


def find_link(values: Values) -> HostLink:
    """Return the link with the host's ``ADDRESS``; a virtual link has no known rate."""
    if not (name := find_name(values)):
        return HostLink("the rate of its link is unknown", None)
    interfaces: Interfaces = values[INTERFACES]
    link = interfaces[name]
    carriers = [
        interfaces[each] for each in link.get("carriers", ()) if each in interfaces
    ]
    rates = [each["mbit_per_s"] for each in carriers if each["mbit_per_s"]]
    if values.get(VIRTUAL) or not rates:
        kind = "of a virtual machine" if rates else link["kind"]
        return HostLink(f"the rate of {name} ({kind}) is unknown", None)
    each_of = f"{len(rates)} times " if len(rates) > 1 else ""
    text = f"{name} carries {each_of}{min(rates) / 1000:g} Gbit/s"
    return HostLink(text, min(rates) / _MBIT_PER_GB)


def read_variables(root: str, forwarded: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of ranks that choose interfaces and adapters."""
    # Read the file, since a saved tree has it as well.
    lines = Path(f"{root}/proc/self/environ").read_bytes().split(b"\0")
    pairs = (line.decode(errors="replace").partition("=") for line in lines)
    known = {name: value for name, _, value in pairs} | dict(forwarded)
    return {
        name: value
        for name, value in sorted(known.items())
        if name in _BY_NAME or name.startswith(_PREFIXES)
    }


def look_up_own_name(
    name: str, resolve: Callable[[str], list[str]]
) -> Callable[..., dict[str, Value]]:
    """Start to look up the host's own name; return a function that awaits the result.

    The lookup runs in a thread, since a name server may never answer.
    """
    found: dict[str, Value] = {}

    def ask() -> None:
        try:
            found["addresses"] = resolve(name)
        except (OSError, UnicodeError) as error:
            found["error"] = getattr(error, "strerror", None) or str(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()

    def wait(timeout_s: float = _LOOKUP_S) -> dict[str, Value]:
        thread.join(timeout_s)
        late = {"error": f"no answer within {timeout_s:g} s"}
        return {"name": name, "addresses": [], "error": "", **(found or late)}

    return wait


def _resolve(name: str) -> list[str]:
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]).partition("%")[0] for each in found))


def chooses(setting: str, name: str) -> bool:
    """Return True if a setting of NCCL selects an interface, or a port of an adapter.

    The setting is a list of name prefixes. A list after ``=`` has whole names, and a
    list after ``^`` has exclusions. An adapter may have a port, as in ``mlx5_0:1``.
    Further fields, the rail and the plane, are ignored.

    Source: NCCL 2.30.7's manual on ``NCCL_SOCKET_IFNAME`` and ``NCCL_IB_HCA``.
    """
    is_excluding = setting.startswith("^")
    listed = setting.removeprefix("^")
    is_whole = listed.startswith("=")
    adapter, _, port = name.partition(":")
    is_listed = False
    for entry in listed.removeprefix("=").split(","):
        begin, wanted_port, *_ = *entry.strip().split(":"), ""
        fits = adapter == begin if is_whole else adapter.startswith(begin)
        if begin and fits and wanted_port in ("", port):
            is_listed = True
    return is_listed != is_excluding


@each_host(WARN, _OWN_NAME, INTERFACES, _VARIABLES, optional=(ADDRESS,))
def host_name(values: Values, fleet: Fleet) -> Problems:
    """The host's own name resolves to an address that other hosts can reach.

    reads: the addresses that the host's name resolves to, unless GLOO_SOCKET_IFNAME is
        set
    threshold: the first address of this host is neither loopback nor that of a
        container bridge
    source: torch's ProcessGroupGloo.cpp, createDefaultDevice: Gloo listens at an
        address of the name, else at loopback; ronde run sets an interface
    fix: Correct /etc/hosts, or export GLOO_SOCKET_IFNAME (ronde run does).
    needs: several hosts
    why: Under torchrun or mpirun, Gloo listens at loopback; other hosts cannot connect.
    """
    # With GLOO_SOCKET_IFNAME, Gloo does not look up the name.
    if len(fleet.hosts) < 2 or values[_VARIABLES].get(_GLOO):
        return
    interfaces: Interfaces = values[INTERFACES]
    own = values[_OWN_NAME]
    if message := _unreached_name(own, interfaces):
        name, address, interface = own["name"], values.get(ADDRESS), find_name(values)
        fix = (
            f"In /etc/hosts there, let the only line with {name} be: {address} {name}. "
            f"Or export {_GLOO}={interface} (ronde run does)."
        )
        yield Problem(message, fix=fix if interface else "")


def _unreached_name(own: Mapping[str, Any], interfaces: Interfaces) -> str:
    name = own["name"]
    if own["error"]:
        return f"its name {name} does not resolve: {own['error']}"
    at = {address: i for i, each in interfaces.items() for address in each["addresses"]}
    # Gloo listens at the first that is this host's.
    first = next((a for a in own["addresses"] if a in at or is_loopback(a)), "")
    leads = f"its name {name} resolves to"
    if is_loopback(first):
        return f"{leads} {first}, which no other host reaches"
    if _OF_CONTAINERS.fullmatch(at.get(first, "")):
        return f"{leads} {first} of {at[first]}, which only containers here reach"
    if at and not first:
        named = ", ".join(own["addresses"]) or "nothing"
        return f"{leads} {named}, which is no address of this host"
    return ""


@each_host(FAIL, INTERFACES, _VARIABLES)
def chosen_interface(values: Values, fleet: Fleet) -> Problems:
    """The interfaces that environment variables choose exist.

    reads: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, TP_SOCKET_IFNAME
    threshold: one matches, has an address, and can be reached by other hosts. For Gloo
        all names must exist
    source: NCCL 2.30.7's manual, NCCL_SOCKET_IFNAME; torch.distributed's manual,
        GLOO_SOCKET_IFNAME; ronde's choice: the reachability
    fix: Unset the variable, or name an interface of this host: ip -br address.
    why: Ranks find no interface and fail, or listen where no other host can connect.
    """
    interfaces: Interfaces = values[INTERFACES]
    known = ", ".join(interfaces)
    for variable, setting in values[_VARIABLES].items():
        if not setting or variable not in (*_BY_PREFIX, *_BY_NAME):
            continue
        chosen = [name for name in interfaces if chooses(setting, name)]
        if variable in _BY_NAME:
            chosen = setting.split(",")
        # Of those chosen by whole name each must exist.
        if missing := [name for name in chosen if name not in interfaces]:
            message = f": there is no {', '.join(missing)} among {known}"
        elif not chosen:
            message = f" matches no interface here: {known}"
        elif len(fleet.hosts) < 2 or setting.startswith("^"):
            continue
        elif why := _unreached(chosen, interfaces):
            message = f" selects only {', '.join(chosen)}, which {why}"
        else:
            continue
        fix = f"unset {variable}  # or name an interface of this host: ip -br address"
        yield Problem(f"{variable}={setting}{message}", fix=fix)


def _unreached(names: Sequence[str], interfaces: Interfaces) -> str:
    """Return the reason if no other host can reach these interfaces, else ""."""
    if all(
        interfaces[name]["kind"] == "loopback" or _OF_CONTAINERS.fullmatch(name)
        for name in names
    ):
        return "no other host reaches"
    is_known = any(each["addresses"] for each in interfaces.values())
    if is_known and not any(interfaces[name]["addresses"] for name in names):
        return "has no address"
    return ""


def find_slower(
    fleet: Fleet, fact: str, pick: Callable[[dict[str, Any]], int]
) -> Iterator[tuple[str, Problem]]:
    """Yield interfaces or ports slower than those of the same name on most hosts.

    If two rates are equally frequent, the faster one counts, since no link is faster
    than intended. ``pick`` returns the Mbit/s of an interface or port, or 0 to skip it.
    """
    hosts = fleet.known(fact)
    for name in dict.fromkeys(name for each in hosts.values() for name in each):
        rates = {h: pick(each[name]) for h, each in hosts.items() if name in each}
        counts = Counter(rate for rate in rates.values() if rate)
        usual = max(counts, key=lambda rate: (counts[rate], rate), default=0)
        num = counts[usual]
        for host, rate in rates.items():
            if 0 < rate < usual:
                message = f"{name} runs at {rate / 1000:g} Gbit/s"
                others = f"{usual / 1000:g} Gbit/s on {num} host{'s' * (num > 1)}"
                yield name, Problem(message, usual=others, host=host)


@check(WARN, INTERFACES)
def link_speed(fleet: Fleet) -> Problems:
    """Network links are as fast as on the other hosts.

    reads: /sys/class/net/*/speed of physical interfaces that are up
    threshold: the speed of the interface of the same name on most hosts
    source: ronde's choice: hosts of a job have equal links; of two equally frequent
        speeds the faster one counts
    fix: ethtool INTERFACE shows speed and errors; then look at cable and switch port.
    needs: several hosts
    why: The slowest link sets the pace of every reduction.
    """

    def pick(interface: dict[str, Any]) -> int:
        is_link = interface["kind"] == "physical" and interface["state"] == "up"
        return interface["mbit_per_s"] if is_link else 0

    for name, problem in find_slower(fleet, INTERFACES, pick):
        fix = f"ethtool {name}: look at speed and errors; then cable and switch port."
        yield problem._replace(fix=fix)


@each_host(WARN, _DOWNS, _UPTIME)
def link_flaps(values: Values, _: Fleet) -> Problems:
    """Network links stay up.

    reads: the losses of physical links in the kernel log (/dev/kmsg, else journalctl
        -k); on the first day also carrier_changes, and link_downed of RDMA ports
    threshold: fewer than 5 losses within the last 24 hours
    source: Azure's node health checks 0e0a1ac (azure_ib_link_flapping.nhc)
    fix: Find the times: journalctl -k | grep -i 'link is'. Check cable, transceiver and
        switch port; drain the host while the losses continue.
    why: A link that is down for seconds ends a run, or stalls it for minutes.
    """
    downs: dict[str, int] = dict(values[_DOWNS])
    if values[_UPTIME] <= _DAY_S:
        ports = values.get("network.rdma_ports", {})
        downs |= {name: port["downs"] for name, port in ports.items()}
    for name, number in downs.items():
        if number >= _MIN_FLAPS:
            yield Problem(f"{name} went down {number} times within 24 hours")
