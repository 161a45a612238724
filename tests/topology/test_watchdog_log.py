"""Lines of torch's watchdog, its reports and NCCL's make one story."""

import io

import pytest
from tests.topology.nccl_job import JobLog, text_of
from tests.topology.test_topo_log import find, found, read

from ronde.topology import Level, is_nccl_log, lint_nccl_log

ERROR, WARNING, NOTE = Level


def caught(rank: int, call: str, *, before: str = "", member: int | None = None) -> str:
    """Return the watchdog's line of a rank."""
    member = rank if member is None else member
    return (
        f"{before}[rank{rank}]:[E511 07:14:02.118300{rank} ProcessGroupNCCL.cpp:629] "
        f"[Rank {member}] {CAUGHT}: WorkNCCL({call}, Timeout(ms)=300000) ran for "
        "300041 milliseconds before timing out.\n"
    )


def status(rank: int, seq: int, last: tuple[int, int], group: str, member: int) -> str:
    """Return a rank's line on its group, in the form of torch 2.6 and later."""
    return (
        f"[rank{rank}]:[E511 07:14:02.218300{rank} ProcessGroupNCCL.cpp:2168] [PG ID "
        f"3 PG GUID {group} Rank {member}]  failure detected by watchdog at work "
        f"sequence id: {seq} PG status: last enqueued work: {last[0]}, last completed "
        f"work: {last[1]}\n"
    )


def waiting(group: str, seq: int, *ranks: int, call: str = "") -> str:
    """Return the lines of ranks that time out at one number of a group."""
    call = (call or REDUCE).replace("41", str(seq))
    return "".join(
        caught(r, call) + status(r, seq, (seq, seq - 1), group, r) for r in ranks
    )


def signalled(rank: int, last: tuple[int, int]) -> str:
    """Return the lines of a rank that did not time out itself."""
    start = (
        f"[rank{rank}]:[E511 07:14:03.3183 ProcessGroupNCCL.cpp:1987] [PG ID 0 PG GUID"
    )
    return (
        f"{start} 0(default_pg) Rank {rank}] Observed flight recorder dump signal from "
        "another rank via TCPStore.\n"
        f"{start} 0(default_pg) Rank {rank}] Received a dump signal due to a "
        "collective timeout from  rank 0 and we will try our best to dump the debug "
        f"info. Last enqueued NCCL work: {last[0]}, last completed NCCL work: {last[1]}"
        ".This is most likely caused by incorrect usages of collectives\n"
    )


GATHER = "SeqNum=41, OpType=ALLGATHER, NumelIn=2048, NumelOut=16384"
REDUCE = "SeqNum=41, OpType=ALLREDUCE, NumelIn=77, NumelOut=77"
STUCK = "watchdog-stuck", ERROR
CAUGHT = "Watchdog caught collective operation timeout"
DEFAULT = "0(default_pg)"
TENSORS = "22(TENSOR_MODEL_PARALLEL_GROUP)"
REPORT = (
    "[rank0]:[E511 07:14:03.31 ProcessGroupNCCL.cpp:1537] [PG ID 0 PG GUID 0 Rank 0]"
)


