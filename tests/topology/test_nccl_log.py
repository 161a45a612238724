"""NCCL's debug log is read as it was meant, whatever happened to its lines."""

import io
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import assume, given, strategies as st
from tests.topology.nccl_job import BUS_IDS, JobLog, interleave, text_of

from ronde.topology import (
    ChannelCounts,
    MessageReader,
    NcclJob,
    NcclLog,
    NcclMessage,
    lint_nccl_log,
    read_nccl_log,
)

SAMPLE = (
    Path(__file__).parent
    / "samples/nccl_debug_logs/hgx_h200_b200_nccl2.27.3_selected_lines.log"
)
P = "node0:10:20 [0] NCCL INFO "


def read(*texts: bytes | str) -> NcclLog:
    return read_nccl_log(
        io.BytesIO(text.encode() if isinstance(text, str) else text) for text in texts
    )


def one_job(*texts: bytes | str) -> NcclJob:
    log = read(*texts)
    assert len(log.jobs) == 1
    return log.jobs[0]


def values(said: tuple[object, ...]) -> list[str]:
    return [each.value for each in said]  # pyright: ignore[reportAttributeAccessIssue]


def test_the_sample_holds_two_jobs() -> None:
    """Hosts, numbers and words are those that stand in the file."""
    log = read(SAMPLE.read_bytes())
    h200, b200 = log.jobs

    assert log.num_messages == log.num_lines == 16
    assert h200.hosts == ("6e79c7194e8d",)
    assert h200.num_processes == 5  # 2394, 2396, 2397, 2398, 2401
    assert values(h200.versions) == ["2.27.3+cuda12.9"]
    assert values(h200.networks) == ["Socket"]
    (comm,) = h200.communicators
    assert (comm.name, comm.num_ranks, comm.num_nodes) == ("0x7a05afe6ed4036b4", 8, 1)
    assert [rank.rank for rank in comm.ranks] == [0, 2]
    assert comm.ranks[0].bus_id == "83000"
    assert comm.ranks[0].is_complete
    assert not comm.ranks[1].is_complete
    assert values(h200.nvls)[0] == "available on dev 4"
    assert values(h200.nvls)[1].startswith("lost: CUDA error 401 ")

    assert b200.hosts == ("733179575ba5",)
    assert b200.versions == ()
    assert b200.nvls[0].value == "available on dev 0"


def test_a_whole_job_is_read() -> None:
    job = one_job(text_of(JobLog(num_hosts=2)))

    assert job.hosts == ("node0", "node1")
    assert job.num_processes == 16
    assert values(job.drivers) == ["12090"]
    assert values(job.bootstrap) == ["eno1"]
    assert values(job.networks) == ["IB"]
    assert values(job.candidates) == ["IB mlx5_0:1/IB", "IB mlx5_1:1/IB"]
    assert values(job.gdr) == ["IB mlx5_0 Enabled"]
    (comm,) = job.communicators
    assert (comm.num_ranks, comm.num_nodes) == (16, 2)
    assert [rank.rank for rank in comm.ranks] == list(range(16))
    assert [rank.host for rank in comm.ranks] == ["node0"] * 8 + ["node1"] * 8
    assert [rank.bus_id for rank in comm.ranks] == list(BUS_IDS) * 2
    assert all(rank.has_started and rank.is_complete for rank in comm.ranks)
    assert comm.ranks[3].init_s == 3.25
    assert comm.ranks[3].init_phases[0] == ("bootstrap", 1.25)
    assert comm.channels == (ChannelCounts(16, 0, 16),)
    # Of each host seven edges stay inside, and one leaves.
    assert [(e.transport, e.num_edges, e.example) for e in job.edges] == [
        ("P2P/CUMEM", 14, (0, 1)),
        ("NET/IB/GDRDMA", 2, (7, 8)),
    ]


def test_the_topology_is_read_with_its_levels() -> None:
    job = one_job(text_of(JobLog(num_hosts=1)))

    assert [(t.source, t.kind, t.gb_per_s, t.target) for t in job.trees] == [
        ("CPU/0-0", "PCI", 48.0, "PCI/0-1a000"),
        ("PCI/0-1a000", "PCI", 48.0, "GPU/0-1b000"),
        ("GPU/0-1b000", "NVL", 370.8, "NVS/0-0"),
        ("PCI/0-1a000", "PCI", 48.0, "NIC/0-1c000"),
        ("NIC/0-1c000", "NET", 25.0, "NET/0-0"),
        ("CPU/0-0", "SYS", 22.0, "CPU/0-1"),
    ]
    assert job.trees[4].port_gb_per_s == 25.0
    assert values(job.gpu_paths) == ["LOC", "NVL"]


