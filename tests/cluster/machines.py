"""Several hosts on one machine: namespaces with an sshd, a name and a slow link each.

    with machines(3) as cluster:
        words = ["ssh", "-F", str(cluster.ssh_config), "node2", "hostname"]
        assert cluster.run(cluster.hosts[0], words).stdout == "node2\\n"

A host has its own network (IPv4 and IPv6, one link to a bridge, slowed down by ``tc``
in both directions), host name, ``/etc/hosts``, process table, ``/dev/shm``, ``/tmp``,
``/run`` and sshd. The rest of the file system is one and the same, as on a cluster with
shared disks; ``private`` takes folders out of it, ``shared`` puts some into it.

Needs root. Everything hangs on processes that die with this one, even by SIGKILL, and
namespaces have no names: nothing stays, nothing is in another cluster's way, and
nothing outside is reached.
"""

import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests import namespaces
from tests.cluster.machine_files import BRIDGE_SCRIPT, HOST_SCRIPT, Machine, write_files
from tests.cluster.observation import Process, Socket, processes_of, sockets_of

ROOT = Path(__file__).parents[2]
START_S = 30.0
_BURST = "128kb"
_QUEUE = "50ms"
_TOOLS = ("ip", "tc", "ssh", "sshd", "ssh-keygen", "nsenter", "unshare", "setpriv")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CLEAN: Mapping[str, str] = {"PATH": _PATH, "LANG": "C.UTF-8"}
_SPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")
_UNSHARE = ("unshare", *_SPACES)
# A process that ends with the thread that starts it.
_LEASED = ("setpriv", "--pdeathsig", "KILL")


class ClusterError(Exception):
    """Hosts cannot be made here."""


class HostProcess(subprocess.Popen[Any]):
    """A program on a host; signals go to the program, not to what carried it there."""

    def program_pid(self) -> int:
        """Return its number as seen from outside; the carrier's before it is there."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        with suppress(OSError):
            if found := children.read_text().split():
                return int(found[0])
        return self.pid

    def send_signal(self, sig: int) -> None:
        """Send a signal to the program; ``terminate`` and ``kill`` come here, too."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.program_pid(), sig)

    def kill(self) -> None:
        """End the program; what carried it there ends once that has."""
        self.send_signal(signal.SIGKILL)
        # It has stopped if the program was stopped.
        super().send_signal(signal.SIGCONT)


def why_not() -> str:
    """Say why no hosts can be made here; nothing where they can."""
    if os.geteuid() != 0:
        return "user must be root to make hosts of namespaces, got another."
    missing = [tool for tool in _TOOLS if shutil.which(tool, path=_PATH) is None]
    if missing:
        return (
            f"hosts of namespaces need {', '.join(missing)}, got none. Debian: apt-get "
            "install openssh-server openssh-client iproute2 util-linux"
        )
    return namespaces.why_not((*_UNSHARE, "--fork"))


@contextmanager
def machines(
    num: int,
    *,
    rate: str = "1gbit",
    private: Sequence[Path] = (),
    shared: Sequence[Path] = (),
) -> Generator["Cluster"]:
    """Make hosts; take them away at the end with all that runs there.

    Args:
        num: How many.
        rate: What each link lets through each way, as ``tc`` writes it.
        private: Folders that are another, empty one on each host.
        shared: Folders below ``/tmp`` or another private one that every host sees
            nonetheless. The repository and this Python are always seen.

    Raises:
        ClusterError: This is no root, or the kernel or the tools do not allow it.
    """
    if reason := why_not():
        raise ClusterError(reason)
    folder = Path(tempfile.mkdtemp(prefix="ronde-cluster-"))
    cluster = Cluster(folder, num, rate)
    try:
        kept = (ROOT, Path(sys.prefix), Path(sys.base_prefix), folder, *shared)
        cluster.boot_all(private, kept)
        yield cluster
    finally:
        with _undisturbed():
            cluster.close()
            shutil.rmtree(folder)


