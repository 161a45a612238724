"""A host's interfaces, its own name, and the variables that choose among interfaces."""

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
from ronde.check.check import FAIL, WARN, Family, Problem, check, each_host
from ronde.check.facts import ENVIRONMENT, Fleet, Reading, Value, Values
from ronde.topology.kernel_files import list_names, read_number, read_text
from ronde.topology.pci import read_link

ADDRESS = "network.address"
"""Fact: the address by which others reach this host; empty if they have no route."""

LOOKUP_S = 2.0
MAX_DOWNS_A_DAY = 5

_INTERFACES, _UPTIME = "network.interfaces", "network.uptime_s"
_VARIABLES, _OWN_NAME = "network.variables", "network.own_name"
_PORTS = "network.rdma_ports"
_DAY_S = 86400

_LOOPBACK, _INFINIBAND = "772", "32"
_PARAVIRTUAL = frozenset({"virtio_net", "hv_netvsc", "vmxnet3", "vif", "gve", "ena"})
"""Drivers whose links a hypervisor makes up: speed and carrier are what it likes."""

_GLOO = "GLOO_SOCKET_IFNAME"
_BY_PREFIX = ("NCCL_SOCKET_IFNAME",)
_BY_NAME = (_GLOO, "TP_SOCKET_IFNAME")
_PREFIXES = ("NCCL_SOCKET_", "NCCL_IB_", "NCCL_NET", "UCX_NET_DEVICES")
_OF_CONTAINERS = re.compile(
    r"(docker|podman|nerdctl|virbr|lxcbr|lxdbr|cni|veth).*|br-[0-9a-f]{12}"
)
"""Interfaces that lead to containers or virtual machines of this host alone."""

Interfaces = Mapping[str, Mapping[str, Any]]
Resolve = Callable[[str], list[str]]
"""Returns the numeric addresses of a name, the first to be tried first."""


def read(reading: Reading) -> None:
    """Read interfaces and names; a name server that hangs costs two seconds."""
    root = reading.root
    own_name = OwnName.look_up(root)
    reading.keep(_INTERFACES, lambda: read_interfaces(root))
    forwarded = reading.settings.get(ENVIRONMENT, {})
    reading.keep(_VARIABLES, lambda: read_variables(root, forwarded))
    uptime = Path(f"{root}/proc/uptime")
    reading.keep(_UPTIME, lambda: float(uptime.read_text("ascii").split()[0]))
    reading.keep(_OWN_NAME, own_name.wait)


def read_interfaces(root: str) -> dict[str, Value]:
    """Return by the interface's name what it is.

    Each has ``kind`` (``loopback``, ``bridge``, ``bridge-port``, ``infiniband``,
    ``physical``, ``paravirtual``: made up by a hypervisor, ``wireless`` or
    ``virtual``), ``state`` as the kernel calls it, ``mtu`` in bytes, ``mbit_per_s``
    (0: unknown), ``carrier_changes`` (-1: unknown) and ``addresses``, which only this
    host itself has.

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
    """
    # The file, and not the mapping: a saved tree has one, too.
    lines = Path(f"{root}/proc/self/environ").read_bytes().split(b"\0")
    pairs = (line.decode(errors="replace").partition("=") for line in lines)
    known = {name: value for name, _, value in pairs} | dict(forwarded)
    return {
        name: value
        for name, value in sorted(known.items())
        if name in _BY_NAME or name.startswith(_PREFIXES)
    }


class OwnName(NamedTuple):
    """A look-up of the host's own name, in a thread: a server may never answer.

    Attributes:
        name: The host's own.
        thread: Ends when there is an answer.
        found: Gets ``addresses`` or ``error``.
    """

    name: str
    thread: threading.Thread
    found: dict[str, Value]

    @classmethod
    def look_up(cls, root: str, resolve: Resolve | None = None) -> "OwnName":
        """Begin to ask.

        Args:
            root: Of a saved tree, of which ``etc/hosts`` alone is asked; empty for
                this host, which asks what the C library asks.
            resolve: Asks instead.
        """
        name = read_text(f"{root}/proc/sys/kernel/hostname") or socket.gethostname()
        found: dict[str, Value] = {}

        def ask() -> None:
            try:
                if resolve:
                    found["addresses"] = resolve(name)
                else:
                    found["addresses"] = _read_hosts(root, name) if root else _ask(name)
            except (OSError, UnicodeError) as error:
                found["error"] = getattr(error, "strerror", None) or str(error)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        return cls(name, thread, found)

    def wait(self, timeout_s: float = LOOKUP_S) -> dict[str, Value]:
        """Return ``name``, ``addresses`` in their order, and ``error``, else empty."""
        self.thread.join(timeout_s)
        late = {"error": f"no answer within {timeout_s:g} s"}
        empty = {"name": self.name, "addresses": list[str](), "error": ""}
        return {**empty, **(self.found or late)}


