"""What is said of a log of NCCL: the right faults, no others, in words that fit."""

import io
import json
import re
from pathlib import Path

import pytest
from tests.commands import refusal
from tests.topology.nccl_job import JobLog, text_of

from ronde.cli import main
from ronde.plain_values import from_plain
from ronde.render import draw_log
from ronde.topology import (
    RULES,
    Diagnostic,
    Level,
    NcclLog,
    lint_nccl_log,
    read_nccl_log,
)


def run(words):
    return main(["topo", "log", *words])


SAMPLE = (
    Path(__file__).parent
    / "samples/nccl_debug_logs/hgx_h200_b200_nccl2.27.3_selected_lines.log"
)
ERROR, WARNING, NOTE = Level
NVLS_LOST = (
    "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error "
    "401 'the operation cannot be performed in the present state'. Proceeding without "
    "NVLS support."
)
IBV = "misc/ibvwrap.cc:229"
NO_NVLINK = "2 coll channels, 0 nvls channels, 2 p2p channels, 2 p2p channels per peer"


def read(text: bytes) -> NcclLog:
    return read_nccl_log([io.BytesIO(text)])


def found(text: bytes) -> dict[str, Level]:
    return {finding.rule: finding.severity for finding in lint_nccl_log(read(text))}


def find(text: bytes, rule: str) -> Diagnostic:
    (finding,) = (each for each in lint_nccl_log(read(text)) if each.rule == rule)
    return finding


def without(text: bytes, *words: str) -> bytes:
    lines = text.splitlines(keepends=True)
    return b"".join(
        line for line in lines if not any(word.encode() in line for word in words)
    )


@pytest.mark.parametrize(
    "changes",
    # On one node sockets, and adapters without GPUDirect, cost nothing.
    [{"num_hosts": 4}, {"num_hosts": 1, "network": "Socket", "gdr": "Disabled"}],
)
def test_a_healthy_job_has_no_finding(changes: dict[str, object]) -> None:
    assert found(text_of(JobLog(), **changes)) == {}


def test_where_lines_were_lost_a_start_may_have_been_said_to_be_complete() -> None:
    text = text_of(JobLog(num_hosts=1))
    lines = text.splitlines(keepends=True)
    silent = b"".join(
        line for line in lines if not (b":1002:" in line and b"START" not in line)
    )
    assert find(silent, "init-incomplete").severity is ERROR
    broken = b"node0:1003:2003 [3] NCCL INFO comm 0x1 node0:1004:2004 [4] NCCL INFO x\n"
    finding = find(silent + broken, "init-incomplete")
    assert finding.severity is WARNING
    assert "1 line was lost where the log broke" in finding.seen
    # How long a start took is said at its end.
    without_end = without(text, "COMPLETE")
    assert "init-incomplete" not in found(without_end)


@pytest.mark.parametrize(
    ("changes", "rules"),
    [
        (
            {"network": "Socket", "inter": "NET/Socket/0"},
            {"sockets-despite-infiniband": ERROR},
        ),
        (
            {
                "network": "Socket",
                "inter": "NET/Socket/0",
                "candidates": "No device found.",
            },
            {"sockets-between-nodes": WARNING},
        ),
        ({"inter": "NET/IB/0"}, {"no-gpudirect-rdma": WARNING}),
        ({"gdr": "Disabled", "inter": "NET/IB/0"}, {"no-gpudirect-rdma": WARNING}),
        # It is in use all the same: another adapter has it.
        ({"gdr": "Disabled"}, {}),
        ({"bootstrap": "docker0"}, {"virtual-interface": ERROR}),
        ({"bootstrap": "veth12ab"}, {"virtual-interface": ERROR}),
        ({"bootstrap": "lo"}, {"virtual-interface": ERROR}),
        ({"bootstrap": "lower0"}, {}),
        ({"bootstrap": "lo", "num_hosts": 1}, {}),
        ({"intra": "SHM/direct/direct"}, {"shm-where-p2p-was-possible": ERROR}),
        ({"channels": NO_NVLINK}, {"few-channels": ERROR}),
        ({"num_nodes": 1}, {"nodes-unlike-hosts": ERROR}),
        ({"num_nodes": 16}, {"nodes-unlike-hosts": WARNING}),
        ({"extra": (NVLS_LOST,)}, {"nvls-lost": WARNING}),
        (
            {"extra": ("NVLS multicast support is not available on dev 0",)},
            {"nvls-lost": WARNING},
        ),
        (
            {
                "extra": (
                    (
                        "P2P is disabled between connected GPUs 1 and 0. You can "
                        "repress this message with NCCL_IGNORE_DISABLED_P2P=1."
                    ),
                )
            },
            {"p2p-refused": WARNING},
        ),
    ],
)
def test_each_fault_is_found_and_no_other(
    changes: dict[str, object], rules: dict[str, Level]
) -> None:
    assert found(text_of(JobLog(), **changes)) == rules


