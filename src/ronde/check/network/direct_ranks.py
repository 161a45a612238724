"""Run ``ronde bench`` on two hosts without ``ronde run``.

The ranks get the environment that ``ronde run`` would set. They write to memory files,
through inherited descriptors.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

from ronde.launch.environments import (
    JobFacts,
    NodeFacts,
    base_environment,
    default_environment,
    own_environment,
    rank_environment,
)
from ronde.world import World

_POLL_S = 0.02
_MAX_LOG_BYTES = 4 << 20
_MAX_REASON_CHARS = 300
_PACKAGE_DIR = __file__.rpartition("/ronde/check/")[0]
_BOOT = """\
import os, signal, sys
package, parent = sys.argv.pop(1), int(sys.argv.pop(1))
sys.path.append(package)
from ronde.processes import die_with_parent
if not die_with_parent(parent, signal.SIGKILL):
    os._exit(1)
from ronde.cli import main
sys.exit(main())
"""


class HalfJob(NamedTuple):
    """The half of a job on two hosts that runs on this host."""

    words: Sequence[str]  # arguments of ``ronde bench``
    half: int  # 0 on the host of rank 0, else 1
    num_ranks: int  # on each host
    address: str  # of their store
    port: int
    key: bytes
    token: str  # the job's name
    environment: Mapping[str, str]  # further variables of the ranks
    has_log: bool  # NCCL logs


def run_half(job: HalfJob, limit_s: float, grace_s: float) -> tuple[bytes, bytes, str]:
    """Run the ranks until they end; return the record, NCCL's log and the failure.

    The record is that of the first rank. After a failure, the other ranks have
    ``grace_s`` seconds left to end. The failure is empty if all ranks succeeded.
    """
    with ExitStack() as closing:
        ranks = [
            _start(job, local_rank, closing) for local_rank in range(job.num_ranks)
        ]
        failure = _follow(ranks, limit_s, grace_s)
        logs = b"".join(_read(rank.log_fd) for rank in ranks)
        return _read(ranks[0].record_fd), logs, failure


class _Rank(NamedTuple):
    process: "subprocess.Popen[bytes]"
    output_fd: int
    record_fd: int
    log_fd: int


def _start(job: HalfJob, local_rank: int, closing: ExitStack) -> _Rank:
    """Start one rank; ``closing`` kills it and closes its files."""
    fds = [os.memfd_create("ronde") for _ in range(4)]
    output_fd, record_fd, log_fd, key_fd = fds
    os.write(key_fd, job.key)
    for fd in fds:
        closing.callback(os.close, fd)
    env = _environment(job, local_rank)
    if job.has_log:
        env["NCCL_DEBUG"] = "INFO"
        env["NCCL_DEBUG_SUBSYS"] = "INIT,BOOTSTRAP,ENV,NET,GRAPH,TUNING"
        env["NCCL_DEBUG_FILE"] = f"/dev/fd/{log_fd}"
    env["RONDE_STORE"] = f"{job.address}:{job.port} /dev/fd/{key_fd}"
    boot = [sys.executable, "-c", _BOOT, _PACKAGE_DIR, str(os.getpid())]
    process = subprocess.Popen(
        [*boot, "bench", *job.words, "--json", f"/dev/fd/{record_fd}"],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output_fd,
        stderr=output_fd,
        start_new_session=True,
        pass_fds=(record_fd, log_fd, key_fd),
    )
    closing.callback(_end, process)
    return _Rank(process, output_fd, record_fd, log_fd)


def _environment(job: HalfJob, local_rank: int) -> dict[str, str]:
    rank = job.half * job.num_ranks + local_rank
    world = World(rank, 2 * job.num_ranks, local_rank, job.num_ranks, job.half, 2)
    facts = JobFacts(f"check-{job.token}", 0, job.token)
    node = NodeFacts(os.uname().nodename, job.half, 2)
    return (
        base_environment(own_environment())
        | default_environment(1)
        | dict(job.environment)
        | rank_environment(world, facts, node)
        | {"MASTER_ADDR": job.address, "MASTER_PORT": str(job.port)}
    )


def _follow(ranks: Sequence[_Rank], limit_s: float, grace_s: float) -> str:
    """Wait for the ranks, and return the first failure, or an empty string."""
    due_s, failure = time.monotonic() + limit_s, ""
    while time.monotonic() < due_s:
        is_over = all(rank.process.poll() is not None for rank in ranks)
        if not failure and (failure := _first_failure(ranks)):
            due_s = min(due_s, time.monotonic() + grace_s)
        if is_over:
            return failure
        time.sleep(_POLL_S)
    return failure or f"the ranks did not end within {limit_s:g} s"


def _first_failure(ranks: Sequence[_Rank]) -> str:
    for rank in ranks:
        code = rank.process.poll()
        if code:
            lines = _read(rank.output_fd).decode(errors="replace").strip().splitlines()
            last = lines[-1] if lines else "it wrote nothing"
            how = f"code {code}" if code > 0 else signal.Signals(-code).name
            return f"ronde bench ended with {how}: {last}"[:_MAX_REASON_CHARS]
    return ""


def _read(fd: int) -> bytes:
    return os.pread(fd, _MAX_LOG_BYTES, 0)


def _end(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
