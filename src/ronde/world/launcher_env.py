"""Rank, size and rendezvous of this process, from the variables of its launcher."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from operator import eq, le, lt
from typing import NamedTuple

from ronde.errors import WorldError
from ronde.world.environment import own_or, read_algorithm, read_engine

_PSEUDO_STEPS = range(4294967290, 4294967293)
"""Numbers of Slurm's steps interactive, batch and extern, not started by ``srun``."""
_MAX_NODES = 1 << 20
_MEETING = ("MASTER_ADDR", "MASTER_PORT")
_COUNTS = {
    "rank": "size",
    "local_rank": "local_size",
    "cross_rank": "cross_size",
    "node_rank": "num_nodes",
}
"""The exclusive upper limit of each index, by name."""
Numbers = dict[str, int]  # the known indices and counts of a rank, by name


class Launcher(StrEnum):
    """The program that started this process as a rank."""

    RONDE = "ronde"
    TORCHRUN = "torchrun"
    HOROVOD = "horovod"
    OPEN_MPI = "openmpi"
    PMI = "pmi"
    SLURM = "slurm"
    PLAIN = "plain"  # RANK and WORLD_SIZE set by hand or by a Kubernetes operator
    NONE = "none"  # a world of one


_OF_MPI = (Launcher.OPEN_MPI, Launcher.PMI)


class World(NamedTuple):
    """Rank and size of one process: in the job, on its host, and across hosts."""

    rank: int
    size: int
    local_rank: int  # among the ranks of its host
    local_size: int
    cross_rank: int  # of its host among the hosts that have ``local_rank``
    cross_size: int

    @classmethod
    def from_hosts(cls, rank: int, hosts: Sequence[str]) -> "World":
        """Return a rank's world from the host of every rank; hosts may interleave."""
        return cls.of_slots([(host, slot) for slot, host in enumerate(hosts)])[rank]

    @classmethod
    def of_slots(cls, slots: Sequence[tuple[str, int]]) -> "list[World]":
        """Return each rank's world, from its host and slot; slots order local ranks."""
        by_host: dict[str, list[int]] = {}
        for host, slot in slots:
            by_host.setdefault(host, []).append(slot)
        numbers: dict[tuple[str, int], tuple[int, int]] = {}  # local and cross rank
        num_at = Counter[int]()  # hosts with a local rank
        for host, own in by_host.items():
            for local_rank, slot in enumerate(sorted(own)):
                numbers[host, slot] = local_rank, num_at[local_rank]
                num_at[local_rank] += 1
        worlds: list[World] = []
        for rank, (host, slot) in enumerate(slots):
            local, cross = numbers[host, slot]
            around = local, len(by_host[host]), cross, num_at[local]
            worlds.append(cls(rank, len(slots), *around))
        return worlds


class Meeting(NamedTuple):
    """The rendezvous address of a job, according to the launcher."""

    address: str  # of rank 0's node
    port: int
    is_hosted: bool = False  # the launcher listens there (torchrun's agent store)
    attempt: int = 0  # number of restarts of the ranks, which a hosted store outlives


class RankInfo(NamedTuple):
    """Rank, size and other facts of this process; the first six are as in ``World``.

    If the launcher does not name the node, ``cross_rank`` and ``cross_size`` are None
    on all ranks until the ranks have exchanged their hosts.
    """

    launcher: Launcher
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int | None = None
    cross_size: int | None = None
    meeting: Meeting | None = None
    job_id: str = ""  # the launcher's name for the job
    engine: str = "auto"
    algorithm: str = ""  # the engine's schedule, if it has several
    store: str = ""  # ronde's: the path of a socket here, or ``ADDRESS:PORT KEYFILE``
    stray: tuple[str, ...] = ()  # ignored variables, as ``NAME=value``

    @property
    def world(self) -> World | None:
        """The world, or None until the ranks have exchanged their hosts."""
        if self.cross_rank is None or self.cross_size is None:
            return None
        known = (self.rank, self.size, self.local_rank, self.local_size)
        return World(*known, self.cross_rank, self.cross_size)