def test_the_cause_of_no_gpudirect_depends_on_how_many_have_none() -> None:
    text = text_of(JobLog(inter="NET/IB/0"))
    assert "lsmod | grep nvidia_peermem" in find(text, "no-gpudirect-rdma").remedy
    some = text_of(JobLog()).replace(b"NET/IB/1/GDRDMA", b"NET/IB/1", 1)
    assert "ronde topo --matrix" in find(some, "no-gpudirect-rdma").remedy


def test_a_setting_is_named_as_the_cause() -> None:
    job = JobLog(network="Socket", extra=("NCCL_IB_DISABLE set by environment to 1.",))
    text = without(text_of(job), "NET/IB")
    sockets = find(text, "sockets-between-nodes")
    assert "NCCL_IB_DISABLE=1 keeps NCCL from InfiniBand" in sockets.seen
    assert sockets.remedy == "Unset NCCL_IB_DISABLE."

    job = JobLog(
        intra="SHM/direct", extra=("NCCL_P2P_LEVEL set by environment to LOC",)
    )
    shared = find(text_of(job), "shm-where-p2p-was-possible")
    assert "NCCL_P2P_LEVEL=LOC" in shared.remedy

    job = JobLog(
        channels=NO_NVLINK, extra=("NCCL_MAX_NCHANNELS set by environment to 2.",)
    )
    few = find(text_of(job), "few-channels")
    assert "NCCL_MAX_NCHANNELS=2" in few.remedy


def test_what_the_log_does_not_show_is_no_fault() -> None:
    """Shared memory is right where nothing says that GPUs reach each other."""
    text = without(text_of(JobLog(num_hosts=1, intra="SHM/direct")), "NVL")
    assert found(text) == {}
    text = without(text_of(JobLog(num_hosts=1, channels=NO_NVLINK)), "NVL")
    assert found(text) == {}


@pytest.mark.parametrize(
    ("paths", "severity"),
    [
        # Nobody says how far the GPUs are apart, or some are far: it may be right.
        ("", NOTE),
        ("GPU/0-2 (1/24.0/PIX) GPU/0-3 (3/10.0/SYS) ", NOTE),
        ("GPU/0-2 (1/24.0/PIX) GPU/0-3 (2/24.0/PXB) ", WARNING),
        # Some are joined by NVLink, and some others are far, as in a cube of V100.
        ("GPU/0-2 (1/40.0/NVL) GPU/0-3 (3/10.0/SYS) ", NOTE),
    ],
)
def test_shared_memory_beside_peers(paths: str, severity: Level) -> None:
    text = without(text_of(JobLog(num_hosts=1)), "NVL")
    text = text.replace(b"3[3] via P2P/CUMEM", b"3[3] via SHM/direct")
    if paths:
        text += f"node0:1000:2000 [0] NCCL INFO GPU/0-1 :{paths}\n".encode()

    assert found(text) == {"shm-where-p2p-was-possible": severity}


def libfabric(provider: str, *extra: str) -> bytes:
    job = JobLog(network="AWS Libfabric", inter="NET/AWS Libfabric/{nic}", extra=extra)
    text = without(text_of(job), "NET/IB", "GPU Direct")
    said = (
        f"NET/OFI Selected provider is {provider}, fabric is {provider} (found 2 nics)"
    )
    return text + f"node0:1000:2000 [0] NCCL INFO {said}\n".encode()


