"""What NCCL and RCCL print differs between releases, and so does what is around it."""

import gzip

import pytest
from tests.topology.nccl_job import JobLog, text_of
from tests.topology.test_nccl_log import P, read

from ronde.errors import UsageError
from ronde.render import draw_log
from ronde.topology import (
    ChannelCounts,
    NcclJob,
    lint_nccl_log,
)


def one_job(text: bytes | str) -> NcclJob:
    (job,) = read(text).jobs
    return job


def rules(text: bytes | str) -> set[str]:
    return {finding.rule for finding in lint_nccl_log(read(text))}


# ---- the start of ranks


@pytest.mark.parametrize(
    ("rank", "name", "bus", "end"),
    [
        ("", "", "nvmlDev {r} busId 1000", ""),
        ("[Rank {r}] ", "ncclCommInitRank ", "nvmlDev {r} busId 1000", ""),
        ("", "", "busId c1000", "localSize 192 used 1048576 bytes "),
        (
            "",
            "ncclCommInitRank ",
            "busId c1000",
            "localSize 0 used 9 bytes on core 96 ",
        ),
    ],
    ids=["2.18", "2.30", "rocm6.0", "rocm6.3"],
)
def test_a_start_that_is_complete_is_seen_to_be(
    rank: str, name: str, bus: str, end: str
) -> None:
    call = f"{name}comm 0xa{{r}} rank {{r}} nranks 2 cudaDev {{r}} {bus} commId 0x99 "
    forms = f"{rank}{call}- Init START", f"{call}{end}- Init COMPLETE"
    lines = [
        f"node0:1{r}:2{r} [{r}] NCCL INFO {form.format(r=r)}"
        for r in range(2)
        for form in forms
    ]
    (comm,) = one_job("\n".join(lines)).communicators

    assert (comm.name, comm.num_ranks, len(comm.ranks)) == ("0x99", 2, 2)
    assert all(rank.has_started and rank.is_complete for rank in comm.ranks)
    assert rules("\n".join(lines)) == set()


@pytest.mark.parametrize("count", ["splitCount 1 ", "childCount 1 ", ""])
def test_a_communicator_that_was_split_off(count: str) -> None:
    """It is a child since 2.29, and had no count before 2.24."""
    split = (
        "ncclCommSplit comm 0xb{r} rank {r} nranks 2 cudaDev 0 nvmlDev 0 busId 1000 "
        f"parent 0xa{{r}} {count}color 3 key 0"
    )
    lines = [
        f"node0:1{r}:2{r} [{r}] NCCL INFO {text.format(r=r)}"
        for r in range(2)
        for text in (
            (
                "ncclCommInitRank comm 0xa{r} rank {r} nranks 2 cudaDev 0 nvmlDev 0 "
                "busId 1000 commId 0x99 - Init COMPLETE"
            ),
            f"{split}- Init START",
            f"{split} - Init COMPLETE",
        )
    ]
    parent, child = one_job("\n".join(lines)).communicators

    assert parent.name == "0x99"
    assert [rank.is_complete for rank in child.ranks] == [True, True]


# ---- the topology


def test_elements_of_releases_before_2_21_are_written_in_capitals() -> None:
    lines = (
        "=== System : maxBw 48.0 totalBw 370.8 ===",
        "CPU/0 (1/1/2)",
        "+ PCI[48.0] - PCI/9A000 (1000c0301000100b)",
        "              + PCI[48.0] - GPU/CA000 (0)",
        "                            + NVL[370.8] - NVS/0",
        "              + PCI[48.0] - NIC/CB000",
        "                            + NET[50.0] - NET/3 (aa2421003bd70c4/1/50.000000)",
        "GPU/CA000 :GPU/CA000 (0/5000.0/LOC) NET/3 (3/48.0/PIX) ",
    )
    job = one_job("\n".join(P + line for line in lines))

    assert [(link.source, link.target) for link in job.trees] == [
        ("CPU/0", "PCI/9A000"),
        ("PCI/9A000", "GPU/CA000"),
        ("GPU/CA000", "NVS/0"),
        ("PCI/9A000", "NIC/CB000"),
        ("NIC/CB000", "NET/3"),
    ]
    assert [path.value for path in job.gpu_paths] == ["LOC"]
    # A port of 400 Gb/s on PCIe 5 x16 is as it should be: 48 by NCCL's count are 63.
    assert lint_nccl_log(read("\n".join(P + line for line in lines))) == ()


LATEST_TREE = (
    "=== System : maxBw 370.8 totalBw 370.8 ===",
    "CPU/0-0 (1/2/-1)",
    "+ PCI[48.0] - PCI/0-1a000 (100010100)",
    "              + PCI[48.0] - DEV/0-1b000 (233010de16c1)",
    "                            + NVL[370.8] - NVS/0-0",
    "                            + LOC[5000.0] - GPU/0-1b000",
    "+ PCI[24.0] - DEV/0-43000 (233010de16c1)",
    "              + LOC[5000.0] - GPU/0-43000",
)