class Cluster:
    """Hosts, what runs on them, and their faults.

    Attributes:
        hosts: The hosts, by number.
        folder: A folder that all hosts and this process see.
        ssh_config: For ``ssh -F``: who knows all hosts and is let in by them.
        rate: What each link lets through each way, as ``tc`` writes it.
    """

    def __init__(self, folder: Path, num: int, rate: str) -> None:
        self.rate = rate
        self.folder = folder
        self.ssh_config = folder / "ssh_config"
        self.hosts = tuple(
            Machine(f"node{i}", f"10.77.0.{i}", f"fd77::{i}", folder / f"node{i}")
            for i in range(1, num + 1)
        )
        self._limit = _limit(rate)
        self._leases: dict[str, subprocess.Popen[str]] = {}

    def boot_all(self, private: Sequence[Path], kept: Sequence[Path]) -> None:
        """Write all files and start all hosts, at once."""
        write_files(self.folder, self.hosts, private, kept)
        unshare = ("unshare", "--net", "sh", "-ec", BRIDGE_SCRIPT)
        self._leases["bridge"] = _start((*_LEASED, *unshare), self.folder / "bridge")
        _wait_up(self._leases["bridge"], self.folder / "bridge")
        for host in self.hosts:
            self._begin_boot(host)
        for host in self.hosts:
            _wait_up(self._leases[host.name], host.folder / "boot.log")

    def boot(self, host: Machine) -> None:
        """Start a host that crashed; its private folders are empty again."""
        self._begin_boot(host)
        _wait_up(self._leases[host.name], host.folder / "boot.log")

    def start(
        self, host: Machine, words: Sequence[str], *, cwd: Path = ROOT, **popen: Any
    ) -> HostProcess:
        """Start a program on a host.

        Args:
            host: Where.
            words: The program and its arguments.
            cwd: Its working directory, as the host sees it.
            popen: What ``subprocess.Popen`` takes besides.
        """
        entering = ("nsenter", "--target", str(host.init_pid), *_SPACES, "--")
        going = ("sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", str(cwd))
        return HostProcess([*entering, *going, *words], **popen)

    def run(
        self,
        host: Machine,
        words: Sequence[str],
        *,
        timeout_s: float = 60.0,
        **popen: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on a host to its end; its output is kept, as text."""
        pipes: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
        }
        with self.start(host, words, **(pipes | popen)) as process:
            try:
                out, errors = process.communicate(timeout=timeout_s)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(words, process.returncode, out, errors)

    def cut(self, host: Machine) -> None:
        """Let packets to and from a host vanish; its link stays up."""
        self._on_bridge("ip", "link", "set", host.name, "nomaster")

    def restore(self, host: Machine) -> None:
        """Undo :meth:`cut`."""
        self._on_bridge("ip", "link", "set", host.name, "master", "bridge")

    def slow_down(self, host: Machine, rate: str) -> None:
        """Give a host's link another rate each way, as ``tc`` writes it."""
        change = ("tc", "qdisc", "change", "root", "dev")
        limit = ("tbf", *_limit(rate).split())
        self._on_bridge(*change, host.name, *limit)
        done = self.run(host, (*change, "eth0", *limit))
        if done.returncode != 0:
            raise ClusterError(f"a link must become slower, got: {done.stderr}")

    def narrow(self, host: Machine, mtu: int) -> None:
        """Let the bridge take no larger packets of a host's, and tell nobody."""
        self._on_bridge("ip", "link", "set", host.name, "mtu", str(mtu))

    def kill_sshd(self, host: Machine) -> None:
        """Kill a host's sshd and its sessions, but not what they started."""
        # OpenSSH 9.8 and later serve a session in a program of its own, sshd-session.
        while found := [p for p in self.processes(host) if p.name.startswith("sshd")]:
            for process in found:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)

    def start_sshd(self, host: Machine, *options: str) -> None:
        """Start a host's sshd again, with options before those of its file."""
        (host.folder / "sshd.log").unlink(missing_ok=True)
        files = (
            "-f", str(host.folder / "sshd_config"), "-E", str(host.folder / "sshd.log")
        )  # fmt: skip
        script = (
            'rm -f /run/sshd.pid; $(command -v sshd) "$@" || exit; '
            "until test -s /run/sshd.pid; do sleep 0.01; done"
        )
        words = ("sh", "-c", script, "sh", *options, *files)
        done = self.run(host, words, timeout_s=START_S, env=_CLEAN)
        if done.returncode != 0:
            raise ClusterError(f"sshd must start on {host.name}, got: {done.stderr}")

    def crash(self, host: Machine) -> None:
        """Kill a host with all that runs there; its link is gone, too."""
        with suppress(ProcessLookupError):
            os.kill(host.init_pid, signal.SIGKILL)
        _end(self._leases.pop(host.name))
        # The kernel takes the link away by itself as well, but in its own time.
        deleting = 'ip link delete "$1" 2>/dev/null || ! ip link show "$1" 2>/dev/null'
        self._on_bridge("sh", "-c", deleting, "sh", host.name)

    def heal(self) -> None:
        """Undo all faults: crashed hosts, cut links, sshds that are gone."""
        for host in self.hosts:
            if host.name not in self._leases:
                self.boot(host)
                continue
            self.restore(host)
            listening = self.listening(host)
            if not any(found.port == 22 for found in listening):
                self.start_sshd(host)

    def processes(self, host: Machine) -> list[Process]:
        """Return all processes of a host."""
        return processes_of(host.init_pid)

    def listening(self, host: Machine) -> list[Socket]:
        """Return all sockets of a host that wait for others: TCP and UDP."""
        return sockets_of(host.init_pid)

    def close(self) -> None:
        """Kill all hosts and wait until nothing of them is left."""
        for host in self.hosts:
            if host.name in self._leases:
                self.crash(host)
        for lease in self._leases.values():
            lease.kill()
            _end(lease)
        self._leases.clear()

    def _begin_boot(self, host: Machine) -> None:
        unshare = (*_UNSHARE, "--fork", "--kill-child", "--mount-proc")
        given = (host.name, host.folder, host.address, host.address6, self._limit)
        words = (*unshare, "sh", "-c", HOST_SCRIPT, "sh", *map(str, given))
        lease = _start((*_LEASED, *words), host.folder / "boot.log")
        self._leases[host.name] = lease
        host.init_pid = _only_child(lease)
        self._on_bridge(
            "sh", "-ec",
            'ip link add "$1" type veth peer name eth0 address "$4" netns "$2"; '
            'ip link set "$1" master bridge up; tc qdisc add dev "$1" root tbf $3',
            "sh", host.name, str(host.init_pid), self._limit, _hardware_address(host),
        )  # fmt: skip
        assert lease.stdin is not None
        lease.stdin.write("linked\n")
        lease.stdin.flush()

    def _on_bridge(self, *words: str) -> None:
        bridge = str(self._leases["bridge"].pid)
        entering = ("nsenter", "--target", bridge, "--net", "--")
        done = subprocess.run(
            (*entering, *words), env=_CLEAN, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise ClusterError(f"{' '.join(words)} failed: {done.stderr.strip()}")


def _limit(rate: str) -> str:
    return f"rate {rate} burst {_BURST} latency {_QUEUE}"


def _start(words: Sequence[str], log: Path) -> "subprocess.Popen[str]":
    with log.open("w") as errors:
        return subprocess.Popen(
            words,
            env=_CLEAN,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )


def _wait_up(lease: "subprocess.Popen[str]", log: Path) -> None:
    assert lease.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(lease.stdout, selectors.EVENT_READ)
        ready = selector.select(START_S)
    if not ready or lease.stdout.readline() != "up\n":
        raise ClusterError(f"a host must start, got: {log.read_text().strip()}")


def _only_child(lease: "subprocess.Popen[str]") -> int:
    """Return the first process of the namespaces that ``lease`` makes."""
    children = Path(f"/proc/{lease.pid}/task/{lease.pid}/children")
    deadline = time.monotonic() + START_S
    while lease.poll() is None and time.monotonic() < deadline:
        with suppress(OSError):
            if found := children.read_text().split():
                return int(found[0])
        time.sleep(0.002)
    raise ClusterError("namespaces must be allowed by the kernel, got none.")


def _end(lease: "subprocess.Popen[str]") -> None:
    """Wait for a lease whose host was killed: it reaps the host's first process."""
    lease.wait(START_S)
    for pipe in (lease.stdin, lease.stdout):
        if pipe is not None:
            pipe.close()


def _hardware_address(host: Machine) -> str:
    """Return the link's: a host that comes back is where the others remember it."""
    return f"02:00:00:00:00:{int(host.address.rpartition('.')[2]):02x}"


@contextmanager
def _undisturbed() -> Generator[None]:
    """Let no second Ctrl-C end the taking away; only the main thread has signals."""
    is_main = threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN) if is_main else None
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGINT, previous)