class LauncherReading(NamedTuple):
    """One launcher's variables as read from the environment."""

    launcher: Launcher
    numbers: Numbers
    found: tuple[str, ...]  # its variables, as ``NAME=value``
    missing: tuple[str, ...]  # names of unset variables that it always sets
    job_id: str

    @property
    def is_stray(self) -> bool:
        """True if the variables imply no ranks, such as ``LOCAL_RANK=0`` alone."""
        alone = dict.fromkeys(_COUNTS, 0) | dict.fromkeys(_COUNTS.values(), 1)
        is_of_one = self.numbers.items() <= alone.items()
        is_plain = self.launcher is Launcher.PLAIN
        return is_plain and "rank" not in self.numbers and is_of_one

    @property
    def is_above_slurm(self) -> bool:
        """True if ``srun``, if used at all, started this launcher and not the ranks."""
        by_hand = (Launcher.SLURM, Launcher.PLAIN)
        return not self.missing and self.launcher not in by_hand

    def agrees_with(self, other: "LauncherReading") -> bool:
        return all(other.numbers.get(name, n) == n for name, n in self.numbers.items())

    def is_inside(self, other: "LauncherReading") -> bool:
        """Return True if ``other`` started this launcher, once on each node."""
        level = "node_rank" if "num_nodes" in self.numbers else "cross_rank"
        node = [self.numbers.get(name) for name in (level, _COUNTS[level])]
        outer = [other.numbers.get(name) for name in ("rank", "size")]
        return not other.missing and node == outer


class LauncherEnv(NamedTuple):
    """The names of one launcher's variables."""

    launcher: Launcher
    names: Mapping[str, str]  # by the keys of ``Numbers``
    required: Sequence[str] = ("rank", "size")  # the keys that it always sets
    job_id: str = ""  # the variable that names the job
    is_marked: bool = False  # ``job_id`` alone identifies the launcher

    def read(self, environ: Mapping[str, str]) -> LauncherReading:
        marks = [self.job_id] if self.is_marked else []
        found = [name for name in (*marks, *self.names.values()) if name in environ]
        values = {key: integer(environ, name) for key, name in self.names.items()}
        numbers = {key: value for key, value in values.items() if value is not None}
        _check(numbers, self.names)
        wanted = list(self.required)
        # An index needs its count, and the reverse.
        for pair in (("cross_rank", "cross_size"), ("node_rank", "num_nodes")):
            wanted += pair if {*pair} & numbers.keys() else ()
        return LauncherReading(
            self.launcher,
            numbers,
            tuple(f"{name}={environ[name]}" for name in found),
            tuple(self.names[k] for k in dict.fromkeys(wanted) if k not in numbers),
            environ.get(self.job_id, ""),
        )


def _check(numbers: Numbers, names: Mapping[str, str]) -> None:
    """Refuse numbers that contradict each other."""
    zeros = [count for count in _COUNTS.values() if numbers.get(count) == 0]
    problems = [f"{names[count]} must be at least 1, got 0" for count in zeros]
    rules = [(lt, "below", index, count) for index, count in _COUNTS.items()]
    for index, count in list(_COUNTS.items())[1:]:
        rules += ((le, "at most", count, "size"), (lt, "below", index, "size"))
    if numbers.get("num_nodes") == 1:
        equal = f"equal where {names['num_nodes']}=1 to"
        rules.append((eq, equal, "local_size", "size"))
    problems += [
        f"{names[low]} must be {rule} {names[high]}, got "
        f"{names[low]}={numbers[low]} and {names[high]}={numbers[high]}"
        for is_kept, rule, low, high in rules
        if {low, high} <= numbers.keys() and not is_kept(numbers[low], numbers[high])
    ]
    local_size, num_nodes = numbers.get("local_size", 1), numbers.get("num_nodes", 1)
    least = local_size + num_nodes - 1  # each node has a rank
    size = numbers.get("size")
    if size is not None and local_size > 1 < num_nodes and size < least:
        problems.append(
            f"{names['size']} must be at least {names['local_size']} + "
            f"{names['num_nodes']} - 1 = {local_size} + {num_nodes} - 1 = "
            f"{least}, got {size}"
        )
    if problems:
        cure = "Set all variables again, from one launcher."
        raise WorldError(f"{problems[0]}. {cure}")