@pytest.mark.parametrize(
    ("lines", "key", "words"),
    [
        pytest.param(
            [caught(r, GATHER) + status(r, 41, (43, 40), DEFAULT, r) for r in range(6)]
            + [signalled(6, (40, 40)), signalled(7, (40, 40))],
            "ranks 0-5",
            (
                "Collectives of group 0(default_pg) did not end in time: ALLGATHER",
                "(work 41, 2,048 elements) in 300 s on ranks 0-5. Not joined by ranks",
                "Look at ranks 6-7 first",
                "TORCH_NCCL_TRACE_BUFFER_SIZE=2000",
            ),
            id="late",
        ),
        pytest.param(
            [
                caught(r, GATHER) + status(r, 41, (41, 40), DEFAULT, r)
                for r in (0, 1, 3)
            ],
            "ranks 0-1, 3",
            ("No line from rank 2.", "Look at rank 2 first"),
            id="silent",
        ),
        pytest.param(
            [
                caught(0, GATHER) + status(0, 41, (44, 40), DEFAULT, 0),
                *(signalled(rank, (45, 44)) for rank in (1, 2)),
            ],
            "rank 0",
            ("Completed by ranks 1-2.", "Look at rank 0 first"),
            id="ahead",
        ),
        pytest.param(
            [
                caught(rank, call) + status(rank, 41, (41, 40), DEFAULT, rank)
                for rank, call in ((0, GATHER), (1, REDUCE), (2, GATHER))
            ],
            "ranks 0-2",
            (
                "ALLGATHER (work 41, 2,048 elements) in 300 s on ranks 0, 2; ALLRED",
                "UCE (work 41, 77 elements) in 300 s on rank 1. Unlike the others: ra",
                "Look at rank 1 first",
            ),
            id="odd",
        ),
        pytest.param(
            [waiting("0", 42, 0, 1, 3), waiting("0", 41, 2)],
            "ranks 0-3",
            ("on ranks 0-1, 3. Behind the others: rank 2.", "Look at rank 2 first"),
            id="behind",
        ),
        # One rank is in several groups, and silent in each.
        pytest.param(
            [
                waiting("5(tp_0)", 912, 0, 1, 3),
                waiting("9(dp_2)", 377, 6),
                waiting("7(dp_0)", 376, 4),
                waiting("8(dp_1)", 376, 5, 7),
            ],
            "ranks 0-1, 3-7",
            ("No line from rank 2.", "Look at rank 2 first"),
            id="silent-in-groups",
        ),
        # Ranks of a group count anew, and what the default group did says nothing.
        pytest.param(
            [
                caught(r, GATHER, member=r - 8)
                + status(r, 41, (44, 40), TENSORS, r - 8)
                for r in (8, 9)
            ]
            + [signalled(rank, (7, 7)) for rank in range(8)],
            "ranks 8-9",
            (f"of group {TENSORS}", "on ranks 8-9.", "No rank is known to be late"),
            id="group",
        ),
        pytest.param(
            [
                f"[E ProcessGroupNCCL.cpp:828] [Rank {rank}] {CAUGHT}: WorkNCCL("
                "SeqNum=9, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1800625 "
                "milliseconds before timing out.\n"
                for rank in (0, 1, 3)
            ],
            "ranks 0-1, 3",
            ("in time: ALLREDUCE (work 9) in 1800 s on", "No line from rank 2."),
            id="torch-1.13",
        ),
        # 2.3 prints any number for the last work of a group that completed none.
        pytest.param(
            [
                caught(r, GATHER.replace("41", "1"))
                + f"[rank{r}]:[E ProcessGroupNCCL.cpp:1537] [PG 0 Rank {r}] Timeout at "
                "NCCL work: 1, last enqueued NCCL work: 1, last completed NCCL work: "
                "76280750235782912.\n"
                for r in range(2)
            ],
            "ranks 0-1",
            ("of group 0 did", "No collective of the group ever ended"),
            id="first",
        ),
        pytest.param(
            [
                signalled(r, (40, 40)).replace("rank 0 and", "rank 4 and")
                for r in (1, 2, 3)
            ],
            "rank 4",
            ("in time: a collective on rank 4. No line from rank 0.",),
            id="answers-alone",
        ),
        # A traceback alone, and what is left of a line behind a progress bar.
        pytest.param(
            [
                "  what():  [PG 1 (dp) Rank 3] Process group watchdog thread ",
                f"terminated with exception: [Rank 3] {CAUGHT}: WorkNCCL({REDUCE}, ",
                "Timeout(ms)=300000) ran for 300020 milliseconds before timing.\r\n",
                "50%|##   | 1/2 [00:01<00:01]"
                + caught(4, REDUCE, before="(Worker pid=7, ip=10.0.0.7) ").strip()
                + caught(5, REDUCE),
            ],
            "ranks 3-5",
            ("of group 1(dp) did not end in time: ALLREDUCE (work 41, 77",),
            id="traceback",
        ),
    ],
)
def test_the_story_of_a_time_out(
    lines: list[str], key: str, words: tuple[str, ...]
) -> None:
    text = "step 41: loss 2.25\n" + "".join(lines)
    finding = find(text.encode(), "collective-timeout")

    assert (finding.element, finding.severity) == (key, ERROR)
    for each in words:
        assert each in f"{finding.seen} {finding.remedy}"
    assert is_nccl_log(text)
    assert found(text.encode()).keys() == {"collective-timeout"}
    # In a job whose start was well nothing else is wrong.
    job = text_of(JobLog()).decode()
    assert found((job + text).encode()).keys() == {"collective-timeout"}
    # Ranks whose output is elsewhere are not blamed.
    half = "".join(line for line in job.splitlines(keepends=True) if "node0" in line)
    finding = find((half + text).encode(), "collective-timeout")
    assert "15" not in finding.seen