def test_gpus_hang_below_devices_since_2_30() -> None:
    text = "\n".join(P + line for line in LATEST_TREE)
    (finding,) = lint_nccl_log(read(text))

    assert (finding.rule, finding.element) == ("slow-pci", "GPU 0000:43:00.0 on node0")
    assert (finding.has_gb_per_s, finding.should_gb_per_s) == (24.0, 48.0)
    assert "NVLink up to 370.8 GB/s" in draw_log(read(text), ())


def test_links_between_amd_s_gpus_are_read() -> None:
    tree = (
        "=== System : maxBw 24.0 totalBw 48.0 ===",
        "CPU/0-0 (1/1/2)",
        "+ PCI[12.0] - PCI/0-9000 (100214a000000000)",
        "              + PCI[12.0] - DEV/0-b000 (100266a3106b0203)",
        "                            + LOC[5000.0] - GPU/0-b000",
        "                            + XGMI[24.0] - DEV/0-e000",
        "GPU/0-b000 :GPU/0-b000 (0/5000.0/LOC) GPU/0-e000 (3/24.0/XGMI) ",
        "Channel 00 : 0[b000] -> 1[e000] via SHM/direct/direct comm 0xa nRanks 02",
    )
    text = "\n".join(P + line for line in tree)
    (job,) = read(text).jobs

    assert ("DEV/0-b000", "XGMI", "DEV/0-e000") in {
        (link.source, link.kind, link.target) for link in job.trees
    }
    words = " ".join(draw_log(read(text), ()).split())
    assert "xGMI up to 24.0 GB/s from a GPU" in words
    (finding,) = lint_nccl_log(read(text))
    assert finding.rule == "shm-where-p2p-was-possible"
    assert "NCCL found xGMI" in finding.seen


def test_a_gpu_in_one_package_with_its_processor_needs_no_pci() -> None:
    tree = (
        "=== System : maxBw 345.0 totalBw 345.0 ===",
        "CPU/0-0 (3/-1/-1)",
        "+ C2C[345.0] - GPU/0-1000",
        "+ PCI[3.0] - GPU/0-1000 (0)",
        "             + C2C[345.0] - CPU/0-0",
    )

    assert rules("\n".join(P + line for line in tree)) == set()


# ---- what was found


@pytest.mark.parametrize(
    ("text", "field", "values"),
    [
        ("Bootstrap : Using [0]ens1f0:fe80::1%ens1f0<0>", "bootstrap", ["ens1f0"]),
        ("NET/IBext_v8 : No device found.", "candidates", ["IBext_v8 none"]),
        ("NET/Socket : Using [0]eth0:10.0.0.1<0>", "candidates", ["Socket eth0"]),
        ("Using network AWS Libfabric", "networks", ["AWS Libfabric"]),
        (
            "NET/AWS Libfabric : GPU Direct RDMA Disabled for HCA 3 'rdmap0s6-rdma'",
            "gdr",
            ["AWS Libfabric rdmap0s6-rdma Disabled"],
        ),
        (
            "NCCL_IB_DISABLE set by environment to 1.",
            "settings",
            ["NCCL_IB_DISABLE=1"],
        ),
        (
            "NVLS multicast support is not available on dev 3",
            "nvls",
            ["not available on dev 3"],
        ),
        (
            (
                "NET/IB : Using [0]={[0] mlx5_0:1/RoCE, [1] mlx5_1:1/RoCE} "
                "[1]mlx5_2:1/IB [RO]; OOB eth0:10.0.0.1<0>"
            ),
            "candidates",
            ["IB mlx5_0:1/RoCE", "IB mlx5_1:1/RoCE", "IB mlx5_2:1/IB"],
        ),
        (
            "NET/IB : Using [0]mlx5_0:1:3:1/IB ; OOB eth0:10.0.0.1<0>",
            "candidates",
            ["IB mlx5_0:1:3:1/IB"],
        ),
        (
            "NET/OFI Selected provider is cxi, fabric is cxi (found 4 nics)",
            "candidates",
            ["Libfabric cxi (4 adapters)"],
        ),
        (
            "NET/OFI Selected Provider is efa (found 32 nics)",
            "candidates",
            ["Libfabric efa (32 adapters)"],
        ),
        ("RCCL version : 2.21.5-HEAD:9a0e6a1", "versions", ["2.21.5-HEAD:9a0e6a1"]),
        (
            "NCCL_NET set by environment to AWS Libfabric",
            "settings",
            ["NCCL_NET=AWS Libfabric"],
        ),
        (
            "RCCL_MSCCL_ENABLE set by environment to 0.",
            "settings",
            ["RCCL_MSCCL_ENABLE=0"],
        ),
        (
            "Could not enable P2P between dev 0(=1000) and dev 1(=c1000)",
            "p2p",
            ["Could not enable P2P between dev 0(=1000) and dev 1"],
        ),
        (
            (
                "socketPollConnect: connect to 10.0.0.1<4567> returned Connection "
                "refused, retrying (3/34) after sleep for 300 msec"
            ),
            "retries",
            ["10.0.0.1<4567> returned Connection refused"],
        ),
    ],
)
def test_forms_of_releases(text: str, field: str, values: list[str]) -> None:
    reported = getattr(one_job(P + text), field)

    assert [each.value for each in reported] == values