# torchrun does not write CROSS_*: such variables are another launcher's.
_TORCHRUN_NAMES = {
    "rank": "RANK",
    "size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_size": "LOCAL_WORLD_SIZE",
    "node_rank": "GROUP_RANK",
    "num_nodes": "GROUP_WORLD_SIZE",
}
_TORCH_NAMES = _TORCHRUN_NAMES | {
    "cross_rank": "CROSS_RANK",
    "cross_size": "CROSS_SIZE",
}
# OMPI_COMM_WORLD_NODE_RANK is not the index of the node: on 2 nodes of 2 ranks it is
# 0, 1, 0, 1. No variable has that.
_OPEN_MPI_NAMES = {
    "rank": "OMPI_COMM_WORLD_RANK",
    "size": "OMPI_COMM_WORLD_SIZE",
    "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
    "local_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
_PMI_NAMES = {
    "rank": "PMI_RANK",
    "size": "PMI_SIZE",
    "local_rank": "MPI_LOCALRANKID",
    "local_size": "MPI_LOCALNRANKS",
}
_HOROVOD_NAMES = {
    "rank": "HOROVOD_RANK",
    "size": "HOROVOD_SIZE",
    "local_rank": "HOROVOD_LOCAL_RANK",
    "local_size": "HOROVOD_LOCAL_SIZE",
    "cross_rank": "HOROVOD_CROSS_RANK",
    "cross_size": "HOROVOD_CROSS_SIZE",
}

RONDE = LauncherEnv(
    Launcher.RONDE,
    _TORCH_NAMES,
    required=tuple(_TORCH_NAMES),
    job_id="RONDE_JOB_ID",
    is_marked=True,
)
TORCHRUN = LauncherEnv(
    Launcher.TORCHRUN,
    _TORCHRUN_NAMES,
    required=tuple(_TORCHRUN_NAMES),
    job_id="TORCHELASTIC_RUN_ID",
    is_marked=True,
)
OPEN_MPI = LauncherEnv(
    Launcher.OPEN_MPI,
    _OPEN_MPI_NAMES,
    required=tuple(_OPEN_MPI_NAMES),
    job_id="PMIX_NAMESPACE",
)
PMI = LauncherEnv(Launcher.PMI, _PMI_NAMES)
HOROVOD = LauncherEnv(Launcher.HOROVOD, _HOROVOD_NAMES)
PLAIN = LauncherEnv(Launcher.PLAIN, _TORCH_NAMES)
_SLURM = {
    "rank": ("SLURM_PROCID",),
    "size": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    "local_rank": ("SLURM_LOCALID",),
    "node_rank": ("SLURM_NODEID",),
    "num_nodes": ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
    "tasks": ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
}
"""Each fact of Slurm: the variable of the step, then that of the job."""
RANK_VARIABLES = frozenset(
    {"SLURM_STEP_ID", RONDE.job_id, TORCHRUN.job_id}.union(
        *(each.names.values() for each in (PLAIN, HOROVOD, OPEN_MPI, PMI))
    )
)
"""A process without any of these is no rank of any launcher."""


def read_launcher_env(environ: Mapping[str, str]) -> list[LauncherReading]:
    """Return the readings of all launchers, by precedence.

    MPI comes before Slurm: ``mpirun`` inside a Slurm job starts its daemons with
    ``srun``, and the ranks inherit the daemon's ``SLURM_PROCID``.
    """
    # Three launchers set RANK.
    if is_of_ronde(environ):
        known = [RONDE, HOROVOD, OPEN_MPI, PMI]
    elif RONDE.job_id in environ:
        known = [TORCHRUN, OPEN_MPI, PMI]  # HOROVOD_RANK is still ronde's
    elif TORCHRUN.job_id in environ:
        known = [TORCHRUN, HOROVOD, OPEN_MPI, PMI]
    else:
        # The specific ones first: they have more variables.
        known = [HOROVOD, OPEN_MPI, PMI, PLAIN]
    readings = [reading for each in known if (reading := each.read(environ)).found]
    of_mpi = [reading for reading in readings if reading.launcher in _OF_MPI]
    if of_mpi and is_of_ronde(environ):
        # ronde run gives its ranks no variables of MPI: a rank has started mpirun.
        return of_mpi
    # Below another launcher Slurm's variables may contradict: do not read them.
    is_above = [r for r in readings if r.is_above_slurm and "local_rank" in r.numbers]
    return readings if is_above else readings + _read_slurm(environ)


def is_of_ronde(environ: Mapping[str, str]) -> bool:
    """Return True if ``ronde run`` has set RANK, False if torchrun inside of it has."""
    # ronde run sets torchrun's variables as well, with the name of its own job.
    job_id = environ.get(RONDE.job_id)
    return job_id is not None and environ.get(TORCHRUN.job_id, job_id) == job_id


def _read_slurm(environ: Mapping[str, str]) -> list[LauncherReading]:
    """Read the variables of a task that ``srun`` has started.

    Processes outside of a step (``salloc``, a batch script) are not ranks.
    """
    step = environ.get("SLURM_STEP_ID")
    if step is None or (step.isdecimal() and int(step) in _PSEUDO_STEPS):
        return []
    names = {
        key: next(filter(environ.__contains__, either), either[-1])
        for key, either in _SLURM.items()
    }
    name = names.pop("tasks")
    env = LauncherEnv(Launcher.SLURM, names, job_id="SLURM_STEP_ID", is_marked=True)
    reading = env.read(environ)
    reading = reading._replace(job_id=f"{environ.get('SLURM_JOB_ID', '')}.{step}")
    if name in environ:
        shown = f"{name}={environ[name]}"
        tasks = parse_tasks_per_node(environ[name], name)
        numbers = reading.numbers | _numbers_among(reading.numbers, tasks, shown, names)
        reading = reading._replace(numbers=numbers, found=(*reading.found, shown))
    return [reading]


def parse_tasks_per_node(text: str, name: str = "tasks per node") -> list[int]:
    """Expand Slurm's run-length encoding: ``4(x2),3`` is ``[4, 4, 3]``."""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,7})\))?", part.strip())
        repeat = int(match[2] or 1) if match else 0
        if match is None or not 0 < repeat <= _MAX_NODES - len(tasks):
            raise WorldError(
                f"{name} must be counts such as 4(x2),3, got {text!r}. "
                f"Start the program with srun, which sets it."
            )
        tasks += [int(match[1])] * repeat
    return tasks


