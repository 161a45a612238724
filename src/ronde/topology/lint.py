"""Find faults in hosts and topology files, and the bandwidth that they cost."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

from ronde.topology.cpu_sets import format_list
from ronde.topology.graph import (
    UNKNOWN,
    Diagnostic,
    GpuDevice,
    HostTopology,
    LinkKind,
    NetPort,
    NetworkSwitch,
    PciDevice,
)
from ronde.topology.limits import pci_figures
from ronde.topology.lint_rules import CATALOGUE, Hit, hit
from ronde.topology.paths import speeds
from ronde.topology.paths.network import Path, PathKind, bridges_above, find_paths
from ronde.units import grouped, list_first

_TINY_GB_PER_S = 1.0
_SWITCH_CLASS = 0x068000
_USB = 0x0C03
_MAX_REMARKS = 8
_MOST_GPUS = 8
_OTHERS, _MODEL = "other GPUs of this host have", "its model has"
# Compute capability of the last chip with a known number of NVLinks.
_LATEST_SM = 103
_RATES = (1000, 2500, 5000, 10000, 25000, 40000, 50000, 56000, 100000, 200000, 400000)
_HIGHEST = 1_600_000
# Slower adapters rarely support GPUDirect RDMA.
_RDMA_MBIT_PER_S = 25_000
_RDMA_NAMES = ("mlx5_", "cxi", "bnxt_re", "rdmap", "ionic_")
# Rates of healthy adapters on a host differ by less than this factor.
_FAR_SLOWER = 16
# First models of Intel's family 6 with lanes of that many GT/s: Ice Lake and Sapphire
# Rapids.
_FIRST_MODELS = ((16.0, 0x6A), (32.0, 0x8F))


def lint_host(host: HostTopology) -> tuple[Diagnostic, ...]:
    """Return the findings about a host, in the order of the rules."""
    view = HostRules(host)
    return tuple(
        found.describe(rule)
        for rule in CATALOGUE["a host"]
        for found in getattr(view, rule.replace("-", "_"))()
    )


def lint_fleet(hosts: Sequence[HostTopology]) -> tuple[Diagnostic, ...]:
    """Return findings about hosts that differ from most others.

    Each rule compares one quantity, such as the number of GPUs, where it is known.
    """
    return tuple(
        found.describe(rule)
        for rule, measure in _MEASURES.items()
        for found in _odd_hosts([(host.name, *measure(host)) for host in hosts])
    )


def lint_switches(switches: Sequence[NetworkSwitch]) -> tuple[Diagnostic, ...]:
    """Return findings about hosts that several leaf switches list."""
    leaves = [switch for switch in switches if not switch.switches]
    names_at = grouped((host, leaf.name) for leaf in leaves for host in leaf.hosts)
    shared = {host: names for host, names in names_at.items() if len(names) > 1}
    hosts_at = grouped((", ".join(names), host) for host, names in shared.items())
    return tuple(
        hit(names, hosts=list_first(hosts)).describe("host-at-two-switches")
        for names, hosts in hosts_at.items()
    )


def unseen_facts(hosts: Sequence[HostTopology]) -> tuple[str, ...]:
    """Return the facts that cannot be checked, because some hosts do not show them."""
    unseen = Counter(fact for host in hosts for fact in _unseen(host))
    return tuple(
        fact if num == len(hosts) else f"{fact} ({num} of {len(hosts)} hosts)"
        for fact, num in unseen.items()
    )


def _unseen(host: HostTopology) -> Iterator[str]:
    devices, gpus = host.devices, host.gpus
    has_links = any(each.speed or each.gb_per_s for each in devices)
    is_lspci = any(source.startswith("lspci") for source in host.sources)
    if not has_links:
        yield "PCI links" + " (sudo lspci -nnvvv -D shows them)" * is_lspci
    if has_links and not any(each.speed_now or each.gb_per_s for each in devices):
        yield "current speed of PCI links"
    if gpus and not host.shows_acs:
        yield "ACS"
    if len(gpus) > 1 and not host.links and all(g.nvlinks == UNKNOWN for g in gpus):
        yield "NVLinks"
    if len(gpus) > 1 and not any(each.peer for each in host.relations):
        yield "access between GPUs"
    if not any(port.mbit_per_s > 0 for port in host.ports):
        yield "network ports" if not host.ports else "rates of network ports"
    if not any(node.cpus for node in host.numa_nodes):
        yield "CPUs of NUMA nodes"


def _known_gb_per_s(device: PciDevice) -> float:
    """Return NCCL's figure for the link above a device; 0 if unknown."""
    is_known = bool(device.speed and device.width > 0) or device.gb_per_s > 0
    return speeds.pci_gb_per_s(device) if is_known else 0.0


