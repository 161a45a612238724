"""Lines that NCCL itself marks as warnings, with what is known of them.

Sources: NVIDIA's guide to NCCL's troubleshooting, and what NCCL's users reported.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from ronde.topology.findings import Diagnostic, Level
from ronde.topology.nccl_log.log import NcclJob, WarningSeen, name_some

_MAX_TEXT = 160


class _Known(NamedTuple):
    """What is known of a warning."""

    pattern: str
    rule: str
    consequence: str
    remedy: str
    severity: Level = Level.ERROR


_FAILS = "The collective fails, and with it the job."
_STARTS_NOT = "The job does not start."

_KNOWN = tuple(
    (re.compile(known.pattern, re.IGNORECASE), known)
    for known in (
        _Known(
            r"shared memory|/dev/shm|posix_fallocate|shm_open",
            "warned-shared-memory",
            "Ranks of one host cannot pass data: the job does not start.",
            "Give containers more shared memory: --shm-size=1g --ulimit memlock=-1; in "
            "Kubernetes an emptyDir with medium Memory at /dev/shm.",
        ),
        _Known(
            r"ibv_reg_mr|ibv_\w+ failed.*cannot allocate memory",
            "warned-locked-memory",
            "Memory cannot be registered with the adapter: the job does not start.",
            "Raise the limit of locked memory to unlimited (ulimit -l) where the ranks "
            "start: limits.conf, the launcher's service, or --ulimit memlock=-1.",
        ),
        _Known(
            r"got completion .*(status|error)[ =](\w+\()?12\b",
            "warned-peer-unreachable",
            "A message to a peer was repeated and never answered: the job ends.",
            "See whether that peer had ended before; else check cables, the switch "
            "(ibdiagnet), on RoCE NCCL_IB_GID_INDEX, and raise NCCL_IB_TIMEOUT.",
        ),
        _Known(
            r"got completion .*(status|error)[ =](\w+\()?5\b",
            "warned-connection-flushed",
            "A connection was broken before; this follows from it.",
            "Look for the first such line of the job, which has another number.",
        ),
        _Known(
            r"got completion .*(status|error)",
            "warned-adapter-error",
            "An adapter could not carry out a transfer: the job ends.",
            "Turn off ACS (GPUDirect needs that on bare metal); "
            "NCCL_NET_GDR_LEVEL=LOC shows whether it is GPUDirect.",
        ),
        _Known(
            r"async (fatal )?event|speed change|GID table changed",
            "warned-link-event",
            "A port of the network changed while the job ran.",
            "Look at the port's errors and cable: ibstat, mlxlink, dmesg.",
            Level.WARNING,
        ),
        _Known(
            r"failed to open libibverbs",
            "warned-no-libibverbs",
            "No InfiniBand and no RoCE is used, which is right where there is none.",
            "Where there is, install libibverbs (package rdma-core).",
            Level.NOTE,
        ),
        _Known(
            r"numa auto balancing",
            "warned-numa-balancing",
            "The kernel moves memory while the job runs: times vary.",
            "Turn it off: sysctl kernel.numa_balancing=0.",
            Level.WARNING,
        ),
        _Known(
            r"iommu=(pt|on)",
            "warned-iommu",
            "Transfers between devices may be slow, fail or hang.",
            "Start the kernel with what it names.",
            Level.WARNING,
        ),
        _Known(
            r"HSA_FORCE_FINE_GRAIN_PCIE",
            "warned-fine-grain",
            "GPUs that PCI alone connects may be slow, fail or hang.",
            "Set HSA_FORCE_FINE_GRAIN_PCIE=1 for all ranks.",
            Level.WARNING,
        ),
        _Known(
            r"call to ibv_|NET/IB : unable to open",
            "warned-adapter-call",
            "The network adapter cannot be used as wanted.",
            "See with ibv_devinfo that the port is ACTIVE; on RoCE set "
            "NCCL_IB_GID_INDEX as show_gids tells (often 3).",
        ),
        _Known(
            r"no (socket |usable listening |ip )?interface found",
            "warned-no-interface",
            _STARTS_NOT,
            "NCCL_SOCKET_IFNAME must name an interface that is there and has an "
            "address: see ip address.",
        ),
        _Known(
            r"duplicate gpu|multiple ranks are using the same gpu",
            "warned-gpu-shared",
            _STARTS_NOT,
            "Give each rank a GPU of its own: set the device by the local rank before "
            "the first collective.",
        ),
        _Known(
            r"mismatched nccl version|nccl version mismatch|wrong type \d+ != \d+",
            "warned-versions",
            _STARTS_NOT,
            "Use one image on all hosts: the ranks have different versions of NCCL, or "
            "another program uses the port.",
        ),
        _Known(
            r"cuda failure 802\b|system not yet initialized",
            "warned-fabric-manager",
            "GPUs behind NVLink switches cannot be used: the job does not start.",
            "Start nvidia-fabricmanager (systemctl status nvidia-fabricmanager); its "
            "version must be the driver's.",
        ),
        _Known(
            r"imex",
            "warned-imex",
            "NVLink between nodes does not work: the job does not start.",
            "See with nvidia-imex-ctl -N that all nodes of the domain are up, and give "
            "containers an IMEX channel; NCCL_MNNVL_ENABLE=0 does without.",
        ),
        _Known(
            r"driver/library version mismatch|cuda driver (version found|<)"
            r"|driver version is insufficient",
            "warned-driver",
            _STARTS_NOT,
            "Use a driver that is new enough for CUDA; after it was renewed, load it "
            "anew or restart the host.",
        ),
        _Known(
            r"failed to peer with|peer access",
            "warned-peer-access",
            "GPUs do not reach each other's memory: the job does not start.",
            "Turn off ACS and the IOMMU on bare metal, or ask who runs the VM; "
            "NCCL_P2P_DISABLE=1 goes round it at a loss.",
        ),
        _Known(
            r"cuda failure.*out of memory|cuda failure 2\b",
            "warned-gpu-memory",
            _FAILS,
            "Free memory on the GPU: NCCL needs some of its own beside the model; see "
            "nvidia-smi for processes that are left over.",
        ),
        _Known(
            r"cuda failure",
            "warned-cuda",
            _FAILS,
            "An earlier kernel may be to blame: repeat with CUDA_LAUNCH_BLOCKING=1; "
            "look for Xid in dmesg.",
        ),
        _Known(
            r"p2p is disabled between nvlink",
            "warned-nvlink-p2p",
            "The job does not start.",
            "Check the links (nvidia-smi nvlink -s) and the fabric manager: NVIDIA "
            "takes this for a fault of the hardware.",
        ),
        _Known(
            r"already checked in|bootstrap root : mismatch",
            "warned-ranks-mixed",
            _STARTS_NOT,
            "Two processes have the same rank, or two jobs one address: see that a job "
            "before has ended, and that ranks are distinct.",
        ),
        _Known(
            r"no transport found",
            "warned-no-transport",
            "Two ranks have no way to each other: the job does not start.",
            "See that a network was found, and that NCCL_P2P_DISABLE, NCCL_SHM_DISABLE "
            "and NCCL_NET do not forbid all there is.",
        ),
        _Known(
            r"mixed local \w+ device counts",
            "warned-adapters-differ",
            _STARTS_NOT,
            "Hosts have different numbers of network adapters: look for ports that are "
            "down (ibstat), and set NCCL_IB_HCA alike.",
        ),
        _Known(
            r"message truncated|collective mismatch",
            "warned-calls-differ",
            _FAILS,
            "Ranks call different collectives, or with different sizes: compare the "
            "programs' calls, or run with TORCH_DISTRIBUTED_DEBUG=DETAIL.",
        ),
        _Known(
            r"too many open files",
            "warned-open-files",
            _FAILS,
            "Raise the limit of open files: ulimit -n 65536 where the ranks start.",
        ),
        _Known(
            r"connection (refused|reset|timed out|closed)|closed by remote|no route to"
            r"|connect to .* failed|timed? ?out|network is unreachable"
            r"|exceeded (error retry count|retries)",
            "warned-connection",
            "A rank could not be reached, or has gone: the job ends.",
            "Look at the rank that ended first; at the start see that no firewall is "
            "between the hosts and that NCCL_SOCKET_IFNAME fits.",
        ),
        _Known(
            r"^\[(proxy|service) |ncclproxy\w+ .*failed|in abort state",
            "warned-follows",
            "It follows from an error before it, mostly of another rank.",
            "Look for the first warning of the job.",
            Level.WARNING,
        ),
        _Known(
            r"xml|topology|could not find (any local path|cpu close)|too many .*nodes",
            "warned-topology",
            "NCCL cannot use the topology: the job does not start, or is slow.",
            "Check the file that NCCL_TOPO_FILE names: ronde topo lint FILE.",
        ),
    )
)
_UNKNOWN = _Known(
    "",
    "warned",
    "The log does not say what comes of it.",
    "Look at what the same rank says next, and for these words in NCCL's issues.",
    Level.WARNING,
)
# Told with what else shows it.
_TOLD_ELSEWHERE = re.compile(r"Failed to bind NVLink SHARP")


def marked_warnings(job: NcclJob) -> Iterator[Diagnostic]:
    """Tell NCCL's own warnings, with what is known of them."""
    for warning in job.warnings:
        if not _TOLD_ELSEWHERE.match(warning.text):
            known = next(
                (known for pattern, known in _KNOWN if pattern.search(warning.text)),
                _UNKNOWN,
            )
            yield _tell(warning, known)


def _tell(warning: WarningSeen, known: _Known) -> Diagnostic:
    text = warning.text
    if len(text) > _MAX_TEXT:
        text = text[: _MAX_TEXT - 3] + "..."
    times = "once" if warning.num_times == 1 else f"{warning.num_times} times"
    place = f" ({warning.place})" if warning.place else ""
    return Diagnostic(
        rule=known.rule,
        severity=known.severity,
        element=name_some(warning.hosts),
        what=f"NCCL says {times}: {text}{place}",
        consequence=known.consequence,
        remedy=known.remedy,
    )
