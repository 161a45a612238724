"""What each verdict on NCCL's debug log means, and which warnings of NCCL are known.

Sources: NVIDIA's guide to NCCL's troubleshooting, and what NCCL's users reported.
"""

import re
from typing import NamedTuple

from ronde.topology.graph import Level

# Each: the rule and its severity; what comes of it; what to do. A rule that has several
# texts has a word for each behind a dot, and " stands for the text above.
_RULES = """
sockets-despite-infiniband error
  so Of each adapter most of its bandwidth is lost, and each message waits longer.
  do Set NCCL_NET=IB: NCCL then reports why it cannot use them.
sockets-between-nodes warning
  so Of an adapter that is there most of its bandwidth is lost, and each message waits
     longer.
  do Run ibv_devinfo where the ranks run: a container needs /dev/infiniband, and a
     cloud's own adapter its plugin for NCCL.
libfabric-over-tcp warning
  so "
  do Look with fi_info where the ranks run which providers there are; a container needs
     the adapter's devices and its libfabric.
networks-differ error
  so They cannot connect to each other: the job hangs or ends.
  do Make adapters, drivers and the image alike on all hosts, or set NCCL_NET for all
     ranks.
no-gpudirect-rdma warning
  so Data between GPU and adapter goes through the host's memory, which costs bandwidth
     and time.
  do See with ronde topo --matrix how far GPUs and adapters are apart: farther than PXB
     it is off, and NCCL_NET_GDR_LEVEL=SYS forces it.
no-gpudirect-rdma.disabled warning
  so "
  do Load the kernel's module: modprobe nvidia-peermem; or use a driver and a kernel
     that have DMA-BUF.
no-gpudirect-rdma.plugin note
  so "
  do Nothing, where the GPU's kind does without; else renew driver, CUDA and plugin, for
     these do not fit together.
virtual-interface error
  so Other hosts do not reach its address: the start hangs, or goes a slow way round.
  do {choice} to the interface between the hosts, which ip route get ADDRESS names.
shm-where-p2p-was-possible warning
  so They reach a part of the bandwidth that the GPUs have among themselves.
  do Let every rank see all GPUs of its host, and give containers of one host the same
     IPC namespace (--ipc=host); on bare metal turn off ACS and the IOMMU.
p2p-refused warning
  so Data between them goes through the host's memory.
  do Turn off ACS and the IOMMU on bare metal, or ask who runs the VM; nvidia-smi topo
     -p2p n shows the pairs.
few-channels error
  so Bandwidth is that of one path: tens instead of hundreds of GB/s.
  do Compare the NVLinks of the GPUs: nvidia-smi nvlink -s; with
     NCCL_TOPO_DUMP_FILE=topo.xml set, ronde topo lint topo.xml shows more.
few-channels.usual note
  so Right for GPUs that PCI alone connects; far too little for others.
  do "
nvls-lost warning
  so AllReduce inside a node is limited to what rings reach; on eight GPUs NVLS reaches
     up to 1.56 times that.
  do Look at the fabric manager (systemctl status nvidia-fabricmanager, nvidia-smi -q),
     and give a VM or container all GPUs of the switch.
fabric-not-ready warning
  so NVLink between them is not used, or fails.
  do Wait for or restart nvidia-fabricmanager; nvidia-smi -q shows the fabric's state.
slow-pci warning
  so All that {name} moves over PCI is limited to that.
  do Compare with lspci -vv -s {below} there: LnkSta must be as wide and as fast as
     LnkCap; reseat the card or the riser, or set the slot's speed in the BIOS.
slow-pci.virtual error
  so "
  do In a virtual machine name a file with the host's real speeds in NCCL_TOPO_FILE, or
     give the virtual root port x-speed and x-width; on bare metal reseat the card: see
     lspci -vv -s {below}.
versions-differ error
  so The start fails, or ranks choose differently and hang.
  do Use one image and one driver on all hosts; torch brings its own NCCL, which
     LD_LIBRARY_PATH may hide.
versions-differ.driver warning
  so What one driver supports and another does not is lost for all.
  do "
settings-differ warning
  so Ranks may choose differently, which hangs or slows down.
  do Set it alike for all ranks, or for none.
settings-differ.absent note
  so Ranks may choose differently, if it is not set here.
  do See that the launcher passes it to all hosts.
nodes-unlike-hosts error
  so It takes ranks of different hosts for neighbours, and cannot connect them.
  do Give every host a name of its own, or NCCL_HOSTID.
nodes-unlike-hosts.many warning
  so It takes neighbours for strangers: data inside a host goes over the network.
  do Give the containers of a host one name and one boot id, or set NCCL_HOSTID to the
     host's name in all of them.
init-incomplete error
  so The job hangs or has ended in its start, unless the log was cut.
  do Look first at the ranks that are not in the log, and at warnings; then whether the
     hosts reach each other on the bootstrap interface.
ranks-not-in-log note
  so Everything here holds for these alone.
  do Set NCCL_DEBUG=INFO and NCCL_DEBUG_FILE=nccl.%h.%p for all ranks, and give all
     files.
slow-init note
  so Every start and restart of the job waits so long.
  do See which rank came last: the others wait for it.
slow-init.bootstrap note
  so "
  do Some rank came late, or the bootstrap interface is slow: look at what ranks do
     before, and at NCCL_SOCKET_IFNAME.
slow-init.kernels note
  so "
  do The kernels are loaded from the disk: have the image on a local disk, and
     CUDA_MODULE_LOADING=LAZY.
several-versions note
  so If they are of one job, its ranks do not fit together.
  do Give the log of one job at a time.
log-incomplete note
  so Their content is missing here.
  do Let every rank write a file of its own: NCCL_DEBUG_FILE=nccl.%h.%p.
"""
# The same of lines that NCCL itself marks as warnings, with a pattern behind; the first
# that fits counts.
_WARNINGS = r"""
warned-shared-memory error shared memory|/dev/shm|posix_fallocate|shm_open
  so Ranks of one host cannot pass data: the job does not start.
  do Give containers more shared memory: --shm-size=1g --ulimit memlock=-1; in
     Kubernetes an emptyDir with medium Memory at /dev/shm.
warned-locked-memory error ibv_reg_mr|ibv_\w+ failed.*cannot allocate memory
  so Memory cannot be registered with the adapter: the job does not start.
  do Raise the limit of locked memory to unlimited (ulimit -l) where the ranks start:
     limits.conf, the launcher's service, or --ulimit memlock=-1.
warned-peer-unreachable error got completion .*(status|error)[ =](\w+\()?12\b
  so A message to a peer was repeated and never answered: the job ends.
  do See whether that peer had ended before; else check cables, the switch (ibdiagnet),
     on RoCE NCCL_IB_GID_INDEX, and raise NCCL_IB_TIMEOUT.
warned-connection-flushed error got completion .*(status|error)[ =](\w+\()?5\b
  so A connection was broken before; this follows from it.
  do Look for the first such line of the job, which has another number.
warned-adapter-error error got completion .*(status|error)
  so An adapter could not carry out a transfer: the job ends.
  do Turn off ACS (GPUDirect needs that on bare metal); NCCL_NET_GDR_LEVEL=LOC shows
     whether it is GPUDirect.
warned-link-event warning async (fatal )?event|speed change|GID table changed
  so A port of the network changed while the job ran.
  do Look at the port's errors and cable: ibstat, mlxlink, dmesg.
warned-no-libibverbs note failed to open libibverbs
  so No InfiniBand and no RoCE is used, which is right where there is none.
  do Where there is, install libibverbs (package rdma-core).
warned-numa-balancing warning numa auto balancing
  so The kernel moves memory while the job runs: times vary.
  do Turn it off: sysctl kernel.numa_balancing=0.
warned-iommu warning iommu=(pt|on)
  so Transfers between devices may be slow, fail or hang.
  do Start the kernel with what it names.
warned-fine-grain warning HSA_FORCE_FINE_GRAIN_PCIE
  so GPUs that PCI alone connects may be slow, fail or hang.
  do Set HSA_FORCE_FINE_GRAIN_PCIE=1 for all ranks.
warned-adapter-call error call to ibv_|NET/IB : unable to open
  so The network adapter cannot be used as wanted.
  do See with ibv_devinfo that the port is ACTIVE; on RoCE set NCCL_IB_GID_INDEX to what
     show_gids shows (often 3).
warned-no-interface error no (socket |usable listening |ip )?interface found
  so The job does not start.
  do NCCL_SOCKET_IFNAME must name an interface that is there and has an address: see ip
     address.
warned-gpu-shared error duplicate gpu|multiple ranks are using the same gpu
  so "
  do Give each rank a GPU of its own: set the device by the local rank before the first
     collective.
warned-versions error mismatched nccl version|nccl version mismatch
    |wrong type \d+ != \d+
  so "
  do Use one image on all hosts: the ranks have different versions of NCCL, or another
     program uses the port.
warned-fabric-manager error cuda failure 802\b|system not yet initialized
  so GPUs behind NVLink switches cannot be used: the job does not start.
  do Start nvidia-fabricmanager (systemctl status nvidia-fabricmanager); its version
     must be the driver's.
warned-imex error imex
  so NVLink between nodes does not work: the job does not start.
  do See with nvidia-imex-ctl -N that all nodes of the domain are up, and give
     containers an IMEX channel; NCCL_MNNVL_ENABLE=0 does without.
warned-driver error driver/library version mismatch|cuda driver (version found|<)
    |driver version is insufficient
  so The job does not start.
  do Use a driver that is new enough for CUDA; after it was renewed, load it anew or
     restart the host.
warned-peer-access error failed to peer with|peer access
  so GPUs do not reach each other's memory: the job does not start.
  do Turn off ACS and the IOMMU on bare metal, or ask who runs the VM;
     NCCL_P2P_DISABLE=1 goes round it at a loss.
warned-gpu-memory error cuda failure.*out of memory|cuda failure 2\b
  so The collective fails, and with it the job.
  do Free memory on the GPU: NCCL needs some of its own beside the model; see nvidia-smi
     for processes that are left over.
warned-cuda error cuda failure
  so "
  do An earlier kernel may be to blame: repeat with CUDA_LAUNCH_BLOCKING=1; look for Xid
     in dmesg.
warned-nvlink-p2p error p2p is disabled between nvlink
  so The job does not start.
  do Check the links (nvidia-smi nvlink -s) and the fabric manager: NVIDIA takes this
     for a fault of the hardware.
warned-ranks-mixed error already checked in|bootstrap root : mismatch
  so "
  do Two processes have the same rank, or two jobs one address: see that a job before
     has ended, and that ranks are distinct.
warned-no-transport error no transport found
  so Two ranks have no way to each other: the job does not start.
  do See that a network was found, and that NCCL_P2P_DISABLE, NCCL_SHM_DISABLE and
     NCCL_NET do not forbid all there is.
warned-adapters-differ error mixed local \w+ device counts
  so The job does not start.
  do Hosts have different numbers of network adapters: look for ports that are down
     (ibstat), and set NCCL_IB_HCA alike.
warned-calls-differ error message truncated|collective mismatch
  so The collective fails, and with it the job.
  do Ranks call different collectives, or with different sizes: compare the programs'
     calls, or run with TORCH_DISTRIBUTED_DEBUG=DETAIL.
warned-open-files error too many open files
  so "
  do Raise the limit of open files: ulimit -n 65536 where the ranks start.
warned-connection error connection (refused|reset|timed out|closed)|closed by remote
    |no route to|connect to .* failed|timed? ?out|network is unreachable
    |exceeded (error retry count|retries)
  so A rank could not be reached, or has gone: the job ends.
  do Look at the rank that ended first; at the start see that no firewall is between the
     hosts and that NCCL_SOCKET_IFNAME fits.
warned-follows warning ^\[(proxy|service) |ncclproxy\w+ .*failed|in abort state
  so It follows from an error before it, mostly of another rank.
  do Look for the first warning of the job.
warned-topology error xml|topology|could not find (any local path|cpu close)
    |too many .*nodes
  so NCCL cannot use the topology: the job does not start, or is slow.
  do Check the file that NCCL_TOPO_FILE names: ronde topo lint FILE.
warned warning .?
  so The log does not show what follows from it.
  do Look at the next lines of the same rank, and for these words in NCCL's issues.
"""


class Verdict(NamedTuple):
    """What a rule's finding comes with."""

    severity: Level
    consequence: str
    remedy: str


def _read(table: str) -> list[tuple[str, str, Verdict]]:
    """Return of each entry its rule, its pattern and the rest."""
    found: list[tuple[str, str, Verdict]] = []
    joined = re.sub(r"\n +\|", "|", re.sub(r"\n {5}", " ", table.strip()))
    lines = iter(joined.split("\n"))
    consequence = remedy = ""
    for head, so, do in zip(lines, lines, lines, strict=True):
        rule, severity, pattern = [*head.split(" ", 2), ""][:3]
        consequence = consequence if so == '  so "' else so[5:]
        remedy = remedy if do == '  do "' else do[5:]
        found.append((rule, pattern, Verdict(Level(severity), consequence, remedy)))
    return found


_KNOWN = _read(_WARNINGS)
VERDICTS = {rule: verdict for rule, _, verdict in (*_read(_RULES), *_KNOWN)}
"""By rule, with the word for its text where it has several."""

WARNINGS = [(re.compile(pattern, re.IGNORECASE), rule) for rule, pattern, _ in _KNOWN]
"""Patterns of NCCL's own warnings, and the rule of each."""