def _is_alike(gpu: GpuDevice, other: GpuDevice) -> bool:
    """Return False if two GPUs are known to be of different models."""
    is_one_title = not gpu.title or not other.title or gpu.title == other.title
    return is_one_title and (gpu.sm == other.sm or UNKNOWN in (gpu.sm, other.sm))


def _is_tiny(device: PciDevice) -> bool:
    return 0 < _known_gb_per_s(device) < _TINY_GB_PER_S


def _is_rdma(port: NetPort) -> bool:
    return port.kind == "infiniband" or port.title.startswith(_RDMA_NAMES)


def _has_likely_rate(port: NetPort) -> bool:
    """Return True if one to four bonded hardware ports can have a port's rate."""
    return 0 < port.mbit_per_s <= _HIGHEST and any(
        port.mbit_per_s == rate * num for rate in _RATES for num in (1, 2, 3, 4)
    )


class HostView:
    """A host, with indexes of its devices, ports, links and paths for the rules."""

    def __init__(self, host: HostTopology) -> None:
        # NCCL plans with the maximum rates; ``trained_down`` checks the current ones.
        able = [d._replace(speed_now="", width_now=UNKNOWN) for d in host.devices]
        self.devices = {device.bus_id: device for device in able}
        # The interface to a management processor is behind a USB controller.
        usb = {device.bus_id for device in able if device.class_code >> 8 == _USB}
        ports = tuple(port for port in host.ports if port.bus_id not in usb)
        self.running = host.devices
        self.host = host = host._replace(devices=tuple(able), ports=ports)
        self.paths = find_paths(host)
        self.gpus = {gpu.name: gpu for gpu in host.gpus}
        # The ports of each adapter, by bus address.
        self.ports = grouped((port.bus_id, port) for port in ports if port.bus_id)
        # NVLink and xGMI links, by source GPU.
        kinds = LinkKind.NVLINK, LinkKind.XGMI
        self.links = grouped((k.source, k) for k in host.links if k.kind in kinds)
        # GPUs and adapters below each bridge.
        self.ends = grouped(
            (bridge.bus_id, self.devices[bus_id])
            for bus_id in dict.fromkeys([*self.gpus, *self.ports])
            for bridge in bridges_above(self.devices, bus_id)[1:]
        )
        self.slow_ports = {port.name: most for port, most in self.find_slow_ports()}
        self.known = self.gpus.keys() | self.ports.keys() | self.ends.keys()

    def num_links(self, gpu: str) -> int:
        own = self.links.get(gpu, ())
        return sum(link.num_links for link in own if link.target != gpu)

    def link_rate(self, name: str) -> float:
        """Return NCCL's GB/s for one direct link of a GPU; 0 if its chip is unknown."""
        gpu = self.gpus.get(name)
        if gpu and gpu.gcn:
            return speeds.xgmi_gb_per_s(gpu.gcn)
        return speeds.nvlink_gb_per_s(gpu.sm) if gpu and gpu.sm > 0 else 0.0

    def bus_rate(self, name: str) -> float:
        """Return the highest known GB/s from a GPU to any other; 0 if none is known."""
        others = (gpu.name for gpu in self.host.gpus if gpu.name != name)
        ways = filter(None, (self.paths.between(name, other) for other in others))
        return max((w.gb_per_s for w in ways if self.paths.is_known(w)), default=0.0)

    def is_as_narrow(self, now: PciDevice) -> bool:
        """Return True if a GPU lacks PCI lanes, and so do all GPUs of its model."""
        gpu, gpus = self.gpus[now.bus_id], self.gpus
        own = [d for d in self.running if d.bus_id in gpus]
        alike = (d.width_now for d in own if _is_alike(gpu, gpus[d.bus_id]))
        return max(alike, default=0) <= now.width < self.devices[now.bus_id].width

    def root_speed(self) -> float:
        """Return the GT/s of the fastest link right below a processor; 0 if unknown."""
        roots = (device for device in self.host.devices if not device.parent)
        return max((speeds.gt_per_s(each.speed) for each in roots), default=0.0)

    def ways(self) -> Iterator[tuple[str, list[tuple[NetPort, Path]]]]:
        """Yield GPUs with the paths to all ports that can carry a job's traffic."""
        paired = self.host.paired
        up = [port for port in self.host.ports if port.is_up]
        ports = [port for port in up if port.bus_id or port.name in paired]
        fastest = max((port.mbit_per_s for port in ports), default=0)
        # Ports for management are slower.
        slow = self.slow_ports
        fast = [p for p in ports if 2 * p.mbit_per_s >= fastest or p.name in slow]
        for gpu in self.gpus:
            ways = [(p, way) for p in fast if (way := self.paths.between(gpu, p.name))]
            if ways:
                yield gpu, ways

    def find_slow_ports(self) -> Iterator[tuple[NetPort, int]]:
        """Yield RDMA ports slower than the host's usual Mb/s, with that rate."""
        rdma = [
            p for p in self.host.ports if p.is_up and p.mbit_per_s > 0 and _is_rdma(p)
        ]
        near: dict[str, list[NetPort]] = {}
        for gpu in self.gpus:
            ways = ((p, self.paths.between(gpu, p.name)) for p in rdma if p.bus_id)
            near[gpu] = [p for p, way in ways if way and way.kind <= PathKind.PXB]
        alone = {own[0].name for own in near.values() if len(own) == 1}
        for port in rdma:
            own = [p for p in rdma if p.kind == port.kind]
            rates = Counter(each.mbit_per_s for each in own)
            usual, num = max(rates.items(), key=lambda item: item[::-1])
            # A slower adapter may be for storage, unless it is the only one near a GPU.
            is_odd = port.name in alone and all(len(o) == 1 for o in near.values())
            is_far = _FAR_SLOWER * port.mbit_per_s <= usual
            has_one_lane = port.state.startswith("1X")
            is_slow = port.mbit_per_s < usual and _has_likely_rate(port)
            if 2 * num > len(own) and is_slow and (is_odd or is_far or has_one_lane):
                yield port, usual