def _ask(name: str) -> list[str]:
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]).partition("%")[0] for each in found))


def _read_hosts(root: str, name: str) -> list[str]:
    found: list[str] = []
    for line in Path(f"{root}/etc/hosts").read_text(errors="replace").splitlines():
        address, *names = line.partition("#")[0].split() or [""]
        if name in names:
            found.append(address)
    if not found:
        raise OSError(0, "it is not in /etc/hosts")
    return found


def chooses(setting: str, name: str) -> bool:
    """Say whether NCCL's way to choose takes an interface, or a port of an adapter.

    A list of beginnings; of whole names after ``=``, and of what not to take after
    ``^``. An adapter may be followed by a colon and the port: ``mlx5_0:1``.

    Source: NCCL's documentation of ``NCCL_SOCKET_IFNAME`` and ``NCCL_IB_HCA``.
    """
    is_excluding = setting.startswith("^")
    listed = setting.removeprefix("^")
    is_whole = listed.startswith("=")
    adapter, _, port = name.partition(":")
    is_listed = False
    for entry in listed.removeprefix("=").split(","):
        begin, _, wanted_port = entry.strip().partition(":")
        fits = adapter == begin if is_whole else adapter.startswith(begin)
        if begin and fits and wanted_port in ("", port):
            is_listed = True
    return is_listed != is_excluding


@each_host(
    Family.NETWORK,
    WARN,
    f"""host-name: the host's own name leads to an address that others reach
    reads: the addresses of the host's name by the C library's resolver, and its own
        addresses; nothing where {_GLOO} is set
    threshold: the first address that is this host's is neither loopback nor a container
        bridge's
    source: Gloo listens at what the host's name resolves to, or at loopback; a warning,
        for ronde run names the interface instead
    fix: Correct /etc/hosts, or export {_GLOO} (ronde run does).
    needs: several hosts
    why: Started by torchrun or mpirun, ranks of Gloo listen at loopback without a word;
        those of other hosts connect to themselves or are refused.
    """,
    _OWN_NAME,
    _INTERFACES,
    _VARIABLES,
    besides=(ADDRESS,),
)
def _host_name(values: Values, fleet: Fleet) -> Iterator[Problem]:
    # With the variable nobody asks for the name.
    if len(fleet.hosts) < 2 or values[_VARIABLES].get(_GLOO):
        return
    interfaces: Interfaces = values[_INTERFACES]
    own = values[_OWN_NAME]
    if what := _unreached_name(own, interfaces):
        name, address = own["name"], values.get(ADDRESS) or "ITS_ADDRESS"
        own_one = (i for i, e in interfaces.items() if address in e["addresses"])
        fix = (
            f"In /etc/hosts there, let the only line with {name} be: {address} {name}. "
            f"Or export {_GLOO}={next(own_one, 'eth0')} (ronde run does)."
        )
        yield Problem(what, fix=fix)


def _unreached_name(own: Mapping[str, Any], interfaces: Interfaces) -> str:
    name = own["name"]
    if own["error"]:
        return f"its name {name} does not resolve: {own['error']}"
    at = {address: i for i, each in interfaces.items() for address in each["addresses"]}
    # A program that listens takes the first that is this host's.
    first = next((a for a in own["addresses"] if a in at or is_loopback(a)), "")
    leads = f"its name {name} resolves to"
    if is_loopback(first):
        return f"{leads} {first}, which no other host reaches"
    if _OF_CONTAINERS.fullmatch(at.get(first, "")):
        return f"{leads} {first} of {at[first]}, for containers here"
    if at and not first:
        named = ", ".join(own["addresses"]) or "nothing"
        return f"{leads} {named}, no address of this host"
    return ""