def test_ranks_of_nccl_s_log_are_known_to_the_story() -> None:
    """A rank that torch says nothing of is missing, and its host is known."""
    ranks = [rank for rank in range(16) if rank != 11]
    lines = [caught(r, GATHER) + status(r, 41, (41, 40), DEFAULT, r) for r in ranks]
    text = text_of(JobLog()).decode() + "".join(lines)
    finding = find(text.encode(), "collective-timeout")

    assert "No line from rank 11." in finding.seen
    assert "Look at rank 11 on node1 first" in finding.remedy
    # Of two jobs it is unknown whose they are.
    other = text_of(JobLog(num_hosts=1, host="b{}")).replace(b"0x4f6a", b"0x1111")
    finding = find(text.encode() + other, "collective-timeout")
    assert "Look at rank 11 first" in finding.remedy


def test_a_rank_that_called_a_collective_has_started() -> None:
    lines = text_of(JobLog(num_hosts=1)).decode().splitlines(keepends=True)
    silent = [
        line
        for line in lines
        if ":1002:" not in line or ("COMPLETE" not in line and "timings" not in line)
    ]
    torch = [caught(r, GATHER) + status(r, 41, (41, 40), "0", r) for r in range(8)]

    assert found("".join(silent).encode()) == {"init-incomplete": ERROR}
    rules = found("".join(silent + torch).encode())
    assert rules == {"collective-timeout": ERROR}


def test_the_folder_of_the_flight_recorder_is_named() -> None:
    text = (
        caught(0, GATHER)
        + REPORT
        + (" ProcessGroupNCCL dumping nccl trace to /data/run 7/traces/rank_0\n")
    )
    text = text.replace("run 7", "run7")

    remedy = find(text.encode(), "collective-timeout").remedy
    assert remedy.endswith("Compare all calls: torchfrtrace /data/run7/traces.")


def test_torch_s_lines_of_two_jobs_are_two_findings() -> None:
    other = text_of(JobLog(num_hosts=1, host="b{}")).replace(b"0x4f6a", b"0x1111")
    first = waiting(DEFAULT, 33, *range(8))
    second = waiting(DEFAULT, 5011, *range(8), call=GATHER)
    # NCCL's lines show the jobs, or the hosts that the launcher names.
    apart = first.replace("[rank", "a1: [rank") + second.replace("[rank", "b7: [rank")
    for text in (text_of(JobLog()) + other + (first + second).encode(), apart.encode()):
        found = lint_nccl_log(read(text))

        assert [each.rule for each in found] == ["collective-timeout"] * 2
        assert "ALLGATHER (work 5011," in found[0].seen
        assert "ALLREDUCE (work 33," in found[1].seen


@pytest.mark.parametrize(
    ("extra", "remedy"),
    [
        ({}, "run once with NCCL_P2P_DISABLE=1 and once with NCCL_IB_DISABLE=1."),
        ({"num_hosts": 1}, "run once with NCCL_P2P_DISABLE=1."),
        (
            {"network": "AWS Libfabric"},
            "NCCL_P2P_DISABLE=1 and once with NCCL_NET=Socket.",
        ),
    ],
)
def test_the_ways_to_try_are_those_of_the_job(
    extra: dict[str, object], remedy: str
) -> None:
    text = text_of(JobLog(), **extra) + waiting(DEFAULT, 1, *range(16)).encode()
    assert remedy in find(text, "collective-timeout").remedy


def raised(rank: int, *lines: str) -> str:
    return "".join(f"[rank{rank}]: {line}\n" for line in (TRACEBACK, *lines))


TRACEBACK = "Traceback (most recent call last):"
NCCL_ERROR = (
    "torch.distributed.DistBackendError: NCCL error in: ../c10d/ProcessGroupNCCL.cpp:19"
    "70, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.9"
)
TIMED_OUT = "[/x/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms"
ILLEGAL = "CUDA error: an illegal memory access was encountered"
GONE = "torch.distributed.DistBackendError: NCCL error: remote process exited"


