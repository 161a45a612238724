"""The rules for NCCL's debug log: severity, consequence and remedy of each.

Sources: NVIDIA's guide to NCCL's troubleshooting, NCCL's source, bug reports.
"""

import re
from collections.abc import Iterator

from ronde.topology.graph import Level

# Each: the rule and its severity; consequence -> remedy. A rule that has several texts
# has a word for each behind a dot. A missing half is that of the rule's first text.
_RULE_TEXTS = """
sockets-despite-infiniband error
  Most of the adapters' bandwidth is lost. -> Set NCCL_NET=IB: NCCL then reports why.
sockets-between-nodes warning
  If there is an adapter, most of its bandwidth is lost. -> Run ibv_devinfo where the
  ranks run: containers need /dev/infiniband, a cloud's adapter needs its plugin.
libfabric-over-tcp warning
  Most of the adapter's bandwidth is lost. -> Run fi_info where the ranks run: a
  container needs the adapter's devices and its libfabric.
networks-differ error
  They cannot connect to each other: the job hangs or ends. -> Use the same adapters,
  drivers and image everywhere, or set NCCL_NET for all ranks.
adapters-mixed error
  A connection between the two kinds fails, mostly with error 12. -> Set
  NCCL_IB_HCA=={ports} for all ranks (the second = belongs to the value), or name the
  RoCE adapters alone.
nvlink-fabric warning
  NVLink joins hosts only inside one clique of one fabric. -> nvidia-smi -q must show
  the state Completed and one ClusterUUID and CliqueId on all hosts: look at
  nvidia-imex-ctl -N and at the partition in the fabric manager.
no-gpudirect-rdma warning
  Data goes through the host's memory. -> Run lsmod | grep nvidia_peermem: if there is
  none, run modprobe nvidia-peermem, or use a driver and a kernel that have DMA-BUF.
no-gpudirect-rdma.some warning
  In ronde topo --matrix see how far GPUs and adapters are apart: farther than PXB it is
  off; NCCL_NET_GDR_LEVEL=SYS forces it.
no-gpudirect-rdma.plugin note
  Nothing, if this kind of GPU does without; else update driver, CUDA and plugin.
virtual-interface error
  Other hosts cannot reach its address: the start hangs, or takes a slow way round. ->
  {choice} to the interface between the hosts, which ip route get ADDRESS names.
shm-where-p2p-was-possible warning
  They reach a part of the GPUs' bandwidth. -> Let every rank see all GPUs of its host,
  use --ipc=host for its containers, and on bare metal turn off ACS and the IOMMU.
p2p-refused warning
  Data between them goes through the host's memory. -> Turn off ACS and the IOMMU on
  bare metal, or ask the VM's administrator; nvidia-smi topo -p2p n shows the pairs.
few-channels error
  Bandwidth is that of one path: tens instead of hundreds of GB/s. -> Compare the GPUs
  in nvidia-smi nvlink -s; run ronde topo lint on what NCCL_TOPO_DUMP_FILE writes.
nvls-lost warning
  AllReduce inside a node takes up to 1.56 times as long. -> Look at the fabric manager
  (systemctl status nvidia-fabricmanager); a VM or container needs all of its GPUs.
slow-pci warning
  All that {name} moves over PCI is limited to that. -> In lspci -vv -s {below}, LnkSta
  must be as wide and fast as LnkCap: reseat card or riser, or set the slot's speed.
slow-pci.virtual error
  In a virtual machine name a file with the host's real speeds in NCCL_TOPO_FILE, or
  give the virtual root port x-speed and x-width; else reseat: lspci -vv -s {below}.
versions-differ error
  The start fails, or ranks choose differently and hang. -> Use one image and one driver
  on all hosts; torch brings its own NCCL, which LD_LIBRARY_PATH may hide.
versions-differ.driver warning
  Features that one of the drivers lacks are lost for all. ->
settings-differ warning
  Ranks may choose differently. -> Set it alike for all ranks, or for none.
settings-differ.absent note
  It may be unset here. -> See that the launcher passes it to all hosts.
nodes-unlike-hosts error
  It cannot connect ranks of different hosts. -> Give each a name or NCCL_HOSTID.
nodes-unlike-hosts.many warning
  Data inside a host goes over the network. -> Give a
  host's containers one name and one boot id, or its name as NCCL_HOSTID.
init-incomplete error
  The job hangs or has ended in its start, unless the log was cut. -> Look at warnings
  of these ranks; then see with ronde check whether hosts reach each other.
init-incomplete.absent error
  Look at the ranks that are not in the log, and at warnings; then whether hosts reach
  each other there.
ranks-not-in-log note
  Findings hold for these. -> Set NCCL_DEBUG_FILE=nccl.%h.%p, and give all files.
slow-init note
  Every start and restart of the job waits so long. -> Bootstrap: see what the last rank
  does before, and NCCL_SOCKET_IFNAME. Kernels: set CUDA_MODULE_LOADING=LAZY.
collective-timeout error
  The job hangs, and the watchdog ends it. -> No rank is known to be late: look at
  NCCL's warnings, at Xid in dmesg, and at the network with ronde check --bandwidth.
collective-timeout.first error
  No collective of the group ever ended: to see which way of the data fails, {tries}
collective-timeout.late error
  Look at {suspects} first, for an exception in the output; else py-spy dump shows what
  is waited for: data, a checkpoint, another collective.
collective-timeout.silent error
  Look at {suspects} first: probably late or dead, if the output is in the log at all;
  py-spy dump shows a hang.
collective-timeout.ended error
  Look at {suspects} first: see rank-failed.
collective-timeout.odd error
  Look at {suspects} first, for a call left out or made twice, or another branch:
  TORCH_DISTRIBUTED_DEBUG=DETAIL checks each call.
collective-timeout.differ error
  Compare the ranks' calls and sizes: TORCH_DISTRIBUTED_DEBUG=DETAIL checks each.
rank-failed.restarted warning
  The time since the last checkpoint is lost. ->
rank-failed.caught note
  The rank wrote more lines, or all ranks ended as they should. -> Nothing, if the
  program means to catch it.
warned-adapter-memory.peermem note
  There is no DMA-BUF; GPUDirect RDMA used nvidia-peermem. -> Nothing.
watchdog-stuck error
  The process is ended. -> A call of CUDA or NCCL hangs, or another thread holds
  Python's lock: py-spy dump --native shows the stacks.
store-lost note
  A running job ends; at the end of a healthy one it is harmless. -> Look at the process
  that holds the store, mostly rank 0: it ended first.
log-incomplete note
  They are missing here. -> Give each rank a file: NCCL_DEBUG_FILE=nccl.%h.%p.
"""
# The same of the causes of ranks that failed, with a pattern of them.
_FAILURE_TEXTS = r"""
rank-failed.gpu-memory error (cuda|hip) out of memory|OutOfMemoryError
  The job ends. -> Make batches smaller, or shard the model more; nvidia-smi shows
  left-over processes on the GPU.
rank-failed.gpu-fault error uncorrectable|ecc error|nvlink error|GPU is lost
  The GPU fails: look for Xid in dmesg and at nvidia-smi -q; take the host out of use.
rank-failed.kernel error illegal (memory|instr|addr)|device-side assert|misaligned
  A kernel is wrong: CUDA_LAUNCH_BLOCKING=1 shows the call, compute-sanitizer the line.
rank-failed.follows warning remote (process|error)|connection (closed|reset|refused)
    |broken pipe|terminated|abort|collective operation timeout
  It mostly follows from the end of another rank: give the output of all ranks.
rank-failed.gpu error (cuda|hip) (error|failure)
  Look for Xid in dmesg on that host; CUDA_LAUNCH_BLOCKING=1 shows the call.
rank-failed.memory error out of memory|kill
  Mostly the host or the job's limit had no memory left: see dmesg and sacct -o MaxRSS;
  ask for more memory, or use fewer workers that load data.
rank-failed.crash error segmentation|bus error|floating|illegal
  PYTHONFAULTHANDLER=1 shows where; a bus error is mostly a full /dev/shm.
rank-failed.waited error timed out waiting \d+ms
  In Gloo it waited for another rank, which ended or hangs: py-spy dump shows where.
rank-failed.store error clients joined|for clients
  Compare the number of ranks that started with the size of the job; all must reach the
  store at MASTER_ADDR and MASTER_PORT.
rank-failed.code error exit(ed with exit)? code
  Its output before that shows why: look for a traceback.
rank-failed error .?
  Look at its traceback.
"""
# The same of lines that NCCL itself marks as warnings. Behind the severity stands a
# pattern of text and place; the first that fits counts.
_SO = "The job does not start, or ends."
_WARNING_TEXTS = r"""
warned-link-types error incompatible devices|is incompatible with the local
  InfiniBand and RoCE adapters cannot connect: name one kind alone in NCCL_IB_HCA.
warned-nvls error nvls\.cc|multicast
  Reduction in the NVLink switches (NVLS) fails: look at the fabric manager (systemctl
  status nvidia-fabricmanager), and give a VM or container all GPUs of the switch.
  NCCL_NVLS_ENABLE=0 does without.
warned-peer-access error failed to peer with|peer access|p2p is disabled between nvlink
  Turn off ACS and the IOMMU on bare metal, or ask the VM's administrator; check NVLinks
  (nvidia-smi nvlink -s). NCCL_P2P_DISABLE=1 avoids it at a loss.
warned-fabric-manager error cuda failure 802\b|system not yet initialized
  Run systemctl start nvidia-fabricmanager; its version must be the driver's.
warned-driver error driver/library version mismatch|cuda driver (version found|<)
    |driver version is insufficient|driver combination|forward compat|no kernel image
  Use a driver new enough for CUDA, an NCCL built for the GPU; after an update, reboot.
warned-gpu-memory error (cuda|hip) failure.*out of memory|failed to cuda (m|c)alloc
  NCCL needs GPU memory beside the model: nvidia-smi shows left-over processes.
warned-gpu-fault error uncorrectable|ecc error|nvlink error
  The GPU fails: look for Xid in dmesg and at nvidia-smi -q; take the host out of use.
warned-gpu-absent error cuda-capable|invalid device ordinal
  The rank has no GPU to use: see CUDA_VISIBLE_DEVICES, local rank, exclusive mode.
warned-gpu-sharing error attaching to shared memory|ipcgetmem
    |(cuda|hip) failure.*operation not
    |(cuda|hip) failure(?! 7\d\d|.*(illegal|launch)).*(p2p|shm\w*|alloc\w*)\.\w+:
  Give containers of one host the same IPC and PID namespace (--ipc=host --pid=host);
  NCCL_CUMEM_ENABLE=0 and NCCL_CUMEM_HOST_ENABLE=0 share memory the older way.
warned-hip error hip failure
  An earlier kernel may be to blame: set AMD_SERIALIZE_KERNEL=3; see amdgpu in dmesg.
warned-cuda error cuda failure
  An earlier kernel may be to blame: set CUDA_LAUNCH_BLOCKING=1; see Xid in dmesg.
warned-shared-memory error shared memory|/dev/shm|posix_fallocate|shm_open
  Give containers shared memory: --shm-size=1g; a medium Memory emptyDir at /dev/shm.
warned-locked-memory error (ibv|mlx5dv)_\w+ .*(allocate memory|(or|no|with) -?12\b)
  Set the limit of locked memory (ulimit -l) to unlimited where the ranks start:
  limits.conf, the service, --ulimit memlock=-1; if it is, end other users of the port.
warned-adapter-access error (ibv_|unable to open).*(not permitted|permission denied)
  Give the container --device=/dev/infiniband and --cap-add=IPC_LOCK.
warned-adapter-lost error call to ibv_\w+ .*(no such device|input/output error)
  The adapter does not answer: look in dmesg for its reset, and run ibv_devinfo.
warned-adapter-memory error ibv_reg_(dmabuf_)?mr
  The adapter cannot use the GPU's memory: run modprobe nvidia-peermem, or use a driver
  and a kernel that have DMA-BUF; NCCL_NET_GDR_LEVEL=LOC does without.
warned-adapter-route error ibv_modify_qp.*(timed out|unreachable|no route)
  On RoCE the adapters need addresses of one network, or a route: ping the peer's from
  here. NCCL_IB_GID_INDEX must name that address (show_gids).
warned-adapter-call error call to ibv_|NET/IB : unable to open
  ibv_devinfo must show it ACTIVE; on RoCE set NCCL_IB_GID_INDEX as in show_gids.
warned-peer-unreachable error got completion .*(status|error)[ =](\w+\()?12\b
  The peer did not answer: the job ends. -> See whether it had ended before; else check
  cables, the switch (ibdiagnet), on RoCE NCCL_IB_GID_INDEX, and raise NCCL_IB_TIMEOUT.
warned-adapter-error error got completion .*(status|error)(?![ =](\w+\()?5\b)
  On bare metal turn off ACS; NCCL_NET_GDR_LEVEL=LOC shows whether it is GPUDirect.
warned-link-event warning async (fatal )?event|speed change|GID table changed
  A port changed while the job ran. -> Look at its errors and cable: ibstat, mlxlink.
warned-no-libibverbs note failed to open libibverbs
  No InfiniBand and no RoCE is used. -> Where there is some, install rdma-core.
warned-host-setting warning numa auto balancing|iommu=(pt|on)|HSA_FORCE_FINE_GRAIN_PCIE
  Transfers may be slow, vary, fail or hang. -> Set the option that the line names.
warned-no-interface error no (socket |usable listening |ip )?interface found
  NCCL_SOCKET_IFNAME must name an interface that has an address: see ip address.
warned-gpu-shared error duplicate gpu|multiple ranks are using the same gpu
  Give each rank its own GPU: set the device by local rank before any collective.
warned-versions error mismatched nccl version|nccl version mismatch
    |wrong type \d+ != \d+
  Use one image on all hosts: NCCL's versions differ, or others use the port.
warned-imex error imex
  nvidia-imex-ctl -N must show all nodes of the domain as up, and containers need an
  IMEX channel; NCCL_MNNVL_ENABLE=0 does without.
warned-host-memory error failed to (malloc|cuda host alloc)|malloc\(size
  The host or the container's limit has no memory left: see free -g and dmesg.
warned-open-files error too many open files
  Raise the limit of open files (ulimit -n) where the ranks start.
warned-calls-differ error message truncated|collective mismatch
  Ranks call different collectives or sizes: run with TORCH_DISTRIBUTED_DEBUG=DETAIL.
warned-ranks-mixed error already checked in|bootstrap root : mismatch|already in use
  Two processes have the same rank, or two jobs one address: end older jobs.
warned-no-transport error no transport found|mixed local \w+ device counts
  See that no host lacks a network adapter (ibstat), and that NCCL_P2P_DISABLE,
  NCCL_SHM_DISABLE, NCCL_NET and NCCL_IB_HCA do not forbid all there is.
warned-connection error connection (refused|reset|timed out|closed)|closed by remote
    |no route to|connect to .* failed|timed? ?out|network is unreachable
    |exceeded (error retry count|retries)
  A rank could not be reached, or has gone: the job ends. -> Look at the rank that ended
  first. At the start, check firewalls between the hosts and NCCL_SOCKET_IFNAME.
warned-follows warning ^\[(proxy|service) |ncclproxy\w+ .*failed|in abort state
    |got completion
  It follows from an error, mostly of another rank. -> Look for the first warning.
warned-topology error xml|topology|could not find (any local path|cpu close)
    |too many .*nodes
  Check the file that NCCL_TOPO_FILE names: ronde topo lint FILE.
warned warning .?
  Its cause is unknown. -> Look at the next lines of the rank, and in NCCL's issues.
"""