def test_what_drives_libfabric_is_reported() -> None:
    text = libfabric("efa")

    words = " ".join(draw_log(read(text), ()).split())
    assert "AWS Libfabric over efa (2 adapters)" in words
    assert found(text) == {"no-gpudirect-rdma": WARNING}
    rules = {"no-gpudirect-rdma": WARNING, "libfabric-over-tcp": WARNING}
    assert found(libfabric("tcp;ofi_rxm")) == rules
    over = find(libfabric("tcp;ofi_rxm"), "libfabric-over-tcp")
    assert "its provider tcp;ofi_rxm, not" in over.seen


def test_a_plugin_that_knows_why_it_has_no_gpudirect() -> None:
    """AWS's instances with small GPUs have none."""
    why = "NET/OFI Could not disable CUDA API usage for HMEM, disabling GDR"
    finding = find(libfabric("efa", why), "no-gpudirect-rdma")

    assert finding.severity is NOTE
    assert "the plugin reports: Could not disable CUDA API usage" in finding.seen


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("Using network IB", "Using network Socket", "networks-differ"),
        (
            "NCCL version 2.27.3+cuda12.9",
            "NCCL version 2.26.2+cuda12.8",
            "versions-differ",
        ),
    ],
)
def test_a_rank_unlike_the_others(old: str, new: str, rule: str) -> None:
    prefix = "node1:1012:2012 [4] NCCL INFO "
    text = text_of(JobLog()).decode().replace(prefix + old, prefix + new)
    finding = find(text.encode(), rule)

    assert finding.severity is ERROR
    assert f"{new.rsplit(maxsplit=1)[-1]} on node1" in finding.seen


def test_settings_that_differ() -> None:
    text = text_of(JobLog(extra=("NCCL_ALGO set by environment to Ring",)))
    other = text.replace(
        b"node1:1009:2009 [1] NCCL INFO NCCL_ALGO set by environment to Ring",
        b"node1:1009:2009 [1] NCCL INFO NCCL_ALGO set by environment to Tree",
    )

    assert found(text) == {}
    assert found(other) == {"settings-differ": WARNING}
    one_host = (
        text_of(JobLog(extra=("NCCL_DEBUG set by environment to INFO",)))
        + b"node1:1009:2009 [1] NCCL INFO NCCL_ALGO set by environment to Tree\n"
    )
    assert found(one_host) == {"settings-differ": NOTE}
    assert find(one_host, "settings-differ").element == "node0"
    # Whoever writes the file says so, and nobody else.
    dump = one_host.replace(b"NCCL_ALGO", b"NCCL_TOPO_DUMP_FILE")
    assert found(dump) == {}


def test_ranks_that_never_got_through() -> None:
    text = text_of(JobLog(num_hosts=1))
    lines = text.splitlines(keepends=True)
    hanging = b"".join(
        line
        for line in lines
        # Rank 5 is not there at all, ranks 2 and 3 are not said to be complete.
        if b":1005:" not in line
        and not (
            (b"COMPLETE" in line or b"timings" in line)
            and (b":1002:" in line or b":1003:" in line)
        )
    )
    finding = find(hanging, "init-incomplete")

    assert finding.severity is ERROR
    assert finding.element == "ranks 2-3 on node0"
    assert finding.seen.startswith("The start of 2 of 8 ranks began and is not")
    assert "not in the log" in finding.remedy
    assert "; 1, such as rank 5, are not in the log" in finding.seen
    assert found(hanging)["ranks-not-in-log"] is NOTE


def test_who_could_not_be_reached_is_reported() -> None:
    text = without(text_of(JobLog(num_hosts=1)), "COMPLETE", "timings")
    line = (
        "node0:1000:2000 [0] NCCL INFO socketPollConnect: connect to 10.0.0.9<4567> "
        "returned No route to host, retrying (9/34) after sleep for 900 msec\n"
    )
    finding = find(text + line.encode(), "init-incomplete")

    assert "on node0 they try to connect: 10.0.0.9<4567> returned No" in finding.seen
    # Who answered late is of no interest.
    assert found(text_of(JobLog(num_hosts=1)) + line.encode()) == {}


