"""This host's ranks of a small job: ``ronde bench`` with the ranks of another host.

The ranks are started as ``ronde run`` starts them, with the same environment, but by
the program that is here already. Nothing is written to a disk: what they say goes into
memory, through descriptors that they inherit.
"""

import base64
import os
import secrets
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

from ronde.check.facts import Value
from ronde.check.hosts import NodeContext
from ronde.launch.environments import (
    JobFacts,
    NodeFacts,
    base_environment,
    default_environment,
    own_environment,
    rank_environment,
)
from ronde.launch.placement.network import hold_port
from ronde.store.secret import SharedKey
from ronde.store.server import serve_network
from ronde.world import World

_HELD = "benching.rendezvous"
_KEY_BYTES = 32
_MAX_CLIENTS = 4096
_POLL_S = 0.02
_GRACE_S = 3.0
"""Once a rank has failed, so long the others have to say what they saw."""

_MAX_LOG_BYTES = 4 << 20
_MAX_SAID_CHARS = 300
_PACKAGE_DIR = __file__.rpartition("/ronde/check/")[0]
_BOOT = """\
import os, signal, sys
package, parent = sys.argv.pop(1), int(sys.argv.pop(1))
sys.path.append(package)
from ronde.launch.process_tree import die_with_parent
if not die_with_parent(parent, signal.SIGKILL):
    os._exit(1)
from ronde.cli import main
sys.exit(main())
"""


def hold_rendezvous(site: NodeContext, question: dict[str, Value]) -> dict[str, Value]:
    """Answer for a store at ``address`` for one job; return ``port`` and ``key``."""
    held, key = hold_port(question["address"]), secrets.token_bytes(_KEY_BYTES)
    port = held.getsockname()[1]
    held.listen()
    server = serve_network(held, SharedKey(key), _MAX_CLIENTS)
    site.memory[_HELD] = server.close
    site.closing.callback(server.close)
    return {"port": port, "key": key.hex()}


def bench(site: NodeContext, question: dict[str, Value]) -> dict[str, Value]:
    """Run this host's half of the ranks of a job of two hosts, to their end.

    Args:
        site: Has the store, on the host of rank 0.
        question: ``words``: what stands after ``ronde bench``; ``half``: 0 on the host
            of rank 0, else 1; ``num_ranks``: on each host; ``address`` and ``port``:
            where they meet; ``key``: opens the store there; ``token``: names the job;
            ``environment``: what the user's jobs take along; ``limit_s``: after it they
            are killed; ``has_log``: whether NCCL is to say what it does.

    Returns:
        ``record``: what rank 0 has written with ``--json``, empty elsewhere; ``log``:
        what NCCL said, packed; ``failure``: why it did not go well, or empty.
    """
    half = int(question["half"])
    held = site.memory.pop(_HELD, None) if half == 0 else None
    with ExitStack() as closing:
        if held is not None:
            closing.callback(held)
        ranks = [
            _start(question, place, closing)
            for place in range(int(question["num_ranks"]))
        ]
        failure = _follow(ranks, float(question["limit_s"]))
        logs = b"".join(_read(rank.log_fd) for rank in ranks)
        record = _read(ranks[0].record_fd).decode(errors="replace")
    return {
        "record": record if half == 0 else "",
        "log": base64.b64encode(zlib.compress(logs)).decode() if logs else "",
        "failure": failure,
    }


def unpack_log(text: str) -> bytes:
    """Return what NCCL said, from an answer's ``log``."""
    return zlib.decompress(base64.b64decode(text)) if text else b""


class _Rank(NamedTuple):
    process: "subprocess.Popen[bytes]"
    said_fd: int
    record_fd: int
    log_fd: int


def _start(question: Mapping[str, Value], local_rank: int, closing: ExitStack) -> _Rank:
    """Start one rank; when ``closing`` ends it has ended and nothing is left of it."""
    fds = [os.memfd_create("ronde") for _ in range(4)]
    said_fd, record_fd, log_fd, key_fd = fds
    os.write(key_fd, bytes.fromhex(question["key"]))
    for fd in fds:
        closing.callback(os.close, fd)
    env = _environment(question, local_rank)
    if question["has_log"]:
        env |= _log_environment(log_fd)
    place = f"{question['address']}:{question['port']}"
    env["RONDE_STORE"] = f"{place} /dev/fd/{key_fd}"
    boot = [sys.executable, "-c", _BOOT, _PACKAGE_DIR, str(os.getpid())]
    process = subprocess.Popen(
        [*boot, "bench", *question["words"], "--json", f"/dev/fd/{record_fd}"],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=said_fd,
        stderr=said_fd,
        start_new_session=True,
        pass_fds=(record_fd, log_fd, key_fd),
    )
    closing.callback(_end, process)
    return _Rank(process, said_fd, record_fd, log_fd)


def _environment(question: Mapping[str, Value], local_rank: int) -> dict[str, str]:
    half, num_ranks = int(question["half"]), int(question["num_ranks"])
    world = World(
        rank=half * num_ranks + local_rank,
        size=2 * num_ranks,
        local_rank=local_rank,
        local_size=num_ranks,
        cross_rank=half,
        cross_size=2,
    )
    job = JobFacts(f"check-{question['token']}", 0, question["token"])
    node = NodeFacts(os.uname().nodename, half, 2)
    return (
        base_environment(own_environment())
        | default_environment(1)
        | question["environment"]
        | rank_environment(world, job, node)
        | {"MASTER_ADDR": question["address"], "MASTER_PORT": str(question["port"])}
    )


def _log_environment(fd: int) -> dict[str, str]:
    return {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,BOOTSTRAP,ENV,NET,GRAPH,TUNING",
        "NCCL_DEBUG_FILE": f"/dev/fd/{fd}",
    }


def _follow(ranks: Sequence[_Rank], limit_s: float) -> str:
    """Wait until all ranks have ended; return why they did not end well, or nothing.

    Those that wait for one that has failed are killed soon after it.
    """
    due_s = time.monotonic() + limit_s
    failure = ""
    while any(rank.process.poll() is None for rank in ranks):
        now_s = time.monotonic()
        if not failure:
            failure = _first_failure(ranks)
            if failure:
                due_s = min(due_s, now_s + _GRACE_S)
        if now_s >= due_s:
            return failure or f"the ranks did not end within {limit_s:g} s"
        time.sleep(_POLL_S)
    return failure or _first_failure(ranks)


def _first_failure(ranks: Sequence[_Rank]) -> str:
    return next(_failures(ranks), "")


def _failures(ranks: Sequence[_Rank]) -> Iterator[str]:
    for rank in ranks:
        code = rank.process.poll()
        if code:
            lines = _read(rank.said_fd).decode(errors="replace").strip().splitlines()
            last = lines[-1] if lines else "it said nothing"
            how = f"code {code}" if code > 0 else signal.Signals(-code).name
            yield f"ronde bench ended with {how}: {last}"[:_MAX_SAID_CHARS]


def _read(fd: int) -> bytes:
    return os.pread(fd, _MAX_LOG_BYTES, 0)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill what is left of a rank and of what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