def _read(table: str) -> Iterator[tuple[str, str, tuple[Level, str, str]]]:
    bases: dict[str, tuple[str, str]] = {}
    for entry in re.split(r"\n(?=\w)", table.strip().replace("\n    |", "|")):
        head, *lines = entry.split("\n  ")
        rule, severity, pattern = [*head.split(" ", 2), ""][:3]
        consequence, arrow, remedy = " ".join(lines).rpartition("->")
        if not arrow:
            consequence = bases.get(rule.partition(".")[0], (_SO, ""))[0]
        base = bases.setdefault(rule.partition(".")[0], (consequence, remedy))
        texts = consequence.strip(), (remedy or base[1]).strip()
        yield rule, pattern, (Level(severity), *texts)


_WARNINGS, _FAILURES = list(_read(_WARNING_TEXTS)), list(_read(_FAILURE_TEXTS))
_TEXTS = (*_read(_RULE_TEXTS), *_WARNINGS, *_FAILURES)
RULES = {rule: texts for rule, _, texts in _TEXTS}
"""Severity, consequence and remedy by rule; a suffix marks one of several texts."""


def rule_of_warning(text: str) -> str:
    return next(
        r for r, pattern, _ in _WARNINGS if re.search(pattern, text, re.IGNORECASE)
    )


def rule_of_failure(cause: str) -> str:
    return next(
        r for r, pattern, _ in _FAILURES if re.search(pattern, cause, re.IGNORECASE)
    )
