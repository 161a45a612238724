"""A job of pods that ``pod_faults.py`` breaks, with the codes that pods must end with.

A rank writes each world that it is in: epoch, view, rank, size, a mark of the job, its
pod, and the members of the view. All that are in one world must agree.
"""

import os
import random
import shutil
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tests import ledger
from tests.cluster.elastic_training_rank import BATCH, NUM_SAMPLES
from tests.containers.pods import Pod, PodNetwork, PodSpec
from tests.limits import HANG_S

LOST, KILLED, ENDED = 69, 137, 143
MEMORY_BYTES = 192 << 20
MARK = "POD_FAULTS_JOB"
_POLL_S = 0.02
_FOLDER = Path("/job")
_TESTS = Path(__file__).parents[1]
_TOKEN = "5ec2e7" * 10
# A rank runs the commands of a file of its own, and ends when ``finish`` appears.
STAY = """
echo "$RONDE_EPOCH 0 $RANK $WORLD_SIZE $RONDE_COOKIE $(hostname -i) -" >>/job/worlds
while [ ! -e /job/finish ]; do
    [ ! -e /job/act.$RONDE_EPOCH.$RANK ] || . /job/act.$RONDE_EPOCH.$RANK
    sleep 0.1
done
"""
_PEER = """
nsenter --target $1 --net ip -o link show eth0 | sed 's/.*@if\\([0-9]*\\):.*/\\1/' |
{ read -r n; ip -o link | sed -n "s/^$n: \\([^@:]*\\).*/\\1/p"; } |
{ read -r name; ip link set "$name" $2; }
"""
# The first process would wake the others, and end with them.
_STOP = "kill -STOP $1; nsenter --target $1 --pid kill -STOP -- -1"
_CONTINUE = """
exec 2>/dev/null
nsenter --target $1 --pid kill -CONT -- -1
kill -CONT $1
"""
_starting = threading.Lock()


class HangError(Exception):
    """Something did not happen in time."""


class World(NamedTuple):
    """One rank's word about a world that it is in."""

    epoch: int
    view: int
    rank: int
    size: int
    job: str
    pod: str  # its address
    members: str


class Kind(NamedTuple):
    """A kind of job: its pods, options of ``ronde run``, and program."""

    nodes: str
    options: Sequence[str]
    program: Sequence[str]
    memory_bytes: int | None = None


_PATIENCE = ("--join-timeout", f"{HANG_S:g}s")
_SHELL = ("--", "sh", "-c", STAY)
_LIGHT = f'exec python {_TESTS}/soak/pod_rank.py /job "$RONDE_EPOCH" "$RONDE_COOKIE"'
_TRAINING = str(_TESTS / "cluster/elastic_training_rank.py")
KINDS = {
    "fixed": Kind("3", _PATIENCE, _SHELL, MEMORY_BYTES),
    "printing": Kind("3", _PATIENCE, _SHELL),  # into a file
    "restarts": Kind("3", (*_PATIENCE, "--max-restarts", "90"), _SHELL, MEMORY_BYTES),
    "impatient": Kind("3", ("--join-timeout", "3s", "--max-restarts", "9"), _SHELL),
    "elastic": Kind("2:3", _PATIENCE, ("--", "sh", "-c", _LIGHT)),
    "growing": Kind("2:5", _PATIENCE, ("--", "sh", "-c", _LIGHT)),
    "timed": Kind("3", _PATIENCE, ("--", "sh", "-c", "date +%s.%N >/job/rank.$RANK")),
    "training": Kind("2:3", _PATIENCE, ("--", "python", _TRAINING, str(_FOLDER))),
}


