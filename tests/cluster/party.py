"""A job whose nodes join by themselves: a head on the first host, nodes on others."""

import hashlib
import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress

from tests.limits import HANG_S, until

from ronde.launch import own_environment

SECRET = "5ec2e7" + hashlib.sha256(b"of this test alone").hexdigest()
PORT = 29400
STAY = 'touch "$0/ready.$RANK.$RONDE_EPOCH"; exec sleep 1000'


class Party:
    """A head on the first host and nodes on the others."""

    def __init__(self, cluster, folder):
        self.cluster = cluster
        self.folder = folder
        self.token = folder / "token"
        self.token.write_text(SECRET + "\n")
        self.token.chmod(0o600)
        self.command = [sys.executable, "-m", "ronde"]
        self.started = []

    def start(self, host, *words, **popen):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = self.cluster.start(
            host,
            [*self.command, "run", *words],
            **{"stdin": subprocess.DEVNULL, **pipes, **popen},
        )
        self.started.append(process)
        return process

    def head(self, *words, nodes="3", **popen):
        """Start the head: a run of ``words`` that waits for nodes."""
        own = ("--nodes", nodes, "--listen", str(PORT), "--token-file", str(self.token))
        return self.start(self.cluster.hosts[0], *own, *words, **popen)

    def node(self, number, *words, **popen):
        """Start ``ronde run --agent`` on a host."""
        own = ("--agent", f"node1:{PORT}", "--token-file", str(self.token))
        return self.start(self.cluster.hosts[number - 1], *own, *words, **popen)

    def pod(self, number, host, *words, nodes="2:3"):
        """Start a pod of an elastic job on a host, with variables for its number."""
        own = {"RONDE_NODES": nodes, "RONDE_NODE_INDEX": str(number)}
        own |= {"RONDE_HEAD": f"node1:{PORT}", "RONDE_TOKEN_FILE": str(self.token)}
        env = own_environment() | own
        return self.start(self.cluster.hosts[host - 1], *words, env=env)

    def run(self, *words):
        """Start all three; wait until each rank of ``STAY`` is there."""
        processes = [self.head(*words, "--", "sh", "-c", STAY, str(self.folder))]
        processes += [self.node(2), self.node(3)]
        self.await_ready(epoch=0)
        return processes

    def await_ready(self, epoch):
        for rank in range(3):
            path = self.folder / f"ready.{rank}.{epoch}"
            until(path.exists, f"rank {rank}")

    def leftovers(self, number):
        """Return what of ronde or of its ranks is on a host."""
        return [
            process
            for process in self.cluster.processes(self.cluster.hosts[number - 1])
            if process.state != "Z"
            and (b"RONDE_COOKIE" in process.environment or is_ours(process.words))
        ]

    def require_nothing_left(self):
        for number in (1, 2, 3):
            found = self.leftovers(number)
            assert not found, f"left on node{number}: {found}"


def is_ours(words):
    return any(w in ("ronde", "tests.timed") or "ronde.launch" in w for w in words)


def await_line(process, text):
    """Read what a process complains of up to a line that has this in it."""
    said = iter(process.stderr.readline, "")
    assert any(text in line for line in said), f"ended without a word of: {text}"


def end_of(process):
    """Wait for a process; return its exit code, output and errors."""
    out, errors = process.communicate(timeout=HANG_S)
    return process.returncode, out, errors


@contextmanager
def open_party(cluster, folder):
    """Yield a party; leave none of its processes behind."""
    party = Party(cluster, folder)
    try:
        yield party
    finally:
        for process in party.started:
            process.kill()
            process.communicate()
        # Of a test that failed something may be left, which the next must not find.
        for number in (1, 2, 3):
            for process in party.leftovers(number):
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