class HostRules(HostView):
    """The rules for one host. Each rule is a method."""

    def device_lost(self) -> Iterator[Hit]:
        for bus_id in [*self.gpus, *self.ports]:
            if bus_id in self.devices and self.devices[bus_id].is_lost:
                yield hit(bus_id)

    def slow_bridge(self) -> Iterator[Hit]:
        for bus_id, ends in self.ends.items():
            bridge = self.devices[bus_id]
            has = _known_gb_per_s(bridge)
            # hwloc gives a port the rate of the link below it.
            farther = [end for end in ends if bridge.speed or end.parent != bus_id]
            should = max(map(_known_gb_per_s, farther), default=0.0)
            if 0 < has < should and not _is_tiny(bridge):
                # Slow only by its generation, and no slot of the host is newer.
                is_as_built = (
                    2 * has >= should
                    and all(end.width <= bridge.width for end in farther)
                    and self.root_speed() <= speeds.gt_per_s(bridge.speed)
                )
                form = ".as-built" if is_as_built else ""
                link = speeds.link_words(bridge)
                yield hit(bus_id, has, should, link=link, form=form)

    def tiny_link(self) -> Iterator[Hit]:
        # A GPU in one package with its processor does not need the PCI bus.
        packaged = [link for link in self.host.links if link.kind is LinkKind.C2C]
        inside = {end for link in packaged for end in (link.source, link.target)}
        gpus = [gpu for gpu in self.gpus if gpu in self.devices and gpu not in inside]
        above = [b for b, e in self.ends.items() if any(d.bus_id in gpus for d in e)]
        for device in (self.devices[bus_id] for bus_id in [*gpus, *above]):
            if _is_tiny(device):
                has = _known_gb_per_s(device)
                yield hit(device.name, has, link=speeds.link_words(device))

    def unknown_link_speed(self) -> Iterator[Hit]:
        for device in (d for d in self.host.devices if d.bus_id in self.known):
            # Without both, the source shows no links. Clouds' files have 0 lanes, which
            # NCCL takes for 16; an empty speed is wrong.
            is_given = device.width >= 0 or device.speed
            if is_given and not speeds.gt_per_s(device.speed) and not device.gb_per_s:
                has, link = speeds.pci_gb_per_s(device), speeds.link_words(device)
                yield hit(device.name, has, link=link)

    def trained_down(self) -> Iterator[Hit]:
        for device in (d for d in self.running if d.bus_id in self.known):
            now = device._replace(
                speed=device.speed_now or device.speed,
                width=device.width_now if device.width_now > 0 else device.width,
            )
            has, should = (
                speeds.pci_theory_gb_per_s(each.speed, each.width)
                for each in (now, device)
            )
            if 0 < has < should:
                words = {"form": ".at-rest" if speeds.is_at_rest(device) else ""}
                if not (words["form"] or device.parent) and now.bus_id in self.gpus:
                    words["form"] = ".alike" if self.is_as_narrow(now) else ".unlike"
                words["now"], words["link"] = map(speeds.link_words, (now, device))
                words["able"] = "both ends can do" if device.parent else "its most is"
                yield hit(device.name, has, should, **words)

    def uneven_gpu_link(self) -> Iterator[Hit]:
        rates = {
            gpu.name: _known_gb_per_s(self.devices[gpu.name])
            for gpu in self.host.gpus
            if gpu.name in self.devices
        }
        for name, has in rates.items():
            alike = [n for n in rates if _is_alike(self.gpus[name], self.gpus[n])]
            should = max(rates[other] for other in alike)
            best = [other for other in alike if rates[other] == should]
            if _TINY_GB_PER_S <= has < should and 2 * len(best) > len(alike):
                link, most = (self.devices[each] for each in (name, best[0]))
                words = {"link": speeds.link_words(link)}
                yield hit(name, has, should, **words, others=speeds.link_words(most))

    def link_to_itself(self) -> Iterator[Hit]:
        for name, links in self.links.items():
            own = [link.num_links for link in links if link.target == name]
            if own:
                has, should = self.bus_rate(name), sum(own) * self.link_rate(name)
                yield hit(name, has, should, num=sum(own))

    def gpu_listed_as_switch(self) -> Iterator[Hit]:
        for name, links in self.links.items():
            to_gpus = [link for link in links if link.target in self.gpus]
            wrong = [x.num_links for x in to_gpus if x.target_class == _SWITCH_CLASS]
            if wrong:
                yield hit(name, num_gpus=len(wrong), num=sum(wrong))

    def too_many_nvlinks(self) -> Iterator[Hit]:
        for gpu in self.gpus.values():
            num, most = self.num_links(gpu.name), speeds.max_nvlinks(gpu.sm)
            # The numbers of later chips are unknown.
            is_known = 0 < gpu.sm <= _LATEST_SM and not gpu.gcn
            if is_known and 0 < most < num:
                has, should = (n * speeds.nvlink_gb_per_s(gpu.sm) for n in (num, most))
                cap = f", over its cap of {speeds.LOCAL_GB_PER_S:g}"
                cap = cap if has > speeds.LOCAL_GB_PER_S else ""
                words = {"num": num, "sm": gpu.sm, "most": most, "cap": cap}
                yield hit(gpu.name, has, should, **words)

    def num_up(self, gpu: GpuDevice) -> int:
        """Return the source's count of a GPU's active links, else the number listed."""
        return gpu.nvlinks if gpu.nvlinks != UNKNOWN else self.num_links(gpu.name)

    def gpu_without_links(self) -> Iterator[Hit]:
        linked = [gpu for gpu in self.host.gpus if self.num_up(gpu)]
        for gpu in self.host.gpus:
            alike = [other for other in linked if _is_alike(gpu, other)]
            named = [each for each in self.host.gpus if _is_alike(gpu, each)]
            of_board = max(map(speeds.board_nvlinks, named), default=0)
            # A virtual machine may have one GPU of a board, and before NVSwitch two
            # GPUs without a link between them.
            is_enough = len(self.host.gpus) >= (2 if gpu.sm >= 80 else _MOST_GPUS)
            has_lost_all = of_board and gpu.nvlinks == 0 and is_enough
            if gpu in linked or not (alike or has_lost_all):
                continue
            most = max(map(self.num_up, alike), default=of_board)
            # Links of an unknown chip have the rate of a known one.
            rate = max(self.link_rate(each.name) for each in named)
            words = {"others": _OTHERS if alike else _MODEL, "most": most}
            words["form"] = "" if of_board or not gpu.title else ".bridge"
            words["form"] = words["form"] if linked else ".all"
            yield hit(gpu.name, self.bus_rate(gpu.name), most * rate, **words)

    def uneven_nvlinks(self) -> Iterator[Hit]:
        up = [gpu for gpu in self.gpus.values() if self.num_up(gpu) and not gpu.gcn]
        peers = {
            name: {link.target for link in own if link.kind is LinkKind.XGMI}
            for name, own in self.links.items()
        }
        up = [gpu for gpu in up if not peers.get(gpu.name)]
        most = len(self.gpus) - 1
        joined = [name for name, own in peers.items() if len(own) == most]
        # Some AMD hosts do not connect their GPUs; others connect each pair.
        for name, own in peers.items() if 2 * len(joined) > len(self.gpus) else ():
            if len(own) < most:
                words = {"num": len(own), "most": most, "kind": "xGMI link"}
                yield hit(name, 0.0, 0.0, others=_OTHERS, form=".xgmi", **words)
        pairs = [k for own in self.links.values() for k in own if k.target in self.gpus]
        # Before NVSwitch, one or two links connect a GPU to some of seven others. In
        # a part of such a host the numbers differ.
        is_part = max((link.num_links for link in pairs), default=9) <= 2
        is_part = is_part and len(self.gpus) < _MOST_GPUS
        for gpu in up:
            num = self.num_up(gpu)
            others = max(self.num_up(each) for each in up if _is_alike(gpu, each))
            # Before A100 boards need not use all links.
            is_whole = gpu.nvlinks != UNKNOWN and gpu.sm >= 80
            most = max(others, speeds.board_nvlinks(gpu) if is_whole else 0)
            if num < most and not (is_part and gpu.nvlinks == UNKNOWN):
                has, should = (n * self.link_rate(gpu.name) for n in (num, most))
                words = {"others": _OTHERS if most == others else _MODEL}
                words["kind"] = "NVLink"
                words["form"] = ".badly" if 2 * num < most else ""
                yield hit(gpu.name, has, should, num=num, most=most, **words)

    def no_peer_access(self) -> Iterator[Hit]:
        peers = {(r.source, r.target): r.peer for r in self.host.relations}
        # A source may list one of two equal directions.
        peers |= {e[::-1]: peer for e, peer in peers.items() if e[::-1] not in peers}
        bad: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for (source, target), peer in peers.items():
            if peer not in ("", "OK", "X", "U") and source != target:
                bad[source][peer] += 1
        is_asked = "NVML" in self.host.sources
        for gpu in self.host.gpus:
            words = bad[gpu.name]
            counts = ", ".join(f"{word} for {n}" for word, n in sorted(words.items()))
            form = ".unsure" if words.keys() == {"NS"} and not is_asked else ""
            if words:
                yield hit(gpu.name, counts=counts, form=form)

    def acs_redirects(self) -> Iterator[Hit]:
        for bus_id, ends in self.ends.items():
            has_gpu = any(end.bus_id in self.gpus for end in ends)
            if has_gpu and self.devices[bus_id].is_redirecting:
                ports = self.devices[bus_id].redirecting_ports or (bus_id,)
                lines = [f"setpci -s {port} ECAP_ACS+6.w=0000" for port in ports]
                yield hit(bus_id, ports=", ".join(ports), lines="; ".join(lines))

    def nic_faster_than_link(self) -> Iterator[Hit]:
        for bus_id, ports in self.ports.items():
            device = self.devices.get(bus_id)
            figures = pci_figures(device) if device else None
            if device is None or figures is None:
                continue
            likely = [port for port in ports if port.is_up and _has_likely_rate(port)]
            should = sum(map(speeds.port_gb_per_s, likely))
            has, form = figures.theory, ""
            if has == math.inf:
                # Virtual machines report this for links that do not exist.
                has, form = figures.practical, ".virtual"
            if has < should:
                words = {"link": f"{device.speed} x{device.width}", "form": form}
                num, planned = len(ports), _known_gb_per_s(device)
                words["ports"] = f"{num} ports carry" if num > 1 else "port carries"
                yield hit(bus_id, has, should, **words, planned=planned)

    def odd_nic_speed(self) -> Iterator[Hit]:
        for port in self.host.ports:
            given = port.mbit_per_s
            # Only NCCL's files have numbers of ports, and rates written by hand.
            is_written = port.bus_id and port.number != UNKNOWN
            if is_written and given > 0 and not _has_likely_rate(port):
                # Rates higher than any hardware's are in kb/s.
                is_huge = given > _HIGHEST
                wanted = given / 1000 if is_huge else given
                nearest = min(_RATES, key=lambda rate: abs(rate - wanted))
                planned, meant = speeds.port_gb_per_s(port), nearest / 8000
                guess = ": it looks like kb/s" if is_huge else ""
                words = {"given": given, "planned": planned, "guess": guess}
                rates = (0.0, 0.0) if is_huge else (planned, meant)
                yield hit(port.name, *rates, nearest=nearest, meant=meant, **words)

    def slow_nic(self) -> Iterator[Hit]:
        for port in self.host.ports:
            if most := self.slow_ports.get(port.name):
                rate, usual = port.mbit_per_s / 1000, most / 1000
                lanes = f" ({port.state})" if port.state else ""
                gb_per_s = speeds.port_gb_per_s(port), most / 8000
                yield hit(port.name, *gb_per_s, rate=rate, most=usual, lanes=lanes)

    def nic_down(self) -> Iterator[Hit]:
        # Ports of a card may be functions of one device.
        up = [port for port in self.host.ports if port.is_up]
        up_at = {port.bus_id[:-2] for port in up}
        for port in self.host.ports:
            is_infiniband = port.kind == "infiniband"
            # The kernel reports the lowest rate for a port without link.
            alike = [each.mbit_per_s for each in up if each.kind == port.kind]
            mbit_per_s = max(alike, default=0) if is_infiniband else port.mbit_per_s
            rate = f"{mbit_per_s / 8000:g} GB/s" if mbit_per_s > 0 else "its rate"
            state = f" ({port.state})" if port.state else ""
            if port.bus_id and not port.is_up:
                # Second ports and management Ethernet often have no cable.
                is_loss = is_infiniband and port.bus_id[:-2] not in up_at
                form = ".lost" if is_loss else ""
                form = ".init" if port.state.startswith(("INIT", "ARMED")) else form
                if form or not port.state.endswith(("Disabled", "Sleep")):
                    yield hit(port.name, rate=rate, state=state, form=form)

    def virtual_nic(self) -> Iterator[Hit]:
        for port in self.host.ports:
            if port.is_virtual:
                yield hit(port.name)

    def no_gpudirect(self) -> Iterator[Hit]:
        rdma = [port for port in self.host.ports if _is_rdma(port)]
        has_any = any(port.gdr == 1 for port in self.host.ports)
        form = ".amd" if any(gpu.gcn for gpu in self.host.gpus) else ""
        for gpu in self.host.gpus if has_any else ():
            if gpu.gdr == 0:
                others = ", and on for adapters"
                yield hit(gpu.name, noun="GPU", others=others, form=form)
        for port in rdma if self.gpus and not has_any else ():
            if port.gdr == 0:
                yield hit(port.name, noun="port", others="", form=form)

    def far_nic(self) -> Iterator[Hit]:
        for gpu, ways in self.ways():
            port, near = min(ways, key=lambda way: (way[1].kind, -way[1].gb_per_s))
            far, chosen = min(ways, key=lambda way: (-way[1].gb_per_s, way[1].kind))
            if near.kind <= PathKind.PXB < chosen.kind:
                has, should = near.gb_per_s, chosen.gb_per_s
                words = {"far": far.title, "far_kind": chosen.kind}
                words |= {"port": port.title, "kind": near.kind}
                yield hit(gpu, has, should, **words)

    def nic_behind_processor(self) -> Iterator[Hit]:
        found = dict(self.ways())
        nearest = {
            gpu: min((w for _, w in ways), key=lambda w: (w.kind, -w.gb_per_s))
            for gpu, ways in found.items()
        }
        sound = [gpu for gpu, way in nearest.items() if way.kind <= PathKind.PXB]
        for gpu, way in nearest.items():
            ports = [port for port, _ in found[gpu]]
            is_slow = 0 < max(port.mbit_per_s for port in ports) < _RDMA_MBIT_PER_S
            socket = "another socket's" if way.kind > PathKind.PHB else "its own"
            words = {"socket": socket, "kind": way.kind, "form": ""}
            # There are enough adapters, so this GPU's adapter is in a wrong slot.
            if 2 * len(sound) > len(nearest) and len(ports) > len(sound):
                words |= {"form": ".odd", "most": len(sound), "all": len(nearest)}
            is_seen = words["form"] or any(port.bus_id for port in ports)
            if way.kind > PathKind.PXN and not is_slow and is_seen:
                yield hit(gpu, way.gb_per_s, 0.0, **words)

    def no_numa_node(self) -> Iterator[Hit]:
        nodes = self.host.numa_nodes
        for node in nodes:
            if node.number < 0:
                yield hit(node.name, seen="The node's own number is -1.")
        for bus_id in [*self.gpus, *self.ports]:
            above = bridges_above(self.devices, bus_id)
            is_lost = above and all(each.node == UNKNOWN for each in above)
            if is_lost and sum(1 for node in nodes if node.cpus) > 1:
                seen = "The device's NUMA node is unknown (-1)."
                yield hit(bus_id, seen=seen)

    def shared_cores(self) -> Iterator[Hit]:
        counts = Counter(cpu for node in self.host.numa_nodes for cpu in node.cpus)
        for node in self.host.numa_nodes:
            if own := [cpu for cpu in node.cpus if counts[cpu] > 1]:
                yield hit(node.name, cpus=format_list(own))

    def uneven_cores(self) -> Iterator[Hit]:
        nodes = [node for node in self.host.numa_nodes if node.cpus]
        counts = Counter(len(node.cpus) for node in nodes)
        if len(nodes) < 3 or len(counts) != 2 or 1 not in counts.values():
            return
        (usual, _), _ = counts.most_common()
        (node,) = (node for node in nodes if len(node.cpus) != usual)
        cpus, num = format_list(node.cpus), len(node.cpus)
        yield hit(node.name, cpus=cpus, usual=usual, num=num)

    def implausible_processor(self) -> Iterator[Hit]:
        speed, nodes = self.root_speed(), self.host.numa_nodes
        for node in nodes if self.gpus else ():
            if node.vendor != "GenuineIntel" or node.model < 0:
                continue
            if node.family < 15 and node.family not in (6, UNKNOWN):
                why = "which no host of such GPUs has"
            elif any(speed >= r and node.model < m for r, m in _FIRST_MODELS):
                why = f"and links of {speed:g} GT/s below it, which it lacks"
            else:
                continue
            others = [n for n in nodes if n.number != node.number and n.cpus]
            rates = (speeds.smp_gb_per_s(node, other) for other in others)
            rate = min(rates, default=0.0)
            between = f" {rate:g} GB/s between sockets and" if rate else ""
            words = {"family": node.family, "model": node.model, "why": why}
            yield hit(node.name, rate, 0.0, between=between, **words)

    def refused_by_nccl(self) -> Iterator[Hit]:
        return _sentences(self.host.refused)

    def odd_source(self) -> Iterator[Hit]:
        return _sentences(self.host.remarks)