@pytest.mark.parametrize(
    ("text", "transport"),
    [
        ("Channel 03/0 : 2[2] -> 3[3] via P2P/CUMEM/read", "P2P/CUMEM/read"),
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/direct pointer", "P2P/direct pointer"),
        (
            "Channel 00/1 : 0[3000] -> 1[c1000] via P2P/indirect/2[2]",
            "P2P/indirect/2[2]",
        ),
        ("Channel 00 : 0[0] -> 1[1] via SHM/direct/direct", "SHM/direct/direct"),
        (
            "Channel 01/0 : 7[7] -> 8[0] [send] via NET/IB/1(3)/GDRDMA(PCI)/Shared",
            "NET/IB/GDRDMA(PCI)/Shared",
        ),
        (
            "Channel 01/0 : 7[7] -> 8[0] [receive] via NET/AWS Libfabric/0/GDRDMA",
            "NET/AWS Libfabric/GDRDMA",
        ),
        ("Channel 01/0 : 7[7] -> 8[0] [receive] via NET/Socket/0", "NET/Socket"),
    ],
)
def test_transports(text: str, transport: str) -> None:
    assert [each.transport for each in one_job(P + text).edges] == [transport]


def test_tunings_are_reported_by_size() -> None:
    lines = (
        "AllReduce: 1024 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1}",
        "AllReduce: 4096 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..3}",
        "AllReduce: 8388608 Bytes -> Algo NVLS proto SIMPLE channel{Lo..Hi}={0..15}",
    )
    job = one_job("\n".join(P + line for line in lines))

    assert [tuple(each) for each in job.tunings] == [
        ("AllReduce", "NVLS", "SIMPLE", 8388608, 8388608),
        ("AllReduce", "RING", "LL", 1024, 4096),
    ]


def test_a_warning_keeps_its_place() -> None:
    lines = (
        "\n[2026-01-31 10:20:30] node0:10:20 [0] misc/shmutils.cc:87 (openShm) NCCL "
        "WARN Error: failed to extend /dev/shm/nccl-1 to 100 bytes\n"
        "\nnode0:11:21 [1] misc/shmutils.cc:87 NCCL WARN Error: failed to extend "
        "/dev/shm/nccl-2 to 100 bytes"
    )
    (warning,) = one_job(lines).warnings

    assert warning.location == "misc/shmutils.cc:87"
    assert warning.text == "Error: failed to extend /dev/shm/nccl-1 to 100 bytes"
    assert warning.num_times == 2


def test_files_are_one_log() -> None:
    job = JobLog(num_hosts=1)
    files = ["\n".join(job.lines_of(rank)) for rank in range(8)]

    assert read(*files).jobs == read("\n".join(files)).jobs


def test_two_communicators_join_their_hosts_and_no_others() -> None:
    first = text_of(JobLog(num_hosts=2, host="a{}"))
    second = text_of(JobLog(num_hosts=1, host="b{}"))
    second = second.replace(b"0x4f6aa0f2d3c1b2a9", b"0x1111111111111111")

    assert [job.hosts for job in read(first + second).jobs] == [("a0", "a1"), ("b0",)]


def test_an_edge_between_hosts_is_one_though_both_ends_report_it() -> None:
    edge = "Channel 0{}/0 : 7[7] -> 8[0] [{}] via NET/IB/0/GDRDMA"
    lines = [
        f"node{way == 'receive':d}:1:1 [0] NCCL INFO {edge.format(channel, way)}\n"
        for channel in range(3)
        for way in ("send", "receive")
    ]

    assert [e.num_edges for job in read("".join(lines)).jobs for e in job.edges] == [
        3,
        3,
    ]
    both = text_of(JobLog()).decode() + "".join(lines).replace(":1:1 ", ":1000:2000 ")
    assert [e.num_edges for e in one_job(both).edges] == [14, 5]


# ---- lines that broke


@pytest.mark.parametrize(
    "torn",
    [
        "ode1:1009:2009 [1] NCCL INFO Channel 02/0 : 9[1] -> 10[2] via P2P/CUMEM",
        f"de1:1009:2009 [1] NCCL INFO {JobLog().texts(9, 1, 1)[-7]}",
        "e1:7777:2009 [1] NCCL INFO Using network IB",
        "1:7777:2009 [1] misc/socket.cc:5 NCCL WARN Call to connect failed",
    ],
)
def test_a_torn_line_makes_no_host_and_no_job_of_its_own(torn: str) -> None:
    text = text_of(JobLog()).decode()
    for mixed in (f"{torn}\n{text}", f"{text}{torn}\n"):
        assert one_job(mixed).hosts == ("node0", "node1")
    # Where each process has a few lines alone, the process is the same.
    few = "".join(
        f"gpu-a{n}:{70 + n}:1 [0] NCCL INFO Using network IB\n" for n in (1, 2)
    )
    jobs = read(f"{few}a1:71:1 [0] NCCL INFO Using network IB\n").jobs
    assert sorted(job.hosts for job in jobs) == [("gpu-a1",), ("gpu-a2",)]