@pytest.mark.parametrize(
    ("lines", "what", "remedy"),
    [
        (
            "E1129 api.py:869] failed (exitcode: -9) local_rank: 5 (pid: 1005) of x\n",
            "Rank 5 on node0 failed: signal 9 (Killed).",
            "no memory left",
        ),
        (
            (
                "  rank      : 9 (local_rank: 1)\n  exitcode  : -15 (pid: 4712)\n"
                "  rank      : 13 (local_rank: 5)\n  exitcode  : -11 (pid: 4711)\n"
            ),
            "Rank 13 on node1 failed: signal 11 (Segmentation fault).",
            "PYTHONFAULTHANDLER=1",
        ),
        (
            (
                "srun: error: node1: task 13: Out Of Memory\n"
                "srun: error: node0: tasks 0-7: Terminated\n"
            ),
            "Rank 13 on node1 failed: Out Of Memory.",
            "no memory left",
        ),
        (
            (
                "mpirun noticed that process rank 3 with PID 71 on node node0 exited "
                "on signal 7 (Bus error).\n"
            ),
            "Rank 3 on node0 failed: signal 7 (Bus error).",
            "a bus error is mostly",
        ),
        (
            raised(3, "RuntimeError: CUDA error: uncorrectable ECC error encountered")
            + raised(4, GONE),
            "Rank 3 on node0 failed: CUDA error: uncorrectable ECC error encountered.",
            "take the host out of use",
        ),
        (
            raised(3, NCCL_ERROR, "Last error:", "Cuda failure 999 'unknown error'"),
            (
                "Rank 3 on node0 failed: DistBackendError: NCCL error, unhandled cuda "
                "error: Cuda failure 999 'unknown error'."
            ),
            "Xid",
        ),
        (
            f"[1,2]<stderr>:RuntimeError: {TIMED_OUT}\n9: RuntimeError: {TIMED_OUT}\n",
            "Ranks 2, 9 on node0, node1 failed: Timed out waiting 1800000ms.",
            "waited for another rank",
        ),
        (
            (
                "pod-1: torch.distributed.DistStoreError: Timed out after 901 seconds "
                "waiting for clients. 15/16 clients joined.\n"
            ),
            (
                "A rank failed: DistStoreError: Timed out after 901 seconds waiting "
                "for clients. 15/16 clients joined."
            ),
            "MASTER_ADDR",
        ),
        (
            (
                "2026-11-29T10:00:00.1Z [default3]:[rank11]: torch.OutOfMemoryError: "
                "CUDA out of memory. Tried to get\r\n"
            ),
            ("Rank 11 on node1 failed: OutOfMemoryError: CUDA out of memory. Tried"),
            "batches smaller",
        ),
    ],
)
def test_a_rank_that_failed_is_named(lines: str, what: str, remedy: str) -> None:
    finding = find(text_of(JobLog()) + lines.encode(), "rank-failed")

    assert finding.seen.startswith(what)
    assert remedy in finding.remedy
    assert found(text_of(JobLog()) + lines.encode()).keys() == {"rank-failed"}
    # Alone it is a log too; Slurm and torchrun end programs of any kind.
    assert is_nccl_log(lines) is ("Error: " in lines)
    for end in range(0, len(lines), 7):
        lint_nccl_log(read(lines[:end].encode()))


@pytest.mark.parametrize(
    "failure",
    [
        raised(3, f"RuntimeError: {ILLEGAL}"),
        (
            "[rank3]:[E511 07:14:02.1 ProcessGroupNCCL.cpp:1414] [PG 0 Rank 3] Process "
            f"group watchdog thread terminated with exception: {ILLEGAL}\n"
        ),
    ],
)
def test_others_wait_for_a_rank_that_failed(failure: str) -> None:
    text = text_of(JobLog(num_hosts=1)).decode() + failure
    text += waiting(DEFAULT, 41, 0, 1, 2, 4, 5, 6, 7)
    text += "srun: error: node0: tasks 0-2,4-7: Aborted (core dumped)\n"
    failed, waited = lint_nccl_log(read(text.encode()))

    assert failed.seen == f"Rank 3 on node0 failed: {ILLEGAL}. Others waited in vain."
    assert "CUDA_LAUNCH_BLOCKING=1" in failed.remedy
    assert "No line" not in waited.seen
    assert waited.remedy == "Look at rank 3 on node0 first: see rank-failed."


DESTROYED = "".join(
    f"node{r // 8}:{1000 + r}:1 [0] NCCL INFO comm 0x55{r:04x} rank {r} nranks 16 "
    "cudaDev 0 busId 1b000 - Destroy COMPLETE\n"
    for r in range(16)
)
OUTAGE = raised(0, "requests.exceptions.ConnectionError: no route", "retry 1 of 3")
RESTART = (
    "E1129 api.py:869] failed (exitcode: 1) local_rank: 3 (pid: 1003) of x\n"
    "I1129 api.py:912] [default] Worker group FAILED. 3/3 attempts left; will restart "
    "worker group\n"
)
OTHER_TASK = "srun: error: gpu-a09: task 9: Exited with exit code 1\n"