def test_rccl_s_counts_of_channels() -> None:
    text = (
        "comm:0x2bc1f840, nRanks:2, nNodes:1, coll channels:24 collnet channels:24, "
        "nvls channels:0, p2p channels:16, p2p channels per peer:2"
    )
    (comm,) = one_job(P + text).communicators

    assert comm.channels == (ChannelCounts(24, 0, 16),)


# ---- numbers that are none


@pytest.mark.parametrize(
    "text",
    [
        "Channel 00/0 : {long}[0] -> 1[1] via P2P/IPC",
        "GPU/0-1 :GPU/0-2 (1/1..2/NVL) ",
        "Init timings: rank 0 nranks 1 total 1.2 (kernels 0..1)",
        "comm 0x1 rank {long} nranks 8 cudaDev 0 busId 1 - Init START",
        "              + NET[25.0] - NET/0-0 (0/1/1/1.2.3)",
    ],
)
def test_what_only_looks_like_a_number_is_not_read(text: str) -> None:
    line = P + text.format(long="1" * 5000)
    log = read(line)

    assert log.num_messages == 1
    assert draw_log(log, lint_nccl_log(log))


# ---- what is around it


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # srun -l aligns ranks.
        ("   0: ", ""),
        ("[1,0]<stdout>:", ""),
        ("[node1:3] ", "\r"),
        ("2026-01-31T10:20:30.1Z stdout F ", ""),
        ("(RayTrainWorker pid=77, ip=10.0.0.7) ", " [repeated 7x across cluster]"),
        # kubectl logs --prefix: a name may have 253 characters.
        (f"[pod/{'trainer-' * 20}0/pytorch] 2026-01-31T10:20:30.123456789Z ", ""),
        # journalctl, docker compose.
        ("Jan 31 10:20:30 node0 python3[4711]: ", ""),
        ("worker-0  | ", ""),
        # pdsh on top of srun.
        ("node17: 3: ", ""),
        ("\x1b[1;34m[rank0]:\x1b[0m", "\x1b[0m"),
        # Text of other programs.
        ("trainer-0 pytorch ", ""),
        (" 40%|####      | 4/10 [00:01<00:02,  2.1it/s]", ""),
    ],
)
def test_text_around_the_messages_is_ignored(before: str, after: str) -> None:
    text = text_of(JobLog(num_hosts=1)).decode()
    marked = "".join(f"{before}{line}{after}\n" for line in text.splitlines())

    log = read(marked)
    assert (log.jobs, log.num_lost) == (read(text).jobs, 0)


def test_other_programs_words_are_no_beginnings_of_messages() -> None:
    """A bar on the line of every message must not push a true beginning out."""
    lines = ["nodeA:11:11 [1] NCCL INFO Using network IB"]
    lines += ["nodeB:12:12 [0] NCCL INFO Using network IB"]
    lines += ["nodeA:11:11 [1] NCCL INFO comm 0x5nodeB:12:12 [0] NCCL INFO Using"]
    lines += [
        f" {n}%|###  | {n}/99nodeB:12:12 [0] NCCL INFO Using network IB"
        for n in range(60)
    ]
    lines += [" rank 1 nRanks 2 nNodes 2 localRanks 1 localRank 0 MNNVL 0"]

    assert read("\n".join(lines)).num_mended == 1


# ---- packed


def test_what_gzip_packed_is_unpacked() -> None:
    text = text_of(JobLog(num_hosts=2))
    half = text.index(b"\n", len(text) // 2) + 1
    expected = read(text).jobs

    assert read(gzip.compress(text)).jobs == expected
    assert read(gzip.compress(text) + b"\0" * 512).jobs == expected
    parts = gzip.compress(text[:half]) + gzip.compress(text[half:])
    assert read(parts).jobs == expected


@pytest.mark.parametrize("size", [2, 9, 60, -1, -9])
def test_a_packed_log_that_was_cut_is_refused(size: int) -> None:
    packed = gzip.compress(text_of(JobLog(num_hosts=1)))

    with pytest.raises(UsageError, match="cannot unpack the log"):
        read(packed[:size])