def _sentences(remarks: Sequence[str]) -> Iterator[Hit]:
    left = len(remarks) - _MAX_REMARKS
    more = [f"There are {left} more."] if left > 0 else []
    if remarks:
        yield hit("source", remark=" ".join([*remarks[:_MAX_REMARKS], *more]))


def _odd_hosts(measured: Sequence[tuple[str, float, float]]) -> Iterator[Hit]:
    known = [(name, num, num * rate) for name, num, rate in measured if num >= 0]
    counts = Counter(num for _, num, _ in known)
    # Of equally frequent amounts, the larger one counts as right.
    usual = max(counts, key=lambda num: (counts[num], num), default=0)
    should = max((total for _, num, total in known if num == usual), default=0.0)
    others = f"{counts[usual]} of {len(known)} nodes have {usual:g}"
    for name, num, has in known:
        if num != usual:
            words, rates = {"num": num, "others": others, "loss": ""}, (0.0, 0.0)
            if should and num < usual:
                words["loss"] = f": {has:g} instead of {should:g} GB/s"
                rates = has, should
            yield hit(name, *rates, **words)


def _fewest_nvlinks(host: HostTopology) -> tuple[float, float]:
    counts: Counter[str] = Counter()
    for link in host.links:
        if link.kind is LinkKind.NVLINK and link.source != link.target:
            counts[link.source] += link.num_links
    # More links than the chip has are an error of the source.
    totals = [
        gpu.nvlinks
        if gpu.nvlinks >= 0
        else min(counts[gpu.name], speeds.max_nvlinks(gpu.sm))
        for gpu in host.gpus
        if counts or gpu.nvlinks >= 0
    ]
    sm = max((gpu.sm for gpu in host.gpus), default=0)
    return min(totals, default=-1), speeds.nvlink_gb_per_s(sm) if sm > 0 else 0.0


