"""Pods on one machine: containers of podman on a network of their own, with names.

    with pod_network() as network:
        pod = network.start(PodSpec("train-0", ["hostname", "-f"], subdomain="train"))
        assert pod.wait() == 0
        assert pod.out() == "train-0.train.default.svc.cluster.local\\n"

A pod has its own processes, network, host name and ``/etc/hosts`` as kubelet writes it,
and sees the machine's programs, this Python and the repository, all read-only. Others
find it by ``name.subdomain``. No image is needed.

Needs root. All hangs on a shell that notices the end of this process, even by SIGKILL,
and then removes everything. Nothing outside of the network is reached.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tests import namespaces
from tests.limits import HANG_S, until

ROOT = Path(__file__).parents[2]
DOMAIN = "default.svc.cluster.local"
_TOOLS = (
    "podman",
    "runc",
    "conmon",
    "iptables",
    "ip",
    "nsenter",
    "unshare",
    "netavark",
)
_NAME_SERVER = str(Path(__file__).with_name("name_server.py"))
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SPACES = ("--net", "--mount", "--pid")
_UNSHARE = ("unshare", *_SPACES, "--fork", "--kill-child", "--mount-proc")
# The first process must reap orphans: see HOST_SCRIPT of machine_files.
_INSIDE = """
mount -n -t tmpfs tmpfs /run
mount -n -t tmpfs -o mode=1777 tmpfs /dev/shm
ip link set lo up
"$@" &
exec env --ignore-signal=CHLD sleep infinity
"""
# A bridge of netavark's own goes with the last pod, and takes another hardware address
# with each, which other pods learn 30 s later.
_BRIDGE = """
ip link add podman1 address 02:00:00:00:00:01 type bridge mcast_snooping 0
ip address add 10.77.0.1/16 dev podman1
ip link set podman1 up
ip link add stays type veth peer name idle
ip link set stays master podman1
"""
# Its standard input ends with the process that wants the pods.
_LEASE = """
folder=$1
shift
"$@" &
exec >/dev/null
read -r _
kill -KILL $(cat /proc/$!/task/$!/children)
wait
find /sys/fs/cgroup -depth -type d -path "*/${folder##*/}*" -exec rmdir {} +
rm -rf "$folder"
"""
_CONFIG = """
[engine]
cgroup_manager = "cgroupfs"
runtime = "runc"
events_logger = "none"
"""
_RESOLVING = f"""
search {DOMAIN} svc.cluster.local cluster.local
nameserver 10.77.0.1
options ndots:5
"""
_USERS = {
    "passwd": "root:x:0:0::/tmp:/bin/sh\nsshd:x:100:65534::/run/sshd:/bin/false\n"
    "ronde:x:1000:1000::/tmp:/bin/sh\n",
    "group": "root:x:0:\nronde:x:1000:\nnogroup:x:65534:\n",
    "nsswitch.conf": "hosts: files dns\n",
}
_MOUNTED = ("etc/ronde", "etc/mpi", "work", "shared")  # where some mount something
_COPIED = ("ld.so.cache", "alternatives", "login.defs", "ssl", "ssh/moduli")


class PodSpec(NamedTuple):
    """One pod with one container."""

    name: str  # its host name
    words: Sequence[str]
    subdomain: str = "train"
    environment: Mapping[str, str] = {}
    user: str = "1000:1000"
    is_read_only: bool = True
    capabilities: Sequence[str] = ()  # all others are dropped
    may_escalate: bool = False
    memory_bytes: int | None = None
    folders: Mapping[str, Path] = {}  # of this machine, with write access
    files: Mapping[str, Path] = {}  # files and folders of this machine, read-only
    memory_folders: Mapping[str, int | None] = {}  # their sizes in bytes
    workdir: str = "/tmp"  # noqa: S108


def why_not() -> str:
    """Return the reason why there can be no pods here; nothing where there can."""
    if os.geteuid() != 0:
        return "user must be root to start containers, got another."
    places = f"{_PATH}:/usr/lib/podman:/usr/libexec/podman"
    if missing := [tool for tool in _TOOLS if not shutil.which(tool, path=places)]:
        return (
            f"containers need {', '.join(missing)}, got none. Debian: apt-get install "
            "--no-install-recommends podman runc netavark iptables"
        )
    return namespaces.why_not(_UNSHARE)


@contextmanager
def pod_network() -> Generator["PodNetwork"]:
    """Make a network for pods; remove it at the end with all of them."""
    network = PodNetwork(Path(tempfile.mkdtemp(prefix="ronde-containers-")))
    try:
        network.open()
        yield network
    finally:
        network.close()


class PodNetwork:
    """A network with the pods on it.

    Attributes:
        folder: Files of the pods and of podman.
        pods: All pods that were ever started, also those that have ended.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pods: list[Pod] = []
        self._init_pid = 0
        self._environment = {
            "PATH": _PATH,
            "LANG": "C.UTF-8",
            "HOME": str(folder),
            "CONTAINERS_CONF": str(folder / "containers.conf"),
        }
        server = (sys.executable, "-IS", _NAME_SERVER, str(folder))
        inside = ("sh", "-ec", _INSIDE, "sh", *server)
        words = ("sh", "-c", _LEASE, "sh", str(folder), *_UNSHARE, *inside)
        with (folder / "lease").open("w") as errors:
            self._lease = subprocess.Popen(
                words,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # away from Ctrl-C
            )

    def open(self) -> None:
        """Write all files and make the network."""
        folder = self.folder
        folder.chmod(0o755)
        (folder / "containers.conf").write_text(_CONFIG)
        (folder / "resolv.conf").write_text(_RESOLVING)
        _write_root(folder / "root")
        assert self._lease.stdout is not None
        is_up = self._lease.stdout.readline() == "up\n"
        assert is_up, (folder / "lease").read_text()
        self._init_pid = _child(_child(self._lease.pid))
        size = ("--subnet", "10.77.0.0/16")
        self.podman("network", "create", "--disable-dns", *size, "pods")
        with self.run_inside("sh", "-ec", _BRIDGE) as process:
            _, errors = process.communicate(timeout=HANG_S)
        assert process.returncode == 0, errors

    def podman(self, *words: str) -> str:
        """Run a command of podman; return its output."""
        with self.begin(*words) as process:
            out, errors = process.communicate(timeout=HANG_S)
        assert process.returncode == 0, (words, process.returncode, out, errors)
        return out

    def begin(self, *words: str) -> "subprocess.Popen[str]":
        """Begin a command of podman."""
        own = ("--root", "/run/podman-root", "--runroot", "/run/podman")
        own += ("--storage-driver", "vfs", "--network-config-dir", "/run/networks")
        return self.run_inside("podman", *own, *words)

    def run_inside(self, *words: str) -> "subprocess.Popen[str]":
        """Begin a program of this machine in the namespaces of podman."""
        entering = ("nsenter", "--target", str(self._init_pid), *_SPACES, "--")
        return subprocess.Popen(
            (*entering, *words),
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def start(self, spec: PodSpec) -> "Pod":
        """Begin a pod, which others of the same name do not hinder."""
        number = len(self.pods)
        address = f"10.77.{1 + number // 250}.{1 + number % 250}"
        pod = Pod(self, spec, f"{spec.name}-{number}", address)
        self.pods.append(pod)
        pod.begin()
        return pod

    def read(self, path: str) -> str:
        """Return the text of a file of podman's own; empty if there is none."""
        with suppress(OSError):
            return Path(f"/proc/{self._init_pid}/root{path}").read_text()
        return ""

    def kill_all(self) -> None:
        """Kill all pods; podman frees what they held by itself."""
        here = [pod for pod in self.pods if not pod.is_deleted]
        for pod in here:
            pod.kill()
        for pod in here:
            pod.wait()

    def close(self) -> None:
        """Remove everything, once all of it has ended."""
        with suppress(BrokenPipeError):
            self._lease.communicate(timeout=HANG_S)
        for pod in self.pods:
            pod.forget()


class Pod:
    """A pod that was started.

    Attributes:
        spec: Its container.
        id: Its name for podman.
        address: Its IPv4 address.
        files: Its folder on this machine, with the log.
    """

    def __init__(
        self, network: PodNetwork, spec: PodSpec, name: str, address: str
    ) -> None:
        self.spec = spec
        self.id = name
        self.address = address
        self._network = network
        self.files = network.folder / name
        self.is_deleted = False  # by podman rm
        self._starting: subprocess.Popen[str] | None = None
        self._container = ""
        self._code: int | None = None

    def begin(self) -> None:
        """Let podman start the container."""
        self.files.mkdir()
        full = f"{self.spec.name}.{self.spec.subdomain}.{DOMAIN}"
        hosts = f"127.0.0.1 localhost\n{self.address} {full} {self.spec.name}\n"
        (self.files / "hosts").write_text(hosts)
        parts = full.split(".")
        names = [".".join(parts[:n]) for n in range(2, len(parts) + 1)]
        (self.files / "names").write_text(" ".join((self.address, *names)))
        self._starting = self._network.begin(*self._words())

    def wait(self) -> int:
        """Return the exit code of the container, once it has ended."""
        until(lambda: self.exit_code is not None, self.describe)
        assert self.exit_code is not None
        return self.exit_code

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while the container runs, or is not there yet."""
        if self._code is None and self._is_started():
            conmon = self._network.read(f"/run/{self.id}.conmon")
            is_over = not self._network.read(f"/proc/{conmon}/stat")
            text = self._network.read(f"/run/libpod/exits/{self._container}")
            # Podman soon removes the file, and conmon ends after it has written it.
            if text or is_over:
                self._code = int(text or self._network.podman("wait", self.id))
                (self.files / "names").unlink(missing_ok=True)
        return self._code

    @property
    def init_pid(self) -> int:
        """The first process of the container, in the namespaces of podman."""
        path = f"/run/{self.id}.pid"
        until(lambda: self._is_started() and self._network.read(path), self.describe)
        return int(self._network.read(path))

    def signal(self, number: int) -> None:
        """Send a signal to the first process of the container, if it runs."""
        if self.init_pid and self.exit_code is None:
            words = ("kill", f"-{number:d}", str(self.init_pid))
            with self._network.run_inside(*words) as process:
                process.communicate(timeout=HANG_S)

    def terminate(self) -> None:
        """Begin as the deletion of a pod does: with SIGTERM."""
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill all processes of the container."""
        self.signal(signal.SIGKILL)

    def exec(self, *words: str) -> str:
        """Run a program in the container; return its output."""
        assert self.init_pid
        return self._network.podman("exec", self.id, *words)

    def out(self) -> str:
        """Return the standard output so far."""
        return self._log("stdout")

    def errors(self) -> str:
        """Return the standard error so far."""
        return self._log("stderr")

    def await_line(self, text: str) -> None:
        """Wait until output or errors have this in a line; the pod must not end."""
        until(
            lambda: text in self.out() + self.errors() or self.exit_code is not None,
            self.describe,
        )
        assert text in self.out() + self.errors(), self.describe()

    def describe(self) -> str:
        """Return all that is known, for a test that fails."""
        log = f"{self.out()}\n{self.errors()}"
        return f"{self.id} at {self.address} ended with {self.exit_code}: {log}"

    def settle(self) -> None:
        """Wait for podman, which starts the container."""
        assert self._starting is not None
        self._starting.wait(timeout=HANG_S)
        self._is_started()

    def forget(self) -> None:
        """Close the pipes of podman, which has ended."""
        if self._starting is not None:
            self._starting.communicate(timeout=HANG_S)

    def _is_started(self) -> bool:
        assert self._starting is not None
        if not self._container:
            if self._starting.poll() is None:
                return False
            out, errors = self._starting.communicate()
            assert self._starting.returncode == 0, (self.id, errors)
            self._container = out.strip()
        return True

    def _log(self, stream: str) -> str:
        """Return what the container wrote to a stream, out of the log's lines."""
        text = ""
        with suppress(OSError):
            for line in (self.files / "log").read_text().split("\n")[:-1]:
                _, name, tag, *rest = line.split(" ", 3)
                if name == stream:
                    text += "".join(rest) + "\n" * (tag == "F")
        return text

    def _words(self) -> list[str]:
        """Return the command of podman that starts the container."""
        spec, files = self.spec, self.files
        home = {"HOME": "/tmp", "USER": "ronde"}  # noqa: S108
        environment = {**home, "PATH": f"{sys.prefix}/bin:{_PATH}", **spec.environment}
        mounts = [f"{source}:{path}:ro" for path, source in spec.files.items()]
        mounts += [f"{source}:{path}" for path, source in spec.folders.items()]
        mounts += [f"{files}/hosts:/etc/hosts:ro"]
        mounts += [f"{files.parent}/resolv.conf:/etc/resolv.conf:ro"]
        mounts += [f"{path}:{path}:ro" for path in _seen()]
        memory = {p: f",size={n}" if n else "" for p, n in spec.memory_folders.items()}
        words = ["run", "--detach", "--name", self.id]
        words += ["--pidfile", f"/run/{self.id}.pid"]
        words += ["--conmon-pidfile", f"/run/{self.id}.conmon"]
        words += ["--cgroup-parent", f"/{files.parent.name}"]
        words += ["--log-driver", "k8s-file", "--log-opt", f"path={files}/log"]
        words += ["--network", "pods", "--ip", self.address, "--hostname", spec.name]
        words += ["--user", spec.user, "--ulimit", "host", "--cap-drop", "ALL"]
        words += [f"--cap-add={name}" for name in spec.capabilities]
        words += [] if spec.may_escalate else ["--security-opt", "no-new-privileges"]
        words += ["--read-only"] if spec.is_read_only else []
        words += ["--read-only-tmpfs=false"] if spec.is_read_only else []
        words += [f"--memory={spec.memory_bytes}"] if spec.memory_bytes else []
        words += [f"--tmpfs={p}:notmpcopyup,mode=1777{s}" for p, s in memory.items()]
        words += [f"--volume={mount}" for mount in mounts]
        words += [f"--env={name}={value}" for name, value in environment.items()]
        words += ["--workdir", spec.workdir, "--rootfs", str(files.parent / "root")]
        return [*words, *spec.words]


def _write_root(root: Path) -> None:
    """Write the root file system of the pods: folders, and some files of /etc."""
    for name in ("usr", "proc", "sys", "dev", "tmp", "run", "var/tmp", *_MOUNTED):
        (root / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    for name in ("hosts", "hostname", "resolv.conf"):
        (root / "etc" / name).touch()
    for name, text in _USERS.items():
        (root / "etc" / name).write_text(text)
    for name in _COPIED:
        source, copy = Path("/etc", name), root / "etc" / name
        copy.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, symlinks=True)
        elif source.exists():
            shutil.copy(source, copy)
    # In the order of their depth, before several containers start at once.
    for path in _seen():
        (root / path.relative_to("/")).mkdir(parents=True, exist_ok=True)


def _seen() -> list[Path]:
    """Return the folders that a pod sees: programs, this Python and the repository."""
    found = {Path(p).resolve() for p in sys.path if Path(p).is_dir()}
    found |= {Path("/usr"), ROOT.resolve(), Path(sys.prefix), Path(sys.base_prefix)}
    return sorted(p for p in found if not found & set(p.parents))


def _child(parent: int) -> int:
    """Return the only child of a process, once there is one."""
    path = Path(f"/proc/{parent}/task/{parent}/children")
    until(lambda: path.read_text().split(), f"child of {parent}")
    return int(path.read_text().split()[0])