def test_a_slow_start_is_reported_with_its_phase() -> None:
    text = text_of(JobLog(num_hosts=1)).replace(
        b"rank 6 nranks 8 total 3.25 (kernels 0.25, alloc 0.50, bootstrap 1.25",
        b"rank 6 nranks 8 total 93.25 (kernels 0.25, alloc 0.50, bootstrap 91.25",
    )
    finding = find(text, "slow-init")

    assert finding.element == "rank 6 on node0"
    assert "took 93.2 s, of which bootstrap 91.2 s" in finding.seen


@pytest.mark.parametrize(
    ("old", "new", "severity", "has", "should"),
    [
        # A bridge trained at the first generation, one lane: 1 x 15/80.
        ("+ PCI[48.0] - PCI/0-1a000", "+ PCI[0.2] - PCI/0-1a000", ERROR, 0.2, 0.0),
        ("+ PCI[48.0] - GPU", "+ PCI[3.0] - GPU", ERROR, 3.0, 0.0),
    ],
)
def test_slow_pci(
    old: str, new: str, severity: Level, has: float, should: float
) -> None:
    # What hangs below a shorter link begins further left, as NCCL prints it.
    text = text_of(JobLog(num_hosts=1)).decode().replace(old, new)
    if "PCI/0-1a000" in new:
        text = text.replace("INFO               +", "INFO              +")
        text = text.replace("INFO " + " " * 28 + "+", "INFO " + " " * 27 + "+")
    findings = [f for f in lint_nccl_log(read(text.encode())) if f.rule == "slow-pci"]

    assert findings[0].severity is severity
    assert (findings[0].has_gb_per_s, findings[0].should_gb_per_s) == (has, should)


@pytest.mark.parametrize(
    ("pci", "port", "is_slow"),
    [
        # By NCCL's count PCIe 4 x16 is 24 and PCIe 5 x16 is 48, by the standard 31.5
        # and 63: ports of 200 and of 400 Gb/s are at home there.
        (24.0, 25.0, False),
        (48.0, 50.0, False),
        (24.0, 50.0, True),
        (3.0, 12.5, True),
    ],
)
def test_an_adapter_is_slow_where_its_link_is_not_its_port(
    pci: float, port: float, *, is_slow: bool
) -> None:
    text = text_of(JobLog(num_hosts=1)).decode()
    text = text.replace("PCI[48.0] - NIC", f"PCI[{pci}] - NIC")
    text = text.replace("NET[25.0]", f"NET[{port}]").replace("/25.000000)", f"/{port})")
    rules = found(text.encode())

    assert rules == ({"slow-pci": ERROR if pci == 3.0 else WARNING} if is_slow else {})


def test_two_channels_are_right_for_a_rank_a_node() -> None:
    """Of groups that have one GPU of each host, say, there are many in each job."""
    text = text_of(JobLog()).decode()
    lines = ""
    for n in range(2):
        split = (
            f"ncclCommSplit comm 0x77{n} rank {n} nranks 2 cudaDev 0 nvmlDev 0 busId "
            f"1b000 parent 0x5500{8 * n:02x} splitCount 1 color 0 key {n} - Init "
        )
        layout = "nRanks 2 nNodes 2 localRanks 1 localRank 0 MNNVL 0"
        for said in (
            f"{split}START",
            f"comm 0x77{n} rank {n} {layout}",
            NO_NVLINK,
            f"{split}COMPLETE",
        ):
            lines += f"node{n}:{1000 + 8 * n}:77 [0] NCCL INFO {said}\n"
    assert found((text + lines).encode()) == {}
    both = (text + lines).replace("nRanks 2 nNodes 2", "nRanks 2 nNodes 1")
    assert found(both.encode())["few-channels"] is ERROR


def test_two_channels_are_right_for_a_small_bridge() -> None:
    """Four links of 12 GB/s between two cards make one way of 40 or 48, doubled."""
    text = text_of(JobLog(num_hosts=1, channels=NO_NVLINK))
    bridge = text.replace(b"NVL[370.8] - NVS/0-0", b"NVL[48.0] - GPU/0-2000")

    assert found(text) == {"few-channels": ERROR}
    assert found(bridge) == {}
    available = b"node0:1000:2000 [0] NCCL INFO NVLS multicast support is available on "
    switched = without(text, "NVL[", "/NVL)") + available + b"dev 0\n"
    assert found(switched) == {"few-channels": ERROR}


