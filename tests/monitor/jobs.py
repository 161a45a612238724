"""Simulated jobs: tables and answers as a watcher gets them."""

from pathlib import Path

from ronde.launch import HostAnswer
from ronde.monitor import GpuUsage, HostUsage, JobWatcher, NetworkCounters, ProcessUsage
from ronde.plain_values import to_plain
from ronde.status import JobInfo, JobStatus, RankStatus, StepTime, WorkerInfo

RANKS_PER_HOST = 8
TOTAL_S, OWN_S, MOVING_S = 0.2, 0.12, 0.02


def make_steps(last, *, is_late):
    """Return the times of 16 steps; an on-time rank waits for the late one."""
    own_s = TOTAL_S - MOVING_S if is_late else OWN_S
    parts = (TOTAL_S - own_s, 0.01, 0.002)
    return tuple(StepTime(last - 15 + n, TOTAL_S, *parts) for n in range(16))


def make_table(num_ranks, *, version=1, late=None, collectives=()):
    """Return a table of ranks in training; ``late`` is slower than the others."""
    step = 100 + 5 * version
    rows = [
        WorkerInfo(
            rank,
            rank,
            f"node{rank // RANKS_PER_HOST}",
            1000 + rank,
            "running",
            None,
            0.1,
            RankStatus(
                pid=1000 + rank,
                step=step,
                collectives=tuple(collectives),
                num_collectives=len(collectives),
                rss_bytes=2 << 30,
                device_bytes=30 << 30,
                progress={"loss": 2.5, "tokens": 1000.0 * step},
                steps=make_steps(step, is_late=rank == late),
            ),
        )
        for rank in range(num_ranks)
    ]
    command = ("python", "train.py", "--epochs", "3")
    job = JobInfo("20261130-1", command, 1.0, "node0", 7, 0)
    return JobStatus(Path("socket"), version, job, tuple(rows))


def make_usage(workers, *, at_s, num_gpus=8):
    """Return a host's answer after ``at_s`` seconds of steady work."""
    gpus = [
        GpuUsage(
            n, "NVIDIA H100", 0.97, 60 << 30, 80 << 30, 650.0, 60.0, 1755, 1980, (), ()
        )
        for n in range(num_gpus)
    ]
    return HostUsage(
        at_s=at_s,
        cpu_s=10.0 * at_s,
        num_cpus=64,
        memory_bytes=200 << 30,
        total_memory_bytes=1 << 40,
        shm_bytes=1 << 30,
        total_shm_bytes=500 << 30,
        num_oom_kills=0,
        interfaces=(
            NetworkCounters("eth0", int(at_s * 1e9), int(at_s * 1e9), 0, 10**11),
        ),
        gpus=tuple(gpus),
        gpu_problem="",
        workers={str(each): ProcessUsage(at_s, 4 << 30) for each in workers},
    )


def make_watcher(num_ranks, *, late=None, num_gpus=8, versions=2, **table):
    """Return a watcher that has seen some versions, a second apart."""
    watcher = JobWatcher(make_table(num_ranks, late=late, **table))
    for version in range(1, versions + 1):
        status = make_table(num_ranks, version=version, late=late, **table)
        watcher.add(status)
        for host in dict.fromkeys(row.host for row in status.workers):
            own = [row.worker for row in status.workers if row.host == host]
            usage = make_usage(own, at_s=float(version), num_gpus=num_gpus)
            watcher.add(HostAnswer(host, to_plain(usage)))
    return watcher
