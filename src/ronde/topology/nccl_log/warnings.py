"""Lines that NCCL itself marks as warnings, with what is known of them.

Sources: NVIDIA's guide to NCCL's troubleshooting, and what NCCL's users reported.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from ronde.topology.graph import Diagnostic, Level
from ronde.topology.nccl_log.log import NcclJob, name_some

_MAX_TEXT = 160


class _Known(NamedTuple):
    rule: str
    severity: Level
    pattern: re.Pattern[str]
    consequence: str
    remedy: str


# Each: the rule, its severity and a pattern; what comes of it; what to do. The first
# that fits counts.
_TABLE = r"""
warned-shared-memory error shared memory|/dev/shm|posix_fallocate|shm_open
so Ranks of one host cannot pass data: the job does not start.
do Give containers more shared memory: --shm-size=1g --ulimit memlock=-1; in Kubernetes
   an emptyDir with medium Memory at /dev/shm.

warned-locked-memory error ibv_reg_mr|ibv_\w+ failed.*cannot allocate memory
so Memory cannot be registered with the adapter: the job does not start.
do Raise the limit of locked memory to unlimited (ulimit -l) where the ranks start:
   limits.conf, the launcher's service, or --ulimit memlock=-1.

warned-peer-unreachable error got completion .*(status|error)[ =](\w+\()?12\b
so A message to a peer was repeated and never answered: the job ends.
do See whether that peer had ended before; else check cables, the switch (ibdiagnet), on
   RoCE NCCL_IB_GID_INDEX, and raise NCCL_IB_TIMEOUT.

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
do See with ibv_devinfo that the port is ACTIVE; on RoCE set NCCL_IB_GID_INDEX to
   what show_gids shows (often 3).

warned-no-interface error no (socket |usable listening |ip )?interface found
so The job does not start.
do NCCL_SOCKET_IFNAME must name an interface that is there and has an address: see ip
   address.

warned-gpu-shared error duplicate gpu|multiple ranks are using the same gpu
so The job does not start.
do Give each rank a GPU of its own: set the device by the local rank before the first
   collective.

warned-versions error mismatched nccl version|nccl version mismatch
   |wrong type \d+ != \d+
so The job does not start.
do Use one image on all hosts: the ranks have different versions of NCCL, or another
   program uses the port.

warned-fabric-manager error cuda failure 802\b|system not yet initialized
so GPUs behind NVLink switches cannot be used: the job does not start.
do Start nvidia-fabricmanager (systemctl status nvidia-fabricmanager); its version must
   be the driver's.

warned-imex error imex
so NVLink between nodes does not work: the job does not start.
do See with nvidia-imex-ctl -N that all nodes of the domain are up, and give containers
   an IMEX channel; NCCL_MNNVL_ENABLE=0 does without.

warned-driver error driver/library version mismatch|cuda driver (version found|<)
   |driver version is insufficient
so The job does not start.
do Use a driver that is new enough for CUDA; after it was renewed, load it anew or
   restart the host.

warned-peer-access error failed to peer with|peer access
so GPUs do not reach each other's memory: the job does not start.
do Turn off ACS and the IOMMU on bare metal, or ask who runs the VM; NCCL_P2P_DISABLE=1
   goes round it at a loss.

warned-gpu-memory error cuda failure.*out of memory|cuda failure 2\b
so The collective fails, and with it the job.
do Free memory on the GPU: NCCL needs some of its own beside the model; see nvidia-smi
   for processes that are left over.

warned-cuda error cuda failure
so The collective fails, and with it the job.
do An earlier kernel may be to blame: repeat with CUDA_LAUNCH_BLOCKING=1; look for Xid
   in dmesg.

warned-nvlink-p2p error p2p is disabled between nvlink
so The job does not start.
do Check the links (nvidia-smi nvlink -s) and the fabric manager: NVIDIA takes this for
   a fault of the hardware.

warned-ranks-mixed error already checked in|bootstrap root : mismatch
so The job does not start.
do Two processes have the same rank, or two jobs one address: see that a job before has
   ended, and that ranks are distinct.

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
so The collective fails, and with it the job.
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


def _read_table() -> Iterator[_Known]:
    for entry in (
        _TABLE.strip().replace("\n   |", "|").replace("\n  ", "").split("\n\n")
    ):
        head, consequence, remedy = entry.split("\n")
        rule, severity, pattern = head.split(" ", 2)
        compiled = re.compile(pattern, re.IGNORECASE)
        yield _Known(rule, Level(severity), compiled, consequence[3:], remedy[3:])


_KNOWN = tuple(_read_table())
# Reported with what else shows it.
_REPORTED_ELSEWHERE = "Failed to bind NVLink SHARP"


def marked_warnings(job: NcclJob) -> Iterator[Diagnostic]:
    """Yield NCCL's own warnings, with what is known of them."""
    for text, place, num_times, hosts in job.warnings:
        if text.startswith(_REPORTED_ELSEWHERE):
            continue
        known = next(known for known in _KNOWN if known.pattern.search(text))
        shown = text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "..."
        times = "once" if num_times == 1 else f"{num_times} times"
        yield Diagnostic(
            known.rule,
            known.severity,
            name_some(hosts),
            f"NCCL reports {times}: {shown}" + (f" ({place})" if place else ""),
            known.consequence,
            known.remedy,
        )