class PodJob:
    """A job of some pods, which have numbers; of a number the newest pod counts.

    Attributes:
        kind: A name of ``KINDS``.
        chance: For all that is left to chance.
        expected: The codes that are right for each pod that must end.
        pods: The newest pod of each number.
    """

    def __init__(
        self, network: PodNetwork, kind: str, name: str, chance: random.Random
    ) -> None:
        self.kind, self.chance, self._name = kind, chance, name
        self.expected: dict[Pod, tuple[int, ...]] = {}
        self.pods: dict[int, Pod] = {}
        self.all: list[Pod] = []
        self.network = network
        self.folder = network.folder / f"job-{name}"
        self.folder.mkdir()
        self.folder.chmod(0o777)
        self.mark = f"{MARK}={os.urandom(8).hex()}"
        self.before: Sequence[str] = ()  # the command of each pod
        self._seen = (-1, -1)
        self.token = self.write_token("token", _TOKEN)

    def write_token(self, name: str, text: str) -> Path:
        path = self.folder.with_name(f"{self.folder.name}-{name}")
        path.write_text(text + "\n")
        os.chown(path, 1000, 1000)
        path.chmod(0o400)
        return path

    # Pods

    @property
    def own_kind(self) -> Kind:
        return KINDS[self.kind]

    @property
    def first_size(self) -> int:
        return int(self.own_kind.nodes[-1]) if self.kind != "growing" else 3

    def start(self, number: int) -> Pod:
        """Start a pod with this number; it counts from now on."""
        before = self.before
        name, value = self.mark.split("=")
        kind = self.own_kind
        environment = {name: value, "RONDE_NODES": kind.nodes}
        environment |= {"RONDE_NODE_INDEX": str(number)}
        environment |= {"RONDE_HEAD": f"train-0.{self._name}"}
        if self.kind == "printing" and number == 0:
            before = ("sh", "-c", 'exec "$@" >/job/out', "sh")
        spec = PodSpec(
            f"train-{number}",
            (*before, "ronde", "run", *kind.options, *kind.program),
            subdomain=self._name,
            environment=environment,
            memory_bytes=kind.memory_bytes,
            folders={str(_FOLDER): self.folder},
            files={"/etc/ronde/token": self.token},
            memory_folders={"/tmp": None, "/dev/shm": 1 << 26},  # noqa: S108
        )
        with _starting:  # numbers of all pods of a network
            pod = self.network.start(spec)
        self.pods[number] = pod
        self.all.append(pod)
        return pod

    def start_all(self) -> None:
        for number in range(self.first_size):
            self.start(number)

    def nodes(self, num: int = 1) -> list[int]:
        """Draw so many numbers of living pods that are not the head."""
        living = [n for n in sorted(self.pods) if n and self.is_living(self.pods[n])]
        return self.chance.sample(living, num)

    def is_living(self, pod: Pod) -> bool:
        return pod not in self.expected

    def kill(self, number: int) -> Pod:
        pod = self.pods[number]
        pod.kill()
        self.expected[pod] = (KILLED,)
        return pod

    def link(self, pod: Pod, state: str) -> None:
        """Set the far end of a pod's link ``up`` or ``down``."""
        self.run("sh", "-ec", _PEER, "sh", str(pod.init_pid), state)

    def freeze(self, pod: Pod) -> None:
        """Stop all processes of a pod."""
        self.run("sh", "-c", _STOP, "sh", str(pod.init_pid))

    def thaw(self, pod: Pod) -> None:
        """Let all processes of a pod go on."""
        self.run("sh", "-c", _CONTINUE, "sh", str(pod.init_pid))

    def run(self, *words: str) -> None:
        with self.network.run_inside(*words) as process:
            _, errors = process.communicate(timeout=HANG_S)
        if errors:
            raise AssertionError(f"{words} failed: {errors}")

    def end_with(self, *codes: int) -> None:
        """Expect all living pods to end with one of these codes."""
        for pod in self.all:
            if self.is_living(pod):
                self.expected[pod] = codes

    def finish(self) -> None:
        """Let all ranks end well."""
        (self.folder / "finish").touch()
        self.end_with(0)

    def act(self, rank: int, command: str) -> None:
        """Let a rank run a command of the shell in its newest start."""
        path = self.folder / f"act.{self._seen[0]}.{rank}"
        path.with_suffix(".new").write_text(command + "\n")
        path.with_suffix(".new").rename(path)

    # Waiting

    def until(self, is_so: Callable[[], object], awaited: str) -> None:
        ends_s = time.monotonic() + HANG_S
        while not is_so():
            if time.monotonic() > ends_s:
                raise HangError(f"waited {HANG_S:.0f} s for {awaited}")
            time.sleep(_POLL_S)

    def await_end(self, pod: Pod) -> None:
        self.until(lambda: pod.exit_code is not None, f"the end of {pod.id}")

    def await_line(self, pod: Pod, text: str) -> None:
        """Wait until a pod has written this; it must not end before."""
        self.until(
            lambda: text in pod.errors() or pod.exit_code is not None,
            f"{text!r} from {pod.id}",
        )
        if text not in pod.errors():
            raise AssertionError(f"{pod.id} ended without {text!r}: {pod.errors()}")

    def await_world(self, size: int) -> None:
        """Wait until ranks are in a new world of this size."""

        def is_there() -> bool:
            key, found = self.newest()
            if key > self._seen and self._is_whole(found, size):
                self._seen = key
                return True
            if any(
                pod.exit_code is not None for pod in self.all if self.is_living(pod)
            ):
                raise AssertionError(f"a pod ended before a world of {size}")
            return False

        self.until(is_there, f"a world of {size} after {self._seen}")

    def settle(self, size: int) -> None:
        """Wait until the newest world is whole, and has this size."""

        def is_there() -> bool:
            self._seen, found = self.newest()
            return self._is_whole(found, size)

        self.until(is_there, f"a world of {size}")

    def _is_whole(self, found: Sequence[World], size: int) -> bool:
        """Return True if a world has this size, in the pods that must live."""
        if self.kind != "training":
            living = sorted(pod.address for pod in self.all if self.is_living(pod))
            if sorted(world.pod for world in found) != living:
                return False
        return len(found) == size == found[0].size if found else False

    def newest(self) -> tuple[tuple[int, int], list[World]]:
        if self.kind == "training":
            return self._newest_of_training()
        worlds = self.worlds()
        key = max(((w.epoch, w.view) for w in worlds), default=(-1, -1))
        return key, [w for w in worlds if (w.epoch, w.view) == key]

    def worlds(self) -> list[World]:
        found: list[World] = []
        with suppress(FileNotFoundError):
            for line in (self.folder / "worlds").read_text().split("\n")[:-1]:
                *numbers, job, pod, members = line.split()
                found.append(World(*map(int, numbers), job, pod, members))
        return found

    def _newest_of_training(self) -> tuple[tuple[int, int], list[World]]:
        """Return the newest view, once each of its ranks has applied a step of it."""
        views: dict[int, set[int]] = defaultdict(set)
        for entry in ledger.read(self.folder.glob("ledger-*")):
            if entry.is_applied:
                views[entry.view].add(entry.member)
        view = max(views, default=-1)
        size = len(views[view])
        return (0, view), [World(0, view, m, size, "", "", "") for m in views[view]]

    # Judging

    def problems(self) -> list[str]:
        """Return all that is wrong, once all pods must have ended."""
        wrong = self.wrong_codes()
        wrong += self.wrong_worlds()
        if not wrong:
            wrong += [f"left: {each}" for each in self.leftovers()]
        if self.kind == "training" and not wrong:
            entries = ledger.read(self.folder.glob("ledger-*"))
            wrong += ledger.problems_of(entries, NUM_SAMPLES, 0, batch_size=BATCH)
        return wrong

    def wrong_codes(self) -> list[str]:
        """Wait until all pods have ended; return wrong codes."""
        for pod in self.all:
            self.await_end(pod)
        return [
            f"{pod.id} ended with {pod.exit_code}, not {self.expected.get(pod)}"
            for pod in self.all
            if pod.exit_code not in self.expected.get(pod, ())
        ]

    def wrong_worlds(self) -> list[str]:
        """Return contradictions between ranks."""
        worlds = self.worlds()
        wrong: list[str] = []
        jobs = {world.job for world in worlds}
        if len(jobs) > 1:
            wrong.append(f"second world: jobs {jobs}")
        by_key: dict[tuple[int, int], list[World]] = defaultdict(list)
        for world in worlds:
            by_key[world.epoch, world.view].append(world)
        for key, each in by_key.items():
            ranks = [world.rank for world in each]
            agreed = {(world.size, world.members) for world in each}
            if len(agreed) > 1 or len(set(ranks)) < len(ranks):
                wrong.append(f"second world {key}: {each}")
            elif max(ranks) >= each[0].size:
                wrong.append(f"ranks {ranks} of {each[0].size} in {key}")
        return wrong

    def leftovers(self) -> list[str]:
        """Return processes of the job that are there, though all pods have ended."""
        entry = self.mark.encode()
        found: list[str] = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if entry in path.read_bytes().split(b"\0"):
                    words = (path.parent / "cmdline").read_bytes().split(b"\0")
                    found.append(f"{path.parent.name} {words[:4]}")
        return found

    def describe(self) -> str:
        text = "\n".join(pod.describe() for pod in self.all)
        with suppress(FileNotFoundError):
            text += (self.folder / "worlds").read_text()
        return text

    def close(self) -> None:
        """Delete all pods."""
        for pod in self.all:
            pod.settle()
        ids = [pod.id for pod in self.all]
        self.network.podman("rm", "--force", "--time", "0", *ids)
        for pod in self.all:
            pod.is_deleted = True
        shutil.rmtree(self.folder)


RONDE_OF_ANOTHER_VERSION = """
import sys, ronde.launch.wire.tls as tls
from ronde.cli import main
tls.PROTOCOL += 1
sys.exit(main())
"""
SILENT = """
import socket, sys, time
place = sys.argv[1], 29400
held = [socket.create_connection(place) for _ in range(64)]
print("there", flush=True)
time.sleep(float(sys.argv[2]))
"""
PYTHON = sys.executable