def test_what_a_virtual_machine_reports_of_its_links_has_its_own_remedy() -> None:
    text = text_of(JobLog(num_hosts=1)).replace(b"PCI[48.0] - GPU", b"PCI[0.2] - GPU")
    finding = find(text, "slow-pci")

    assert finding.element == "GPU 0000:1b:00.0 on node0"
    assert "NCCL_TOPO_FILE" in finding.remedy
    assert "lspci -vv -s 0000:1b:00.0" in finding.remedy


# The expected rule, the place in NCCL's source, and the text of the warning.
WARNINGS = """
shared-memory misc/shm.cc:9 Error: failed to extend /dev/shm/nccl-x to 9 bytes
locked-memory ibvwrap.cc:9 Call to ibv_create_qp failed with error Unknown error -12
peer-unreachable net_ib.cc:9 NET/IB : Got completion from peer x<5> with status=12
peer-unreachable net_ib.cc:9 NET/IB: Got completion from peer x<5> with\
 status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_SEND(0) vendor_err=129
follows net_ib.cc:9 NET/IB : Got completion from peer x<1> with error 5, opcode 1, len 1
adapter-error net_ib.cc:9 NET/IB : Got completion from peer x<1> with error 4, opcode 1
link-event net_ib.cc:9 NET/IB : mlx5_0:1 Got non-fatal async event: port error(10)
no-interface bootstrap.cc:9 Bootstrap : no socket interface found
gpu-shared init.cc:9 Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 3000
gpu-memory include/alloc.h:52 Cuda failure 2 'out of memory'
gpu-fault init.cc:9 Cuda failure 'uncorrectable ECC error'
gpu-absent init.cc:9 Cuda failure 101 'invalid device ordinal'
gpu-sharing init.cc:9 Cuda failure 800 'operation not permitted'
gpu-sharing transport/p2p.cc:285 Cuda failure 304 'OS call failed'
cuda transport/p2p.cc:285 Cuda failure 700 'an illegal memory access'
hip enqueue.cc:9 HIP failure: 'unspecified launch failure'
nvls transport/nvls.cc:254 Cuda failure 1 'invalid argument'
connection misc/socket.cc:9 socketStartConnect: Connect to 10.0.0.1<45> failed : refused
calls-differ transport.cc:9 Message truncated : received 2048 bytes instead of 1024
versions misc/socket.cc:9 socketFinalizeAccept: wrong type 4 != 3
topology graph/xml.cc:9 XML Topology has wrong version 2, 1 needed
no-libibverbs misc/ibvsymbols.cc:9 Failed to open libibverbs.so[.1]
host-setting init.cc:9 NUMA auto balancing enabled which can lead to
host-setting init.cc:9 Missing "iommu=pt" from kernel command line
fabric-manager init.cc:9 Cuda failure 802 'system not yet initialized'
imex init.cc:9 MNNVL is available but not working. Check the IMEX configuration
driver misc/nvmlwrap.cc:9 nvmlInit_v2() failed: Driver/library version mismatch
peer-access transport/p2p.cc:9 failed to peer with device 1(=1000): 205 x
no-transport transport.cc:9 No transport found for rank 0[1] -> rank 1[2]
adapter-call misc/ibvwrap.cc:9 Call to ibv_modify_qp failed with 22 Invalid argument
adapter-route ibvwrap.cc:9 Call to ibv_modify_qp failed with 110 Connection timed out
adapter-lost misc/ibvwrap.cc:9 Call to ibv_poll_cq failed with error No such device
adapter-memory misc/ibvwrap.cc:9 Call to ibv_reg_mr_iova2 failed with error Bad address
adapter-access misc/ibvwrap.cc:9 Call to ibv_open_device failed with error Operation\
 not permitted
link-types net_ib/connect.cc:1 Attempted to connect incompatible devices: [0]x
open-files misc/socket.cc:5 Call to accept failed: Too many open files
ranks-mixed misc/socket.cc:5 Call to bind failed: Address already in use
host-memory misc/utils.cc:5 Failed to malloc 1024 bytes
"""