@each_host(
    Family.NETWORK,
    FAIL,
    f"""chosen-interface: the interface that variables choose is there
    reads: {", ".join((*_BY_PREFIX, *_BY_NAME))}
    threshold: an interface fits, which is not for this host alone and has an address;
        of a list of Gloo's each is there
    source: NCCL's and Gloo's documentation of the variables
    fix: Unset the variable, or name an interface of this host: ip -br address.
    why: Ranks find no interface and end at once, or listen where nobody comes.
    """,
    _INTERFACES,
    _VARIABLES,
)
def _chosen_interface(values: Values, fleet: Fleet) -> Iterator[Problem]:
    for variable, setting in values[_VARIABLES].items():
        if setting and variable in (*_BY_PREFIX, *_BY_NAME):
            is_alone = len(fleet.hosts) < 2
            if what := _wrong_choice(
                variable, setting, values[_INTERFACES], is_alone=is_alone
            ):
                yield Problem(f"{variable}={setting}{what}")


def _wrong_choice(
    variable: str, setting: str, interfaces: Interfaces, *, is_alone: bool
) -> str:
    if variable in _BY_PREFIX:
        chosen = [name for name in interfaces if chooses(setting, name)]
    else:
        chosen = setting.split(",")
        # Each of them has to be there.
        missing = [name for name in chosen if name not in interfaces]
        if missing:
            return f": no {', '.join(missing)} is among {', '.join(interfaces)}"
    if not chosen:
        return f" fits no interface here: {', '.join(interfaces)}"
    if is_alone or setting.startswith("^"):
        return ""
    why = _unreached(chosen, interfaces)
    return f" takes {', '.join(chosen)} alone, which {why}" if why else ""


def _unreached(names: Sequence[str], interfaces: Interfaces) -> str:
    """Return why no other host comes by any of some interfaces; empty if one may."""
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
    """Yield what is slower than the one of the same name on most other hosts.

    In a draw the fastest counts: no interface is faster than it should be.

    Args:
        fleet: The hosts.
        fact: Its values are objects by the name of an interface or port.
        pick: Returns the Mbit/s of one; 0 leaves it out.

    Yields:
        The name of the interface or port, and the problem.
    """
    hosts = fleet.known(fact)
    for name in dict.fromkeys(name for each in hosts.values() for name in each):
        rates = {h: pick(each[name]) for h, each in hosts.items() if name in each}
        counts = Counter(rate for rate in rates.values() if rate)
        usual = max(counts, key=lambda rate: (counts[rate], rate), default=0)
        num = counts[usual]
        for host, rate in rates.items():
            if 0 < rate < usual:
                what = f"{name} runs at {rate / 1000:g} Gbit/s"
                others = f"{usual / 1000:g} Gbit/s on {num} host{'s' * (num > 1)}"
                yield name, Problem(what, usual=others, host=host)


@check(
    Family.NETWORK,
    WARN,
    """link-speed: links run as fast as on the other hosts
    reads: /sys/class/net/*/speed of physical interfaces that are up
    threshold: what the interface of the same name has on most hosts
    source: most hosts' speed; where two speeds are equally many, the faster one
    fix: ethtool INTERFACE: look at speed and errors; then cable and switch port.
    needs: several hosts
    why: The slowest link sets the pace of every reduction.
    """,
    _INTERFACES,
)
def _link_speed(fleet: Fleet) -> Iterator[Problem]:
    def pick(interface: dict[str, Any]) -> int:
        is_link = interface["kind"] == "physical" and interface["state"] == "up"
        return interface["mbit_per_s"] if is_link else 0

    for name, problem in find_slower(fleet, _INTERFACES, pick):
        fix = f"ethtool {name}: look at speed and errors; then cable and switch port."
        yield problem._replace(fix=fix)


@each_host(
    Family.NETWORK,
    WARN,
    f"""link-flaps: links stay up
    reads: carrier_changes of physical interfaces and link_downed of RDMA ports since
        the start, over the uptime
    threshold: at most {MAX_DOWNS_A_DAY} times a day, the first day whole
    source: Azure's node health checks drain a host at five flaps in 24 hours
    fix: Look when it was: journalctl -k | grep -i 'link is'. Then cable, transceiver
        and switch port; drain the host while it goes on.
    why: A link that goes away for seconds ends a run, or stops it for minutes.
    """,
    _INTERFACES,
    _UPTIME,
)
def _link_flaps(values: Values, _: Fleet) -> Iterator[Problem]:
    days = max(1.0, values[_UPTIME] / _DAY_S)
    # Each time a link goes down it comes up again.
    downs: dict[str, int] = {
        name: interface["carrier_changes"] // 2
        for name, interface in values[_INTERFACES].items()
        if interface["kind"] == "physical"
    }
    downs |= {name: port["downs"] for name, port in values.get(_PORTS, {}).items()}
    for name, number in downs.items():
        if number > MAX_DOWNS_A_DAY * days:
            yield Problem(f"{name} went down {number} times in {days:.3g} days or less")