def messages_of(text: str) -> list[NcclMessage]:
    reader = MessageReader()
    found = [message for line in text.split("\n") for message in reader.feed(line)]
    return [message for message in found if message.host]


def test_a_line_that_broke_into_another_is_put_together() -> None:
    """The example: a number, and right after it the host of the one who broke in."""
    whole = (
        "nodeA:11:11 [1] NCCL INFO Using network IB\n"
        "nodeB:12:12 [0] NCCL INFO Using network IB\n"
        "nodeA:11:11 [1] NCCL INFO comm 0x55410nodeB:12:12 [0] NCCL INFO Using network "
        "Socket\n"
        " rank 1 nRanks 2 nNodes 2 localRanks 1 localRank 0 MNNVL 0\n"
    )
    log = read(whole)

    assert log.num_mended == 1
    assert log.num_lost == 0
    texts = [(m.host, m.text) for m in messages_of(whole)][2:]
    assert texts == [
        ("nodeB", "Using network Socket"),
        (
            "nodeA",
            "comm 0x55410 rank 1 nRanks 2 nNodes 2 localRanks 1 localRank 0 MNNVL 0",
        ),
    ]


def test_a_number_that_was_cut_is_not_believed() -> None:
    """Rank 12 of 16 must not become rank 1, whatever follows."""
    text = (
        "nodeA:11:11 [1] NCCL INFO Using network IB\n"
        "nodeB:12:12 [0] NCCL INFO Using network IB\n"
        "nodeA:11:11 [1] NCCL INFO Channel 00/0 : 0[0] -> 1nodeB:12:12 [0] NCCL INFO "
        "Using network IB\n"
        "and nothing of it follows\n"
    )
    log = read(text)

    assert log.jobs[0].edges == ()
    assert log.num_lost == 1


def test_where_a_host_begins_that_nobody_knows_is_not_guessed() -> None:
    """Of 120nodeB the 120 may be a number's beginning, or the host's."""
    text = (
        "nodeA:11:11 [1] NCCL INFO Using network IB\n"
        "nodeA:11:11 [1] NCCL INFO cudaDriverVersion 120nodeB:12:12 [0] NCCL INFO "
        "cudaDriverVersion 12090\n"
        "90\n" + "nodeB:12:12 [0] NCCL INFO Using network IB\n" * 4
    )
    log = read(text)

    assert [each.value for job in log.jobs for each in job.drivers] == ["12090"]
    assert sorted(host for job in log.jobs for host in job.hosts) == ["nodeA", "nodeB"]
    assert log.num_lost == 1


@pytest.mark.parametrize("seed", range(12))
def test_interleaved_lines_say_what_the_clean_ones_say(seed: int) -> None:
    """One line in twenty is cut anywhere, its prefix included."""
    job = JobLog(num_hosts=2)
    text, num_cut = interleave([job.lines_of(r) for r in range(16)], seed, 0.05)
    clean = Counter(message.text for message in messages_of("\n".join(job.lines())))
    found = Counter(message.text for message in messages_of(text))

    assert num_cut > 10
    assert not found - clean, "something is said that nobody said"
    assert (clean - found).total() <= num_cut / 3
    log = read(text)
    assert log.jobs[0].hosts == ("node0", "node1")
    assert log.jobs[0].num_processes == 16
    # Lost lines are noted, and no rank is blamed.
    assert {finding.rule for finding in lint_nccl_log(log)} <= {"log-incomplete"}


# ---- harm


@given(st.binary(max_size=400))
def test_any_bytes_are_read(data: bytes) -> None:
    assume(not data.startswith(b"\x1f\x8b"))
    log = read(data, P.encode() + data)

    assert log.num_lines >= 1


@pytest.mark.parametrize(
    "text",
    [
        "a:1:1 [0] NCCL INFO " * 100_000,
        "[" * 1_000_000 + "\n" + "a" * 80 + ": " * 200_000,
        P + "GPU/0-1 :" + "GPU/0-1 (1/" * 100_000,
        "\x1b[" * 500_000,
        (P + "comm 0xnode0:10:20 [0] NCCL INFO x\n") * 20_000,
        "".join(f"h{n}:{n}:1 [0] NCCL INFO Using network IB\n" for n in range(20_000)),
        "".join(f"w{n}x:7:1 [0] NCCL INFO Using network IB\n" for n in range(20_000)),
        "[PG ID 1 PG GUID " * 300_000 + "WorkNCCL(OpType=X, " * 200_000,
    ],
    ids=range(8),
)
def test_long_and_hostile_lines_are_read(text: str) -> None:
    assert read(text).num_lines >= 1


def test_what_is_too_much_is_counted() -> None:
    lines = (f"{P}NCCL_X{n} set by environment to 1" for n in range(5000))

    assert read("\n".join(lines)).num_left_out == 5000 - 4096