@pytest.mark.parametrize(
    ("lines", "severity", "what"),
    [
        (OUTAGE + DESTROYED, NOTE, "Rank 0 on node0 printed an exception and"),
        (OUTAGE + "\n[rank0]: step 5\n", NOTE, "Rank 0 on node0 printed"),
        (
            f"RuntimeError: {TIMED_OUT}\nretrying\n{DESTROYED}",
            NOTE,
            "A rank printed an exception",
        ),
        (
            raised(3, f"RuntimeError: {ILLEGAL}") + RESTART,
            WARNING,
            f"Rank 3 on node0 failed, and the job was started again: {ILLEGAL}.",
        ),
        (RESTART + RESTART[:71], ERROR, "Rank 3 on node0 failed: exit code 1."),
        # The text of an exception may be long, and the end may be another one's.
        (OUTAGE + OUTAGE, ERROR, "Rank 0 on node0 failed: ConnectionError: no"),
        (DESTROYED + OUTAGE, ERROR, "Rank 0 on node0 failed: Connection"),
        (OUTAGE + DESTROYED + RESTART[:71], ERROR, "Rank 3 on node0 failed: ex"),
    ],
)
def test_a_rank_that_failed_may_go_on_or_be_started_again(
    lines: str, severity: Level, what: str
) -> None:
    findings = lint_nccl_log(read(text_of(JobLog()) + lines.encode()))
    assert (findings[0].rule, findings[0].severity) == ("rank-failed", severity)
    assert findings[0].seen.startswith(what)


def test_a_task_of_another_host_may_be_of_an_earlier_try() -> None:
    text = OTHER_TASK.encode() + text_of(JobLog()) + DESTROYED.encode()
    finding = find(text, "rank-failed")
    assert finding.severity is WARNING
    assert finding.seen.startswith("Task 9 on gpu-a09 failed, and the job was started")


@pytest.mark.parametrize(
    ("line", "rule", "severity"),
    [
        ("First PG on this rank that detected no heartbeat of its watchdog.", *STUCK),
        ("ProcessGroupNCCL's watchdog got stuck for 480 seconds without", *STUCK),
        (
            'Failed to check the "should dump" flag on TCPStore, (maybe TCPStore',
            "store-lost",
            NOTE,
        ),
    ],
)
def test_other_lines_of_the_watchdog(line: str, rule: str, severity: Level) -> None:
    finding = find(f"{REPORT} {line}\n".encode(), rule)

    assert (finding.element, finding.severity) == ("rank 0", severity)


@pytest.mark.parametrize(
    "line",
    [
        f"{REPORT} ProcessGroupNCCL initialization options: size: 8, global rank: 0",
        f"{REPORT} Warning: WARNING: destroy_process_group() was not called before",
        "[rank0]: step 3 of 5: collective loss 2.5, all ranks are well",
        "ranks: [0, 1, 2]",
        "ValueError: no such file, next one",
        "[rank1]: ValueError: bad image, skipped",
        "[rank0]: Exception ignored in atexit\n"
        + raised(0, "BrokenPipeError: [Errno 32] Broken pipe").rstrip(),
        "[rank0]:   raise ValueError: x",
        "WARNING CUDA out of memory, retrying with batch size 8",
        "eval: RMSError: 0.25, exit code 0",
        "local_rank: 3 (pid: 77) started",
    ],
)
def test_lines_of_healthy_programs_are_no_story(line: str) -> None:
    text = text_of(JobLog()).decode() + f"{line}\n" * 3

    assert lint_nccl_log(read(text.encode())) == ()
    assert not is_nccl_log(f"{line}\n")


def test_a_log_of_nccl_is_recognised() -> None:
    assert is_nccl_log("noise\nnode1:7:9 [0] NCCL INFO Using network IB\n")
    assert is_nccl_log("1: node1:7:9 [0] misc/socket.cc:5 NCCL WARN Call failed\n")
    # Tests of NCCL print that too.
    assert not is_nccl_log("NCCL version 2.21.5+cuda12.4\n")
    assert not is_nccl_log(
        "import torch\nNCCL_DEBUG=INFO\nWorkNCCL, ProcessGroupNCCL\n"
    )
    assert not is_nccl_log(io.StringIO("0000:1b:00.0 3D controller\n").read())
