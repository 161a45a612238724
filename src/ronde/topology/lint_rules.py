"""The texts of the lint rules, and findings with these texts."""

import re
from typing import NamedTuple

from ronde.topology.graph import Diagnostic, Level

# Each rule: name, severity ("loss" is an error if most of the bandwidth is lost, else a
# warning) and meaning; then the sentences seen, so and do, with fields for words. Rules
# with several texts have a line for each further form: the rule, a dot, and the form.
_RULES = """
device-lost error a GPU or adapter that has fallen off the PCI bus
  seen It does not answer: it has fallen off the PCI bus.
  so No program can use it, and jobs that want it fail or hang.
  do Look in dmesg for Xid 79 and AER; drain the node and power-cycle it. Replace the
     card or its riser if that happens again.
slow-bridge loss a bridge whose own link is slower than that of a device below it
  seen The link above the bridge is slower ({link}) than the link of a device below it.
  so Devices below share {has:g} GB/s; one could use {should:g} (NCCL's figures).
  do Compare with lspci -vv: reseat the board where LnkSta is below LnkCap, correct the
     file where it has less than LnkSta; do nothing if slot or switch are older.
slow-bridge.as-built note
tiny-link error a GPU's link below 1 GB/s, as virtual machines report it
  seen The link is reported as {link}. Virtual machines hide the real link so.
  so NCCL plans with {has:.1f} GB/s and avoids the device.
  do Give NCCL_TOPO_FILE with the host's real speeds, or give the virtual root port
     x-speed and x-width; on bare metal reseat the card.
unknown-link-speed warning an empty link speed, which NCCL takes for PCIe 3
  seen The link speed is unknown ({link}).
  so NCCL takes it for {has:g} GB/s: PCIe 3 x16 is 12, PCIe 4 x16 24, PCIe 5 x16 48.
  do Write what lspci -vv shows on the bare machine, such as link_speed="16.0 GT/s PCIe"
     link_width="16".
trained-down loss a link that runs below the abilities of both its ends
  seen The link runs at {now} and {able} {link}.
  so It carries {has:.4g} of {should:.4g} GB/s (PCIe's limit one way).
  do Reseat the card or its riser, look for errors in dmesg (AER), and look at the
     slot's setting in the firmware.
trained-down.unlike loss
  do On the bare machine compare LnkCap and LnkSta with another GPU's, also of the
     bridge above: sudo lspci -vv. Look for errors in dmesg (AER).
trained-down.alike note
  do Nothing, if slot or card have no more lanes. On the bare machine compare LnkCap of
     the GPU with that of the bridge above it: sudo lspci -vv.
trained-down.at-rest note
  do Look again under load: GPUs lower the speed at rest.
uneven-gpu-link warning a GPU with a slower PCI link than most others of its kind
  seen The link is {link}, and most GPUs of its kind here have {others}.
  so Copies from and to the host, and the network, run at {has:g} instead of {should:g}
     GB/s.
  do Compare LnkCap and LnkSta in lspci -vv with another GPU's, and reseat the card or
     its riser.
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
gpu-without-links.all error
  do Look at the fabric manager first, then at the driver: systemctl status
     nvidia-fabricmanager; nvidia-smi -q shows Fabric and errors.
gpu-without-links.bridge note
  do Put a bridge on, if these GPUs are to work together.
uneven-nvlinks warning a GPU with fewer NVLinks or xGMI links than others of its kind
  seen {num} {kind}s are up, and {others} {most}.
  so Collectives run at the slowest GPU's rate{loss}.
  do Find links that are down or count errors: nvidia-smi nvlink -s, -e; reset the GPU.
uneven-nvlinks.badly error
uneven-nvlinks.xgmi error
  do Find the pair without XGMI: amd-smi topology. Look at amd-smi xgmi and dmesg, then
     power-cycle the node.
no-peer-access warning GPUs that may not reach each other's memory
  seen The driver does not let it reach the memory of other GPUs ({counts}).
  so NCCL copies through the host's shared memory instead.
  do CNS: the chipset does not; TNS: no bus between them does; GNS: this kind of GPU
     does not. Let the virtual machine's host pass it on; switch ACS off on bridges.
no-peer-access.unsure note
  do Look at nvidia-smi topo -p2p r: NS is normal in the tables of -p2p a, and of -p2p n
     where there is no NVLink.
acs-redirects warning a switch above a GPU that ACS makes send traffic to the processor
  seen ACS is on at {ports}: traffic between devices below goes up first.
  so Peer access and GPUDirect RDMA go through the processor: they are slow, or hang.
  do On bare metal switch ACS off in the firmware, or until the next boot: {lines}. A
     hypervisor needs it for its machines.
nic-faster-than-link loss a network adapter that carries more than its PCI link
  seen The adapter's {ports} {should:.4g} GB/s, its PCI link ({link}) {has:.4g} (PCIe's
     limit).
  so The adapter is held to {has:.4g} GB/s; NCCL plans with {planned:g}.
  do Move the adapter to a wider or newer slot, or use fewer of its ports; correct the
     file where adapters with links of their own are listed as one.
nic-faster-than-link.virtual warning
  seen The adapter's {ports} {should:.4g} GB/s. Its PCI link ({link}) is
     none: the adapter is listed as a host bridge, or with the slowest link there is.
  so NCCL plans with {has:g} GB/s through this adapter, even if it carries more.
  do Correct the file: a link of its own for each adapter, as the bare machine has it.
odd-nic-speed warning a port's speed that no hardware has
  seen Its speed is given as {given} Mb/s, which no port has{guess}.
  so NCCL plans with {planned:g} GB/s for it; {nearest} Mb/s would be {meant:g}.
  do Set speed= in the file to what cat /sys/class/infiniband/*/ports/1/rate shows, in
     Mb/s: 200 Gb/sec is 200000.
slow-nic warning a port that is far slower than the other adapters' ports
  seen The port runs at {rate:g} Gb/s{lanes}, and the other adapters at {most:g}.
  so Collectives over the nodes run at the rate of the slowest port.
  do Compare with ibstat or ethtool on another port: 1X is a cable with one lane left.
     Reseat or replace the cable, then look at the switch's port.
nic-down note a port of an adapter without link
  seen The port has no link{state}.
  so NCCL does not use it. Many second ports are left without a cable.
  do Look at ibstat or ip link, at the cable and at the switch's port.
nic-down.lost warning
  so NCCL does not use it: the node has {rate} less.
nic-down.init warning
  seen The cable has a link, and no subnet manager has configured the port{state}.
  do Start a subnet manager, on a switch or by systemctl start opensm on one host;
     sminfo shows the one that runs.
virtual-nic note a virtual interface among the network adapters
  seen A virtual interface is among the network adapters.
  so NCCL may choose it, and other hosts cannot be reached over it.
  do Leave it out: NCCL_SOCKET_IFNAME=^lo,docker,veth,virbr, or name the right one.
no-gpudirect warning a GPU or RDMA port for which GPUDirect RDMA is off
  seen GPUDirect RDMA is off for the {noun} (gdr 0){others}.
  so Every byte of the network goes through the host's memory, twice over the PCI bus.
  do Run modprobe nvidia_peermem, or use a kernel and driver with DMA-BUF, and write the
     file anew.
no-gpudirect.amd warning
  do Use a kernel and an amdgpu driver with peer memory or DMA-BUF, and write the file
     anew.
far-nic loss a GPU for which NCCL prefers a far network adapter to a near one
  seen NCCL chooses {far} ({far_kind}), and {port} is nearer ({kind}).
  so It prefers {should:g} GB/s to {has:g}, and beyond PXB there is no GPUDirect RDMA.
  do Look why the way to the near adapter is slow (slow-bridge, trained-down, slow-nic,
     odd-nic-speed), or name the adapters in NCCL_IB_HCA.
nic-behind-processor note a GPU without a network adapter on its own PCI switch
  seen Its nearest network adapter is behind {socket} processor ({kind}).
  so Up to {has:g} GB/s (NCCL's figure), through the host's memory: by default NCCL
     uses GPUDirect RDMA up to PXB alone.
  do This is normal without PCIe switches. To use GPUDirect RDMA all the same: export
     NCCL_NET_GDR_LEVEL={kind}. In a virtual machine, give NCCL_TOPO_FILE a file with
     the bare machine's switches.
nic-behind-processor.odd warning
  seen The GPU has no adapter on its PCI switch ({kind}), and {most} of {all} GPUs have.
  so Its bytes of the network go through the host's memory: by default NCCL uses
     GPUDirect RDMA up to PXB alone.
  do Compare lspci -t with a sound node: move the adapter back to the GPU's switch.
no-numa-node warning a device or processor whose NUMA node is -1
  seen {seen}
  so NCCL takes all such devices as near one processor; binding cannot be near them.
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
  so The model or the link speed is wrong, and NCCL believes both:{between} the given
     speed.
  do Show the virtual machine its host's model (QEMU: -cpu host), or correct modelid or
     link_speed in the file; from Sapphire Rapids on NCCL counts 22 or 40 GB/s.
refused-by-nccl error a topology file that NCCL refuses
  seen {remark}
  so NCCL ends with an error when it reads the file, and so does the job.
  do Add what is missing, or write the file anew with NCCL_TOPO_DUMP_FILE.
odd-source note oddities of a source
  seen {remark}
  so It was read all the same; the topology shown here may be wrong.
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


def _read(table: str) -> dict[str, dict[str, str]]:
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
"""The meaning of each rule, by subject, then by rule name."""
for _name, _rule in _TEXTS.items():
    if "." not in _name:
        _subject = _SUBJECTS.get(_name.partition("-")[0], "a host")
        CATALOGUE.setdefault(_subject, {})[_name] = _rule["meaning"]


class Hit(NamedTuple):
    """An element that violates a rule."""

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


def hit(element: str, has: float = 0.0, should: float = 0.0, **words: object) -> Hit:
    return Hit(element, has, should, words)