def _numbers_among(
    numbers: Numbers, tasks: list[int], shown: str, names: Mapping[str, str]
) -> Numbers:
    """Derive local and cross numbers from the number of tasks on each node."""
    if numbers.get("size", sum(tasks)) != sum(tasks):
        raise WorldError(
            f"{names['size']} must be the sum of the tasks of all nodes: {shown} is "
            f"{' + '.join(map(str, tasks))} = {sum(tasks)}, got {numbers['size']}. "
            f"Start the program with srun, which sets both."
        )
    node = 0 if len(tasks) == 1 else numbers.get("node_rank")
    local_rank = numbers.get("local_rank")
    if node is None or local_rank is None:
        return {}
    if node >= len(tasks) or local_rank >= tasks[node]:
        raise WorldError(
            f"{names['local_rank']} must be below the number of tasks on node "
            f"{node} in {shown}, got {local_rank}. Start the program with srun, "
            "which sets all three."
        )
    is_peer = [count > local_rank for count in tasks]
    return {
        "local_size": tasks[node],
        "cross_rank": sum(is_peer[:node]),
        "cross_size": sum(is_peer),
        "node_rank": node,
        "num_nodes": len(tasks),
    }


def integer(environ: Mapping[str, str], name: str) -> int | None:
    """Return the value of a variable, an integer of at least 0; None if unset."""
    text = environ.get(name)
    if text is not None and re.fullmatch("[0-9]{1,9}", text.strip()) is None:
        raise WorldError(
            f"{name} must be an integer of at least 0, got {text!r}. "
            "Correct it, or start the program with a launcher, which sets it."
        )
    return None if text is None else int(text)


def read_rank_info(environ: Mapping[str, str] | None = None) -> RankInfo:
    """Read rank and size of this process from the launcher's variables.

    Without any variable the process is a world of one. Stray variables, such as
    ``LOCAL_RANK=0`` alone, are ignored and listed in the result.

    If no variable describes this host, ``local_rank`` is 0, and ``local_size`` the
    smallest that fits: exchange hosts (``World.from_hosts``) before you rely on them.

    Raises:
        WorldError: The variables are incomplete, are not numbers, contradict each
            other, or name an unknown engine.
    """
    environ = own_or(environ)
    found = read_launcher_env(environ)
    readings = [reading for reading in found if not reading.is_stray]
    meeting = [f"{name}={environ[name]}" for name in _MEETING if name in environ]
    if not readings and meeting:
        # A world of one needs no address: the launcher's variables are incomplete.
        readings = found
    stray = [text for each in found if each not in readings for text in each.found]
    if readings:
        rank_info = _rank_info(environ, _resolve_conflicts(readings))
    else:
        rank_info = RankInfo(Launcher.NONE, 0, 1, 0, 1, 0, 1)
        stray += meeting if len(meeting) < len(_MEETING) else []
    engine, algorithm = read_engine(environ), read_algorithm(environ)
    return rank_info._replace(stray=tuple(stray), engine=engine, algorithm=algorithm)