def _network(host: HostTopology) -> tuple[float, float]:
    ports = [port for port in host.ports if port.bus_id]
    up = [port for port in ports if port.is_up]
    rates = [speeds.port_gb_per_s(port) for port in up if port.mbit_per_s > 0]
    # Ports for management are slower.
    total = sum(rate for rate in rates if 2 * rate >= max(rates))
    return total or (0.0 if ports and not up else -1), 1.0


def _slowest_gpu_link(host: HostTopology) -> tuple[float, float]:
    gpus = {gpu.bus_id for gpu in host.gpus}
    # Rates without speeds may be those of GPUs at rest.
    found = [d for d in host.devices if d.bus_id in gpus and d.speed]
    rates = [_known_gb_per_s(device) for device in found]
    return min((rate for rate in rates if rate), default=-1), 1.0


# The amount on a host, below 0 if unknown; and the GB/s of one unit, or 0.
_MEASURES: dict[str, Callable[[HostTopology], tuple[float, float]]] = {
    "node-gpus-differ": lambda host: (len(host.gpus), 0.0),
    "node-nvlinks-differ": _fewest_nvlinks,
    "node-network-differs": _network,
    "node-gpu-links-differ": _slowest_gpu_link,
    "node-cores-differ": lambda h: (sum(len(n.cpus) for n in h.numa_nodes) or -1, 0.0),
}
