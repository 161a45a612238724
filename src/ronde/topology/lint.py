"""What is wrong with hosts, or with the files that describe them, and what it costs."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ronde.topology.cpu_sets import format_list
from ronde.topology.graph import (
    UNKNOWN,
    Diagnostic,
    GpuDevice,
    HostTopology,
    Level,
    LinkKind,
    NetPort,
    NetworkSwitch,
    PciDevice,
)
from ronde.topology.limits import pci_figures
from ronde.topology.paths import speeds
from ronde.topology.paths.network import Path, PathKind, bridges_above, find_paths
from ronde.units import grouped, list_first

# Each: the rule, its severity (loss: an error where most of the bandwidth is lost, else
# a warning) and what it looks for; what is seen, what comes of it, what to do, with
# places for words. Below a rule are its further forms, with a word behind a dot, where
# some texts differ.
_RULES = """
slow-bridge loss a bridge whose own link is slower than that of a device below it
  seen The link above the bridge is slower ({link}) than the link of a device below it.
  so All below it share {has:g} GB/s upwards, and one has {should:g} (NCCL's figures).
  do Compare with lspci -vv: reseat the board where LnkSta is below LnkCap, correct the
     file where it has less than LnkSta; nothing, where slot or switch are older.
slow-bridge.as-built note
tiny-link error a GPU's link below 1 GB/s, as virtual machines report it
  seen The link is reported as {link}, as virtual machines do that hide the real one.
  so NCCL plans with {has:.1f} GB/s and leaves the device aside as far as it can.
  do Give NCCL_TOPO_FILE with the host's real speeds, or give the virtual root port
     x-speed and x-width; on bare metal reseat the card.
unknown-link-speed warning an empty link speed, which NCCL takes for PCIe 3
  seen The link speed is unknown ({link}).
  so NCCL takes it for {has:g} GB/s: PCIe 3 x16 is 12, PCIe 4 x16 24, PCIe 5 x16 48.
  do Write what lspci -vv shows on the bare machine, such as link_speed="16.0 GT/s PCIe"
     link_width="16".
trained-down loss a link that runs below what both of its ends can do
  seen The link runs at {now} and both ends can do {link}.
  so It carries {has:.4g} of {should:.4g} GB/s (PCIe's limit one way).
  do Reseat the card or its riser, look for errors in dmesg (AER), and look at the
     slot's setting in the firmware.
trained-down.at-rest note
  do Look again under load: GPUs lower the speed at rest.
link-to-itself error NVLink or xGMI that leads from a GPU to itself
  seen {num} links between GPUs lead from the GPU to itself.
  so They connect it to no other GPU{loss}.
  do Write the bus address of the other GPU as target; nvidia-smi nvlink -R shows it.
gpu-listed-as-switch error NVLink to a GPU whose class is given as that of a switch
  seen NVLinks lead to {num_gpus} GPUs that are listed as NVLink switches (0x068000).
  so NCCL takes all {num} for links into one switch and adds them up.
  do Write one line, target="fffffff:ff:ff.0", tclass="0x068000" and the GPU's own
     number of links, where there are switches; else tclass="0x030200".
too-many-nvlinks error more NVLinks than the chip has
  seen {num} NVLinks are listed, and the chip (sm {sm}) has {most}.
  so NCCL chooses algorithms for {has:.1f} GB/s{cap}, where {should:.1f} exist.
  do Let the counts of one GPU add up to what nvidia-smi nvlink -s shows.
gpu-without-links error a GPU without NVLink or xGMI where others or its model have it
  seen The GPU has no links to other GPUs, and {others} {most}.
  so Every ring through it falls back to the PCI bus{loss}.
  do Look at nvidia-smi nvlink -s and, with switches, at the fabric manager: systemctl
     status nvidia-fabricmanager. Reset or replace the GPU, or leave it out.
gpu-without-links.bridge note
  do Put a bridge on, if these GPUs are to work together.
uneven-nvlinks warning a GPU with fewer NVLinks than others of its kind
  seen {num} NVLinks are up, and {others} {most}.
  so Collectives run at the slowest GPU's rate{loss}.
  do Find links that are down or count errors: nvidia-smi nvlink -s, -e; reset the GPU.
uneven-nvlinks.badly error
no-peer-access warning GPUs that may not reach each other's memory
  seen The driver does not let it reach the memory of other GPUs ({counts}).
  so NCCL copies through the host's shared memory instead.
  do CNS: the chipset does not; TNS: no bus between them does; GNS: this kind of GPU
     does not. Let the virtual machine's host pass it on; switch ACS off on bridges.
no-peer-access.unsure note
  do Look at nvidia-smi topo -p2p r: NS is normal in the tables of -p2p a, and of -p2p n
     where there is no NVLink.
acs-redirects warning a switch above a GPU that ACS makes send traffic to the processor
  seen ACS is on: what devices below the switch write to each other goes up first.
  so Peer access and GPUDirect RDMA go through the processor: they are slow, or hang.
  do On bare metal switch ACS off in the firmware, or by setpci on each bridge (NCCL's
     troubleshooting guide has the line); a hypervisor needs it for its machines.
nic-faster-than-link loss a network adapter that carries more than its PCI link
  seen The adapter's {num} port(s) carry {should:.4g} GB/s, its PCI link ({link})
     {has:.4g} (PCIe's limit).
  so The adapter is held to {has:.4g} GB/s; NCCL plans with {planned:g}.
  do Move the adapter to a wider or newer slot, or use fewer of its ports; correct the
     file where adapters with links of their own are listed as one.
nic-faster-than-link.virtual warning
  seen The adapter's {num} port(s) carry {should:.4g} GB/s. Its PCI link ({link}) is
     none: the adapter is listed as a host bridge, or with the slowest link there is.
  so NCCL plans with {has:g} GB/s through this adapter, whatever it carries.
  do Correct the file: a link of its own for each adapter, as the bare machine has it.
odd-nic-speed warning a port's speed that no hardware has
  seen Its speed is given as {given} Mb/s, which no port has{guess}.
  so NCCL plans with {planned:g} GB/s for it; {nearest} Mb/s would be {meant:g}.
  do Write the rate in /sys/class/infiniband/*/ports/1/rate, in Mb/s.
nic-down note a port of an adapter without link
  seen The port has no link.
  so NCCL does not use it: the node has {rate} less.
  do Look at ibstat or ip link, at the cable and at the switch's port.
nic-down.lost warning
virtual-nic note a virtual interface among the network adapters
  seen A virtual interface is among the network adapters.
  so NCCL may choose it, and other hosts cannot be reached over it.
  do Leave it out: NCCL_SOCKET_IFNAME=^lo,docker,veth,virbr, or name the right one.
no-gpudirect warning a GPU whose memory adapters cannot reach though they could others'
  seen GPUDirect RDMA is off for the GPU (gdr 0), and on for adapters.
  so Every byte of the network goes through the host's memory, twice over the PCI bus.
  do Load nvidia_peermem or use a kernel and driver with DMA-BUF (for AMD: a kernel with
     peer memory), and write the file anew.
far-nic loss a GPU for which NCCL prefers a far network adapter to a near one
  seen NCCL chooses {far} ({far_kind}), and {port} is nearer ({kind}).
  so It prefers {should:g} GB/s to {has:g}, and beyond PXB there is no GPUDirect RDMA.
  do Look why the way to the near adapter is slow (slow-bridge, trained-down,
     odd-nic-speed), or name the adapters in NCCL_IB_HCA.
nic-behind-processor note a GPU without a network adapter on its own PCI switch
  seen Its nearest network adapter is behind {place} processor ({kind}).
  so Up to {has:g} GB/s (NCCL's figure), through the host's memory: by default NCCL
     uses GPUDirect RDMA up to PXB alone.
  do Write the switches in, where a virtual machine's file leaves them out; else place
     adapters at every socket, or try NCCL_NET_GDR_LEVEL=PHB for those at its own.
no-numa-node warning a device or processor whose NUMA node is -1
  seen {what}
  so NCCL takes all such devices as next to one processor, and nothing is bound near.
  do Switch NUMA on in the firmware, or give the virtual machine its host's nodes; in a
     file write the numaid.
shared-cores warning cores that two NUMA nodes claim
  seen Its CPUs {cpus} are another node's, too.
  so The threads of all these nodes' devices share these CPUs, far from most devices.
  do Write each node's own cores; /sys/devices/system/node/node*/cpumap has them.
uneven-cores note one NUMA node with another number of cores
  seen It has {num} CPUs ({cpus}), and every other node has {usual}.
  so Its devices have another share of CPUs; in a file, the mask often lacks a digit.
  do Compare with /sys/devices/system/node/node*/cpumap.
implausible-processor warning a processor that is too old for the links below it
  seen The processor is given as Intel family {family} model {model}, {why}.
  so One of both is wrong, and NCCL believes both:{between} the given speed.
  do Show the virtual machine its host's model (QEMU: -cpu host), or correct modelid or
     link_speed in the file; from Sapphire Rapids on NCCL counts 22 or 40 GB/s.
refused-by-nccl error what NCCL refuses in its topology file
  seen {remark}
  so NCCL ends with an error when it reads the file, and so does the job.
  do Add what is missing, or write the file anew with NCCL_TOPO_DUMP_FILE.
odd-source note what was odd in a source
  seen {remark}
  so It was read all the same; what is shown here may not be what the source meant.
  do Correct the source, or make it anew.
host-at-two-switches warning a host below two leaf switches of Slurm's tree
  seen Both list {hosts}.
  so Slurm takes the host as near to the hosts of either, and spreads jobs over both.
  do Leave each host below the one switch that its cable leads to. A tree cannot show
     rails: there, take one switch for all leaves of a group.
node-gpus-differ loss a node with another number of GPUs than most
  seen It has {num:g} GPUs, and {others}.
  so NCCL pairs no GPUs of the nodes rank by rank: fewer channels, and slower rings.
  do Look for the missing GPU in nvidia-smi -L and dmesg (Xid 79: it fell off the bus),
     or start the same number of ranks everywhere.
node-nvlinks-differ loss a node whose GPUs have other NVLinks than most nodes'
  seen It has {num:g} NVLinks at the GPU with the fewest, and {others}.
  so All nodes run with what the weakest has, often with 2 channels{loss}.
  do Look at nvidia-smi nvlink -s and the fabric manager on that node, or leave it out.
node-network-differs loss a node whose network ports carry another sum than most
  seen It has {num:g} GB/s of network, and {others}.
  so Collectives over the nodes run at the rate of the slowest{loss}.
  do Look at ibstat or ip link on that node for ports that are down or slow.
node-gpu-links-differ loss a node whose slowest GPU link is not that of most
  seen It has {num:g} GB/s at its slowest GPU's PCI link, and {others}.
  so Copies from and to the host, and the network, run slower there{loss}.
  do Look at lspci -vv for LnkSta below LnkCap on that node.
node-cores-differ loss a node with another number of cores than most
  seen It has {num:g} hardware threads, and {others}.
  so Loading data may be slower there, and all wait for it.
  do Look at lscpu for offline cores, and at SMT in the firmware.
"""
_TINY_GB_PER_S = 1.0
_SWITCH_CLASS = 0x068000
_USB = 0x0C03
_MAX_REMARKS = 8
_MOST_GPUS = 8
_OTHERS, _MODEL = "other GPUs of this host have", "its model has"
# Compute capability of the last chip whose number of NVLinks is known.
_LATEST_SM = 103
_RATES = (1000, 2500, 5000, 10000, 25000, 40000, 50000, 56000, 100000, 200000, 400000)
_HIGHEST = 1_600_000
# Slower adapters seldom have GPUDirect RDMA.
_RDMA_MBIT_PER_S = 25_000
# Lowest model of Intel's family 6 with lanes of that many GT/s: Ice Lake, Sapphire
# Rapids.
_FIRST_MODELS = ((16.0, 0x6A), (32.0, 0x8F))


def _read(table: str) -> dict[str, dict[str, str]]:
    """Return texts by rule, or rule and form, with ``severity`` and ``meaning``."""
    found: dict[str, dict[str, str]] = {}
    own: dict[str, str] = {}
    for line in re.sub(r"\n {5}", " ", table.strip()).split("\n"):
        name, _, text = line.strip().partition(" ")
        if line.startswith("  "):
            own[name] = text
        else:
            severity, _, meaning = text.partition(" ")
            own = found[name] = {**own, "severity": severity, "meaning": meaning}
    return found


_TEXTS = _read(_RULES)
_SUBJECTS = {"node": "several hosts", "host": "switches"}
CATALOGUE: dict[str, dict[str, str]] = {"a host": {}}
"""What each rule looks for, by what it looks at and by its name."""
for _name, _rule in _TEXTS.items():
    if "." not in _name:
        _subject = _SUBJECTS.get(_name.partition("-")[0], "a host")
        CATALOGUE.setdefault(_subject, {})[_name] = _rule["meaning"]


class Hit(NamedTuple):
    """One element that a rule found to be wrong."""

    element: str
    has: float  # GB/s, as in a ``Diagnostic``; ``{has}`` and ``{should}`` in texts.
    should: float
    words: dict[str, object]  # For other places in texts; ``form``: which of several.

    def describe(self, rule: str) -> Diagnostic:
        element, has, should, words = self
        loss = f": {has:g} instead of {should:g} GB/s (NCCL's figures)"
        loss = loss if 0 < has < should else ""
        words = {"has": has, "should": should, "loss": loss, **words}
        texts = _TEXTS[rule + str(words.get("form", ""))]
        severity = texts["severity"]
        if severity == "loss":
            severity = Level.ERROR if has < should / 2 else Level.WARNING
        seen, so, do = (texts[name].format_map(words) for name in ("seen", "so", "do"))
        return Diagnostic(rule, Level(severity), element, seen, so, do, has, should)


def _hit(element: str, has: float = 0.0, should: float = 0.0, **words: object) -> Hit:
    return Hit(element, has, should, words)


def lint_host(host: HostTopology) -> tuple[Diagnostic, ...]:
    """Return what is wrong with a host, or looks so, in the order of the rules."""
    view = HostView(host)
    return tuple(
        hit.describe(rule)
        for rule in CATALOGUE["a host"]
        for hit in getattr(view, rule.replace("-", "_"))()
    )


def lint_fleet(hosts: Sequence[HostTopology]) -> tuple[Diagnostic, ...]:
    """Return in what hosts differ from what most of them are.

    Hosts whose number is unknown are left aside; fewer than two have no fleet.
    """
    return tuple(
        hit.describe(rule)
        for rule, measure in _MEASURES.items()
        for hit in _odd_hosts([(host.name, *measure(host)) for host in hosts])
    )


def lint_switches(switches: Sequence[NetworkSwitch]) -> tuple[Diagnostic, ...]:
    """Return which hosts are below two leaf switches, by pair of switches."""
    leaves = [switch for switch in switches if not switch.switches]
    names_at = grouped((host, leaf.name) for leaf in leaves for host in leaf.hosts)
    shared = {host: names for host, names in names_at.items() if len(names) > 1}
    hosts_at = grouped((", ".join(names), host) for host, names in shared.items())
    return tuple(
        _hit(names, hosts=list_first(hosts)).describe("host-at-two-switches")
        for names, hosts in hosts_at.items()
    )


def unseen_facts(hosts: Sequence[HostTopology]) -> tuple[str, ...]:
    """Return what some hosts do not show, so that no rule can judge it there."""
    unseen = Counter(fact for host in hosts for fact in _unseen(host))
    return tuple(
        fact if num == len(hosts) else f"{fact} ({num} of {len(hosts)} hosts)"
        for fact, num in unseen.items()
    )


def _unseen(host: HostTopology) -> Iterator[str]:
    devices, gpus = host.devices, host.gpus
    has_links = any(each.speed or each.gb_per_s for each in devices)
    if not has_links:
        yield "PCI links"
    if has_links and not any(each.speed_now or each.gb_per_s for each in devices):
        yield "PCI links as they run now"
    # Of lspci, root alone sees ACS and links.
    is_lspci = any(source.startswith("lspci") for source in host.sources)
    if gpus and not (is_lspci and has_links):
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
    """Return NCCL's figure for the link above a device; 0 if no source has one."""
    is_known = bool(device.speed and device.width > 0) or device.gb_per_s > 0
    return speeds.pci_gb_per_s(device) if is_known else 0.0


def _is_alike(gpu: GpuDevice, other: GpuDevice) -> bool:
    """Return whether two GPUs may be of one model, as far as it is known of both."""
    is_one_title = not gpu.title or not other.title or gpu.title == other.title
    return is_one_title and (gpu.sm == other.sm or UNKNOWN in (gpu.sm, other.sm))


def _is_tiny(device: PciDevice) -> bool:
    return 0 < _known_gb_per_s(device) < _TINY_GB_PER_S


def _has_likely_rate(port: NetPort) -> bool:
    """Whether hardware has the rate, alone or as some links that are bound together."""
    return 0 < port.mbit_per_s <= _HIGHEST and any(
        port.mbit_per_s == rate * num for rate in _RATES for num in (1, 2, 3, 4)
    )


class HostView:
    """One host with what its elements are to each other; a method a rule."""

    def __init__(self, host: HostTopology) -> None:
        # NCCL plans with what links can do; that they do less is one rule's subject.
        able = [d._replace(speed_now="", width_now=UNKNOWN) for d in host.devices]
        self.devices = {device.bus_id: device for device in able}
        # The interface of a management processor is below a controller of USB.
        usb = {device.bus_id for device in able if device.class_code >> 8 == _USB}
        ports = tuple(port for port in host.ports if port.bus_id not in usb)
        self.running = host.devices
        self.host = host = host._replace(devices=tuple(able), ports=ports)
        self.paths = find_paths(host)
        self.gpus = {gpu.name: gpu for gpu in host.gpus}
        # The ports of each adapter, by bus address.
        self.ports = grouped((port.bus_id, port) for port in ports if port.bus_id)
        # NVLink and xGMI, by the GPU they leave.
        kinds = LinkKind.NVLINK, LinkKind.XGMI
        self.links = grouped((k.source, k) for k in host.links if k.kind in kinds)
        # GPUs and adapters below each bridge.
        self.ends = grouped(
            (bridge.bus_id, self.devices[bus_id])
            for bus_id in dict.fromkeys([*self.gpus, *self.ports])
            for bridge in bridges_above(self.devices, bus_id)[1:]
        )
        self.known = self.gpus.keys() | self.ports.keys() | self.ends.keys()

    def num_links(self, gpu: str) -> int:
        own = self.links.get(gpu, ())
        return sum(link.num_links for link in own if link.target != gpu)

    def link_rate(self, name: str) -> float:
        """Return NCCL's GB/s for one link of a GPU; 0 where its chip is unknown."""
        gpu = self.gpus.get(name)
        if gpu and gpu.gcn:
            return speeds.xgmi_gb_per_s(gpu.gcn)
        return speeds.nvlink_gb_per_s(gpu.sm) if gpu and gpu.sm > 0 else 0.0

    def bus_rate(self, name: str) -> float:
        """Return the GB/s of the best known way from a GPU to any other; 0 for none."""
        others = (gpu.name for gpu in self.host.gpus if gpu.name != name)
        ways = filter(None, (self.paths.between(name, other) for other in others))
        return max((w.gb_per_s for w in ways if self.paths.is_known(w)), default=0.0)

    def root_speed(self) -> float:
        """Return the GT/s of the fastest link right below a processor; 0 if unknown."""
        roots = (device for device in self.host.devices if not device.parent)
        return max((speeds.gt_per_s(each.speed) for each in roots), default=0.0)

    def ways(self) -> Iterator[tuple[str, list[tuple[NetPort, Path]]]]:
        """Yield GPUs with their ways to the ports that carry traffic between hosts."""
        ports = [port for port in self.host.ports if port.bus_id and port.is_up]
        fastest = max((port.mbit_per_s for port in ports), default=0)
        # The one for management is slower.
        fast = [port for port in ports if 2 * port.mbit_per_s >= fastest]
        for gpu in self.gpus:
            ways = [(p, way) for p in fast if (way := self.paths.between(gpu, p.name))]
            if ways:
                yield gpu, ways

    def slow_bridge(self) -> Iterator[Hit]:
        for bus_id, ends in self.ends.items():
            bridge = self.devices[bus_id]
            has = _known_gb_per_s(bridge)
            # A port with a rate alone (hwloc) has that of the link below it, which is
            # the device's own.
            farther = [end for end in ends if bridge.speed or end.parent != bus_id]
            should = max(map(_known_gb_per_s, farther), default=0.0)
            if 0 < has < should and not _is_tiny(bridge):
                # Slow by its generation alone, and no slot of the host has a later one.
                is_as_built = (
                    2 * has >= should
                    and all(end.width <= bridge.width for end in farther)
                    and self.root_speed() <= speeds.gt_per_s(bridge.speed)
                )
                form = ".as-built" if is_as_built else ""
                link = speeds.link_words(bridge)
                yield _hit(bus_id, has, should, link=link, form=form)

    def tiny_link(self) -> Iterator[Hit]:
        # One in a package with its processor needs no bus.
        packaged = [link for link in self.host.links if link.kind is LinkKind.C2C]
        inside = {end for link in packaged for end in (link.source, link.target)}
        gpus = [gpu for gpu in self.gpus if gpu in self.devices and gpu not in inside]
        above = [b for b, e in self.ends.items() if any(d.bus_id in gpus for d in e)]
        for device in (self.devices[bus_id] for bus_id in [*gpus, *above]):
            if _is_tiny(device):
                has = _known_gb_per_s(device)
                yield _hit(device.name, has, link=speeds.link_words(device))

    def unknown_link_speed(self) -> Iterator[Hit]:
        for device in (d for d in self.host.devices if d.bus_id in self.known):
            # A source without either leaves it to others. Clouds' files give no lanes
            # (x0) and mean the 16 that NCCL takes; an empty speed is a wrong answer.
            is_given = device.width >= 0 or device.speed
            if is_given and not speeds.gt_per_s(device.speed) and not device.gb_per_s:
                has, link = speeds.pci_gb_per_s(device), speeds.link_words(device)
                yield _hit(device.name, has, link=link)

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
                words["now"], words["link"] = map(speeds.link_words, (now, device))
                yield _hit(device.name, has, should, **words)

    def link_to_itself(self) -> Iterator[Hit]:
        for name, links in self.links.items():
            own = [link.num_links for link in links if link.target == name]
            if own:
                has, should = self.bus_rate(name), sum(own) * self.link_rate(name)
                yield _hit(name, has, should, num=sum(own))

    def gpu_listed_as_switch(self) -> Iterator[Hit]:
        for name, links in self.links.items():
            to_gpus = [link for link in links if link.target in self.gpus]
            wrong = [x.num_links for x in to_gpus if x.target_class == _SWITCH_CLASS]
            if wrong:
                yield _hit(name, num_gpus=len(wrong), num=sum(wrong))

    def too_many_nvlinks(self) -> Iterator[Hit]:
        for gpu in self.gpus.values():
            num, most = self.num_links(gpu.name), speeds.max_nvlinks(gpu.sm)
            # Of later chips nobody knows yet how many they have.
            is_known = 0 < gpu.sm <= _LATEST_SM and not gpu.gcn
            if is_known and 0 < most < num:
                has, should = (n * speeds.nvlink_gb_per_s(gpu.sm) for n in (num, most))
                cap = f", over its cap of {speeds.LOCAL_GB_PER_S:g}"
                cap = cap if has > speeds.LOCAL_GB_PER_S else ""
                words = {"num": num, "sm": gpu.sm, "most": most, "cap": cap}
                yield _hit(gpu.name, has, should, **words)

    def num_up(self, gpu: GpuDevice) -> int:
        """Return how many links of a GPU are up: as counted, else as listed."""
        return gpu.nvlinks if gpu.nvlinks != UNKNOWN else self.num_links(gpu.name)

    def gpu_without_links(self) -> Iterator[Hit]:
        linked = [gpu for gpu in self.host.gpus if self.num_up(gpu)]
        for gpu in self.host.gpus:
            alike = [other for other in linked if _is_alike(gpu, other)]
            of_board = speeds.board_nvlinks(gpu)
            # Of a board one GPU may be alone in a virtual machine; before NVSwitch, so
            # may two that no link joins.
            is_enough = len(self.host.gpus) >= (2 if gpu.sm >= 80 else _MOST_GPUS)
            has_lost_all = of_board and gpu.nvlinks == 0 and is_enough
            if gpu in linked or not (alike or has_lost_all):
                continue
            most = max(map(self.num_up, alike), default=of_board)
            # The links of an unknown chip are counted as those of one that has them.
            rate = max(self.link_rate(each.name) for each in (gpu, *alike))
            words = {"others": _OTHERS if alike else _MODEL, "most": most}
            words["form"] = "" if of_board or not gpu.title else ".bridge"
            yield _hit(gpu.name, self.bus_rate(gpu.name), most * rate, **words)

    def uneven_nvlinks(self) -> Iterator[Hit]:
        up = [gpu for gpu in self.gpus.values() if self.num_up(gpu) and not gpu.gcn]
        direct = [
            k for own in self.links.values() for k in own if k.target in self.gpus
        ]
        # Eight GPUs of before NVSwitch are joined by one or two links to some others:
        # of a part of them each sees another number.
        is_part = max((link.num_links for link in direct), default=9) <= 2
        is_part = is_part and len(self.gpus) < _MOST_GPUS
        for gpu in up:
            num = self.num_up(gpu)
            others = max(self.num_up(each) for each in up if _is_alike(gpu, each))
            # Before A100 a board need not use all of them.
            is_whole = gpu.nvlinks != UNKNOWN and gpu.sm >= 80
            most = max(others, speeds.board_nvlinks(gpu) if is_whole else 0)
            if num < most and not (is_part and gpu.nvlinks == UNKNOWN):
                has, should = (n * self.link_rate(gpu.name) for n in (num, most))
                words = {"others": _OTHERS if most == others else _MODEL}
                words["form"] = ".badly" if 2 * num < most else ""
                yield _hit(gpu.name, has, should, num=num, most=most, **words)

    def no_peer_access(self) -> Iterator[Hit]:
        peers = {(r.source, r.target): r.peer for r in self.host.relations}
        # Where both directions are alike, a source may list one.
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
                yield _hit(gpu.name, counts=counts, form=form)

    def acs_redirects(self) -> Iterator[Hit]:
        for bus_id, ends in self.ends.items():
            has_gpu = any(end.bus_id in self.gpus for end in ends)
            if has_gpu and self.devices[bus_id].is_redirecting:
                yield _hit(bus_id)

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
                # A link that is none, as virtual machines report it.
                has, form = figures.practical, ".virtual"
            if has < should:
                words = {"link": f"{device.speed} x{device.width}", "form": form}
                words["planned"] = _known_gb_per_s(device)
                yield _hit(bus_id, has, should, num=len(ports), **words)

    def odd_nic_speed(self) -> Iterator[Hit]:
        for port in self.host.ports:
            given = port.mbit_per_s
            # Only files of NCCL's have numbers of ports, and rates that people wrote.
            is_written = port.bus_id and port.number != UNKNOWN
            if is_written and given > 0 and not _has_likely_rate(port):
                # What is beyond all hardware was written in kb/s.
                is_huge = given > _HIGHEST
                wanted = given / 1000 if is_huge else given
                nearest = min(_RATES, key=lambda rate: abs(rate - wanted))
                planned, meant = speeds.port_gb_per_s(port), nearest / 8000
                guess = ": it looks like kb/s" if is_huge else ""
                words = {"given": given, "planned": planned, "guess": guess}
                rates = (0.0, 0.0) if is_huge else (planned, meant)
                yield _hit(port.name, *rates, nearest=nearest, meant=meant, **words)

    def nic_down(self) -> Iterator[Hit]:
        # The ports of a card may be functions of it.
        up_at = {port.bus_id[:-2] for port in self.host.ports if port.is_up}
        for port in self.host.ports:
            # Of two ports often one has no cable, and Ethernet for management none.
            is_loss = port.kind == "infiniband" and port.bus_id[:-2] not in up_at
            rate = f"{speeds.port_gb_per_s(port):g} GB/s" if port.mbit_per_s > 0 else ""
            if port.bus_id and not port.is_up:
                form = ".lost" if is_loss else ""
                yield _hit(port.name, rate=rate or "its rate", form=form)

    def virtual_nic(self) -> Iterator[Hit]:
        for port in self.host.ports:
            if port.is_virtual:
                yield _hit(port.name)

    def no_gpudirect(self) -> Iterator[Hit]:
        has_any = any(port.gdr == 1 for port in self.host.ports)
        for gpu in self.host.gpus:
            if has_any and gpu.gdr == 0:
                yield _hit(gpu.name)

    def far_nic(self) -> Iterator[Hit]:
        for gpu, ways in self.ways():
            port, near = min(ways, key=lambda way: (way[1].kind, -way[1].gb_per_s))
            far, chosen = min(ways, key=lambda way: (-way[1].gb_per_s, way[1].kind))
            if near.kind <= PathKind.PXB < chosen.kind:
                has, should = near.gb_per_s, chosen.gb_per_s
                words = {"far": far.title, "far_kind": chosen.kind}
                words |= {"port": port.title, "kind": near.kind}
                yield _hit(gpu, has, should, **words)

    def nic_behind_processor(self) -> Iterator[Hit]:
        for gpu, ways in self.ways():
            fastest = max(port.mbit_per_s for port, _ in ways)
            way = min((w for _, w in ways), key=lambda w: (w.kind, -w.gb_per_s))
            is_slow = 0 < fastest < _RDMA_MBIT_PER_S
            place = "another socket's" if way.kind > PathKind.PHB else "its own"
            if way.kind > PathKind.PXN and not is_slow:
                yield _hit(gpu, way.gb_per_s, place=place, kind=way.kind)

    def no_numa_node(self) -> Iterator[Hit]:
        nodes = self.host.numa_nodes
        for node in nodes:
            if node.number < 0:
                yield _hit(node.name, what="The node's own number is -1.")
        for bus_id in [*self.gpus, *self.ports]:
            above = bridges_above(self.devices, bus_id)
            is_lost = above and all(each.node == UNKNOWN for each in above)
            if is_lost and sum(1 for node in nodes if node.cpus) > 1:
                what = "The device's NUMA node is unknown (-1)."
                yield _hit(bus_id, what=what)

    def shared_cores(self) -> Iterator[Hit]:
        counts = Counter(cpu for node in self.host.numa_nodes for cpu in node.cpus)
        for node in self.host.numa_nodes:
            if own := [cpu for cpu in node.cpus if counts[cpu] > 1]:
                yield _hit(node.name, cpus=format_list(own))

    def uneven_cores(self) -> Iterator[Hit]:
        nodes = [node for node in self.host.numa_nodes if node.cpus]
        counts = Counter(len(node.cpus) for node in nodes)
        if len(nodes) < 3 or len(counts) != 2 or 1 not in counts.values():
            return
        (usual, _), _ = counts.most_common()
        (node,) = (node for node in nodes if len(node.cpus) != usual)
        cpus, num = format_list(node.cpus), len(node.cpus)
        yield _hit(node.name, cpus=cpus, usual=usual, num=num)

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
            yield _hit(node.name, rate, 0.0, between=between, **words)

    def refused_by_nccl(self) -> Iterator[Hit]:
        return _sentences(self.host.refused)

    def odd_source(self) -> Iterator[Hit]:
        return _sentences(self.host.remarks)


def _sentences(remarks: Sequence[str]) -> Iterator[Hit]:
    """Yield one hit for all remarks, the first of which it has."""
    left = len(remarks) - _MAX_REMARKS
    more = [f"There are {left} more."] if left > 0 else []
    if remarks:
        yield _hit("source", remark=" ".join([*remarks[:_MAX_REMARKS], *more]))


def _odd_hosts(measured: Sequence[tuple[str, float, float]]) -> Iterator[Hit]:
    known = [(name, num, num * rate) for name, num, rate in measured if num >= 0]
    counts = Counter(num for _, num, _ in known)
    # With as many of either, what is more is taken for right.
    usual = max(counts, key=lambda num: (counts[num], num), default=0)
    should = max((total for _, num, total in known if num == usual), default=0.0)
    others = f"{counts[usual]} of {len(known)} nodes have {usual:g}"
    for name, num, has in known:
        if num != usual:
            words, rates = {"num": num, "others": others, "loss": ""}, (0.0, 0.0)
            if should and num < usual:
                words["loss"] = f": {has:g} instead of {should:g} GB/s"
                rates = has, should
            yield _hit(name, *rates, **words)


def _fewest_nvlinks(host: HostTopology) -> tuple[float, float]:
    counts: Counter[str] = Counter()
    for link in host.links:
        if link.kind is LinkKind.NVLINK and link.source != link.target:
            counts[link.source] += link.num_links
    # A source with more links than the chip has must not pass for the better one.
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
    # The one for management is slower.
    total = sum(rate for rate in rates if 2 * rate >= max(rates))
    return total or (0.0 if ports and not up else -1), 1.0


def _slowest_gpu_link(host: HostTopology) -> tuple[float, float]:
    gpus = {gpu.bus_id for gpu in host.gpus}
    # Bare rates may be those of GPUs at rest.
    found = [d for d in host.devices if d.bus_id in gpus and d.speed]
    rates = [_known_gb_per_s(device) for device in found]
    return min((rate for rate in rates if rate), default=-1), 1.0


# What a host has, below 0 if unknown; and the GB/s of one of it, 0 for none.
_MEASURES: dict[str, Callable[[HostTopology], tuple[float, float]]] = {
    "node-gpus-differ": lambda host: (len(host.gpus), 0.0),
    "node-nvlinks-differ": _fewest_nvlinks,
    "node-network-differs": _network,
    "node-gpu-links-differ": _slowest_gpu_link,
    "node-cores-differ": lambda host: (
        sum(len(node.cpus) for node in host.numa_nodes) or -1,
        0.0,
    ),
}