def _resolve_conflicts(readings: list[LauncherReading]) -> LauncherReading:
    """Return the first reading that agrees with all others or is inside of them.

    Slurm's variables under another launcher describe that launcher's daemon, not the
    rank. If a launcher starts another one on each node (``mpirun`` and torchrun), the
    world is the inner one's. Any other difference is an error.
    """
    slurm = next((r for r in readings if r.launcher is Launcher.SLURM), None)
    if any(reading.is_above_slurm for reading in readings):
        readings = [r for r in readings if r is not slurm]
    for reading in readings:
        if reading.missing or not all(
            other.agrees_with(reading) or reading.is_inside(other) for other in readings
        ):
            continue
        is_local = {"local_rank", "local_size"} & reading.numbers.keys()
        if is_local or not slurm or slurm.missing or not slurm.agrees_with(reading):
            return reading
        # Only Slurm has the local numbers: ``srun --mpi=pmi2``, or a script that sets
        # RANK=$SLURM_PROCID.
        return reading._replace(numbers=slurm.numbers)
    if missing := next((" and ".join(r.missing) for r in readings if r.missing), ""):
        everything = ", ".join(text for each in readings for text in each.found)
        raise WorldError(
            f"rank and size are incomplete: {everything} without {missing}. "
            f"Set {missing}, start the program with a launcher, or unset all of them "
            "to run a single process."
        )
    views = [readings[0], *(r for r in readings if not r.agrees_with(readings[0]))]
    shown = " but ".join(
        f"{r.launcher.value} has {r.numbers['rank']} of {r.numbers['size']} "
        f"({', '.join(r.found)})"
        for r in views
    )
    unset = (" ".join(text.partition("=")[0] for text in r.found) for r in views)
    raise WorldError(
        f"the variables of several launchers contradict each other: {shown}. "
        f"Start the program with one launcher, or unset {' or '.join(unset)}."
    )


def _rank_info(environ: Mapping[str, str], reading: LauncherReading) -> RankInfo:
    """Fill in missing numbers; ``cross_rank`` must be known on all ranks or on none."""
    numbers, is_ours = reading.numbers, reading.launcher is Launcher.RONDE
    rank, size = numbers["rank"], numbers["size"]
    local_rank, local_size = numbers.get("local_rank"), numbers.get("local_size")
    cross = (numbers.get("cross_rank"), numbers.get("cross_size"))
    if size in (local_size, 1):
        local_rank = rank if local_rank is None else local_rank
        local_size, cross = size, (0, 1)
    elif local_rank is None or local_size is None:
        local_rank = local_rank or 0
        local_size, cross = local_size or local_rank + 1, (None, None)
    return RankInfo(
        reading.launcher,
        rank,
        size,
        local_rank,
        local_size,
        *cross,
        meeting=_read_meeting(environ, reading.launcher),
        store=environ.get("RONDE_STORE", "") if is_ours else "",
        job_id=reading.job_id,
    )


def _read_meeting(environ: Mapping[str, str], launcher: Launcher) -> Meeting | None:
    address, port_text = (environ.get(name) for name in _MEETING)
    is_inner = is_of_ronde(environ) and launcher in _OF_MPI
    if is_inner or (address is None and port_text is None):
        return None  # ronde run's own address is not for the ranks of mpirun
    if not address or not port_text:
        here, gone = _MEETING[:: 1 if address else -1]
        raise WorldError(
            f"MASTER_ADDR and MASTER_PORT must be set together, got "
            f"{here}={environ.get(here, '')} and no {gone}. "
            f"Set {gone}, or unset {here}."
        )
    port = integer(environ, "MASTER_PORT") or 0
    if not 0 < port < 65536:
        raise WorldError(
            f"MASTER_PORT must be in 1..65535, got {port_text}. "
            f"Give a port that is free on {address}."
        )
    is_torchrun, attempt = launcher is Launcher.TORCHRUN, 0
    if is_torchrun or launcher is Launcher.RONDE:
        name = "TORCHELASTIC_RESTART_COUNT" if is_torchrun else "RONDE_EPOCH"
        attempt = integer(environ, name) or 0
    is_hosted = is_torchrun and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Meeting(address, port, is_hosted, attempt)