@pytest.mark.parametrize("warning", WARNINGS.strip().splitlines())
def test_a_warning_of_nccl_has_its_remedy(warning: str) -> None:
    rule, place, text = warning.split(" ", 2)
    line = f"node1:77:120 [0] {place} NCCL WARN {text}\n"
    assert found(line.encode()).keys() == {f"warned-{rule}"}


def test_a_warning_of_unknown_cause_is_shown() -> None:
    line = b"node0:1:2 [0] misc/socket.cc:50 NCCL WARN The flux has no capacity\n"
    seen = find(text_of(JobLog(num_hosts=1)) + line, "warned").seen
    assert "The flux has no capacity (misc/socket.cc:50)" in seen


def test_no_dma_buf_is_a_note_where_peermem_is_used() -> None:
    line = f"node1:1008:1 [0] {IBV} NCCL WARN Call to ibv_reg_dmabuf_mr_iova2 failed "
    line += "with error Operation not supported\n"
    for inter, level in (("NET/IB/0/GDRDMA", NOTE), ("NET/IB/0", ERROR)):
        text = text_of(JobLog(inter=inter)) + line.encode()
        assert find(text, "warned-adapter-memory").severity is level


def test_a_warning_of_all_ranks_is_reported_once() -> None:
    lines = "".join(
        f"node{n}:1:1 [0] misc/shm.cc:1 NCCL WARN Cuda failure 70{n} 'x'\n"
        for n in range(9)
    )
    findings = lint_nccl_log(read(lines.encode()))

    (finding,) = (each for each in findings if each.rule == "warned-cuda")
    assert finding.seen.startswith("NCCL reports 9 times: Cuda failure 700 'x'")
    assert finding.element == "node0, node1, node2 and 6 more"
    shown = draw_log(read(lines.encode()), findings)
    assert shown.startswith("number of ranks unknown on 9 hosts (node0, node1, node2, ")
    assert shown.count("number of ranks") == 1


def fabric(host: str, gpu: int, uuid: str, clique: str = "7ffe", rest: str = "") -> str:
    return (
        f"{host}:1:{gpu} [0] NCCL INFO MNNVL busId 0x{gpu}01000 fabric UUID {uuid} "
        f"cliqueId 0x{clique} {rest or 'state 3 healthMask 0x0'}\n"
    )


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        (
            fabric("n5", 8, "aa.bb") + fabric("n5", 9, "0.0", "0"),
            "GPUs have no fabric UUID: 0009:01:00.0 on n5.",
        ),
        (
            fabric("n5", 8, "aa.bb") + fabric("n6", 8, "aa.bb", "7ffd"),
            (
                "GPUs are in clique 7ffe of the fabric: 0008:01:00.0 on n5. "
                "GPUs are in clique 7ffd of the fabric: 0008:01:00.0 on n6."
            ),
        ),
        (
            fabric("n5", 8, "0.0", rest="state 2 healthMask 0x0"),
            "GPUs have not joined the fabric: 0008:01:00.0 on n5.",
        ),
        (
            fabric("n5", 8, "aa.bb", rest="state 3 healthMask 0xa9"),
            "GPUs report a bad link or route (healthMask 0xa9): 0008:01:00.0 on n5.",
        ),
        # A node alone has none, and two racks are two fabrics.
        (fabric("n5", 0, "0.0", rest="state 3 healthMask 0x80"), ""),
        (fabric("n5", 8, "aa.bb") + fabric("n6", 8, "aa.cc", "1"), ""),
    ],
)
def test_the_fabric_of_nvlink_between_hosts(lines: str, what: str) -> None:
    findings = lint_nccl_log(read(lines.encode()))

    assert [each.seen for each in findings] == [what] * bool(what)


@pytest.mark.parametrize(
    ("changes", "rules"),
    [
        ({}, {"adapters-mixed": NOTE}),
        # On one host nothing goes over them.
        ({"num_hosts": 1}, {}),
        ({"candidates": "Using [0]a:1/IB [1]b:1/IB; OOB eno1:10.0.0.1<0>"}, {}),
        ({"candidates": "Using [0]a:1/RoCE [RO]; OOB eno1:10.0.0.1<0>"}, {}),
    ],
)
def test_infiniband_and_roce_in_one_job(
    changes: dict[str, object], rules: dict[str, Level]
) -> None:
    both = {"candidates": "Using [0]a:1/IB [1]c:2/IB [2]b:1/RoCE; OOB eno1:10.0.0.1<0>"}
    text = text_of(JobLog(), **both | changes)

    assert found(text) == rules
    failed = f"node1:1009:9 [0] {IBV} NCCL WARN NET/IB : Got completion from peer x<1> "
    failed += "with error 12, opcode 0, len 0, vendor err 129\n"
    if rules:
        finding = find(text + failed.encode(), "adapters-mixed")
        assert finding.severity is ERROR
        assert "InfiniBand (a:1/IB, c:2/IB) and RoCE (b:1/RoCE)." in finding.seen
        assert "NCCL_IB_HCA==a:1,c:2 for all ranks (the second =" in finding.remedy


# ---- words


def test_the_words_name_what_was_chosen() -> None:
    log = read(text_of(JobLog()))
    text = " ".join(draw_log(log, ()).split())

    assert "16 ranks on 2 hosts (node0, node1), NCCL 2.27.3+cuda12.9" in text
    assert "CUDA driver 12.9" in text
    assert "bootstrap eno1" in text
    assert "IB over mlx5_0:1/IB, mlx5_1:1/IB; GPUDirect RDMA enabled" in text
    assert "14 connections by P2P/CUMEM; NVLink up to 370.8 GB/s from a GPU" in text
    assert "16 of 16 ranks completed it" in text
    assert "nothing that looks wrong" in text
    assert "missing  " not in text


def test_a_job_that_was_aborted_is_not_blamed() -> None:
    """torch gives communicators up at the end of a program that was well."""
    line = b"comm 0x1 rank 0 nranks 16 cudaDev 0 busId 1b000 - Abort COMPLETE\n"
    text = text_of(JobLog()) + b"node0:1000:2000 [0] NCCL INFO " + line

    assert found(text) == {}


def test_lines_keep_to_the_width() -> None:
    width = 60
    text = text_of(JobLog(num_hosts=8, bootstrap="docker0", extra=(NVLS_LOST,)))
    log = read(text)
    lines = draw_log(log, lint_nccl_log(log), width).splitlines()

    assert max(map(len, lines)) <= width


# ---- the command


def test_findings_end_the_command_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([str(SAMPLE)]) == 1
    out = capsys.readouterr().out
    assert "WARNING nvls-lost: 6e79c7194e8d" in out
    assert "number of ranks unknown on 1 host (733179575ba5)" in out
    assert "missing  " in out
    assert "NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,ENV,NET,GRAPH,TUNING" in out


def test_json_has_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    run(["--json", str(SAMPLE)])
    value = json.loads(capsys.readouterr().out)

    assert (value["form"], value["version"]) == ("ronde-nccl-log", 1)
    log = read(SAMPLE.read_bytes())
    assert from_plain(NcclLog, value["log"]) == log
    findings = [from_plain(Diagnostic, each) for each in value["findings"]]
    assert findings == list(lint_nccl_log(log))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "has no lines from NCCL or torch, and 0 others"),
        (b"loss 3\n", "no lines from NCCL or torch, and 1 others. Set NCCL_DEBUG=INFO"),
        (
            b"[    1.234567] NVRM: x\n",
            "is a kernel log, not a log of NCCL or torch. Type: ",
        ),
        (b"\tGPU0\tGPU1\nGPU0\t X \tNV4\nGPU1\tNV4\t X \n", "is a topology, not a log"),
    ],
)
def test_what_is_no_log_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: bytes, words: str
) -> None:
    path = tmp_path / "other.log"
    path.write_bytes(text)
    assert words in refusal(capsys, "topo", "log", str(path))


def test_a_file_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path / "none.log", tmp_path):
        said = refusal(capsys, "topo", "log", str(path))
        assert f"cannot read {path}: " in said


def test_every_rule_is_documented_and_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs/topology-log.md").read_text()
    documented = set(re.findall(r"^\| `([a-z0-9-]+)`", page, re.MULTILINE))
    rules = {key.partition(".")[0] for key in RULES}

    assert {rule for rule in rules if not rule.startswith("warned")} == documented
