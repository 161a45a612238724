"""What each launcher's variables report of this process."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ronde.errors import WorldError
from ronde.world.rank_info import Launcher

_PSEUDO_STEPS = range(4294967290, 4294967293)
"""Interactive, batch and extern: shells that Slurm counts as steps, not ``srun``."""
_MAX_NODES = 1 << 20
_COUNTS = {
    "rank": "size",
    "local_rank": "local_size",
    "cross_rank": "cross_size",
    "node_rank": "num_nodes",
}


@dataclass(frozen=True, slots=True)
class KnownPlace:
    """A place among the ranks, with None for what is unknown; as in ``World``."""

    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    cross_rank: int | None = None
    cross_size: int | None = None
    node_rank: int | None = None  # this node among the nodes
    num_nodes: int | None = None

    def known(self) -> dict[str, int]:
        """Return what is known, by attribute."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in values.items() if value is not None}

    def check(self, names: Mapping[str, str]) -> None:
        """Refuse numbers that cannot all be true.

        ``names`` has the variable that each attribute was read from.
        """
        known = self.known()
        for count in _COUNTS.values():
            if known.get(count) == 0:
                raise WorldError(
                    f"{names[count]} must be at least 1, got 0. "
                    f"Set it anew, or unset it to run a world of one."
                )
        others = list(_COUNTS.items())[1:]
        rules = [
            *((index, "below", count) for index, count in _COUNTS.items()),
            *((count, "at most", "size") for _, count in others),
            *((index, "below", "size") for index, _ in others),
        ]
        if known.get("num_nodes") == 1:
            equal = f"equal where {names['num_nodes']}=1 to"
            rules.append(("local_size", equal, "size"))
        for low, rule, high in rules:
            if not {low, high} <= known.keys():
                continue
            if known[low] == known[high]:
                is_kept = rule != "below"
            else:
                is_kept = known[low] < known[high] and not rule.startswith("equal")
            if is_kept:
                continue
            raise WorldError(
                f"{names[low]} must be {rule} {names[high]}, got "
                f"{names[low]}={known[low]} and {names[high]}={known[high]}. "
                f"Set the variables anew, all from one launcher."
            )
        if known.keys() >= {"size", "local_size", "num_nodes"}:
            local_size, num_nodes = known["local_size"], known["num_nodes"]
            least = local_size + num_nodes - 1  # every node has a rank
            if known["size"] < least:
                raise WorldError(
                    f"{names['size']} must be at least {names['local_size']} + "
                    f"{names['num_nodes']} - 1 = {local_size} + {num_nodes} - 1 = "
                    f"{least}, got {known['size']}. Set the variables anew, all from "
                    "one launcher."
                )


@dataclass(frozen=True, slots=True)
class LauncherReading:
    """One launcher's view of this process."""

    launcher: Launcher
    place: KnownPlace
    found: tuple[str, ...]  # its variables, as ``NAME=value``
    missing: tuple[str, ...] = ()  # variables that it always sets and that are not set
    job_id: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether it gives at least this process's rank and the size."""
        return not self.missing

    @property
    def is_stray(self) -> bool:
        """Whether it is left over: it gives no rank, and nothing implies other ranks.

        So is ``LOCAL_RANK=0`` alone. A launcher's own variables are never left over.
        """
        known = self.place.known()
        is_of_one = all(known[name] == (name not in _COUNTS) for name in known)
        return self.launcher is Launcher.PLAIN and "rank" not in known and is_of_one

    @property
    def is_above_slurm(self) -> bool:
        """Whether Slurm's variables are left over from starting this launcher."""
        by_hand = (Launcher.SLURM, Launcher.PLAIN)
        return self.is_complete and self.launcher not in by_hand

    def agrees_with(self, other: "LauncherReading") -> bool:
        """Say whether nothing that both know differs."""
        ours, theirs = self.place.known(), other.place.known()
        return all(theirs.get(name, value) == value for name, value in ours.items())

    def is_inside(self, other: "LauncherReading") -> bool:
        """Say whether ``other`` started one launcher a node and this is that one."""
        place = self.place
        node = (place.node_rank, place.num_nodes)
        if place.num_nodes is None:
            node = (place.cross_rank, place.cross_size)
        return None not in node and node == (other.place.rank, other.place.size)


@dataclass(frozen=True, slots=True)
class LauncherEnv:
    """One launcher's variables."""

    launcher: Launcher
    names: Mapping[str, str]  # the variable for each attribute of ``KnownPlace``
    required: tuple[str, ...] = ("rank", "size")  # the attributes that it always sets
    job_id: str = ""  # the variable that names the job
    is_marked: bool = False  # ``job_id`` alone already shows the launcher

    def read(self, environ: Mapping[str, str]) -> LauncherReading | None:
        """Read this launcher's variables; None when there are none."""
        marks = [self.job_id] if self.is_marked else []
        found = [name for name in (*marks, *self.names.values()) if name in environ]
        if not found:
            return None
        place = KnownPlace(**{k: integer(environ, n) for k, n in self.names.items()})
        place.check(self.names)
        return LauncherReading(
            launcher=self.launcher,
            place=place,
            found=tuple(f"{name}={environ[name]}" for name in found),
            missing=self._missing(environ),
            job_id=environ.get(self.job_id, ""),
        )

    def _missing(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        wanted = [self.names[key] for key in self.required]
        # An index without its count, or the reverse, is half a pair.
        for index in ("cross_rank", "node_rank"):
            keys = (index, _COUNTS[index])
            pair = [self.names[key] for key in keys if key in self.names]
            if any(name in environ for name in pair):
                wanted += pair
        return tuple(dict.fromkeys(name for name in wanted if name not in environ))


_TORCH_NAMES = {
    "rank": "RANK",
    "size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_size": "LOCAL_WORLD_SIZE",
    "cross_rank": "CROSS_RANK",
    "cross_size": "CROSS_SIZE",
    "node_rank": "GROUP_RANK",
    "num_nodes": "GROUP_WORLD_SIZE",
}
# torchrun does not write CROSS_*: what stands there is somebody else's.
_TORCHRUN_NAMES = {k: v for k, v in _TORCH_NAMES.items() if not k.startswith("cross")}

RONDE = LauncherEnv(
    Launcher.RONDE, _TORCH_NAMES, tuple(_TORCH_NAMES), "RONDE_JOB_ID", is_marked=True
)
TORCHRUN = LauncherEnv(
    Launcher.TORCHRUN,
    _TORCHRUN_NAMES,
    tuple(_TORCHRUN_NAMES),
    "TORCHELASTIC_RUN_ID",
    is_marked=True,
)
PLAIN = LauncherEnv(Launcher.PLAIN, _TORCH_NAMES)
HOROVOD = LauncherEnv(
    Launcher.HOROVOD,
    {name: f"HOROVOD_{name.upper()}" for name in list(KnownPlace.__annotations__)[:6]},
)
OPEN_MPI = LauncherEnv(
    Launcher.OPEN_MPI,
    {
        "rank": "OMPI_COMM_WORLD_RANK",
        "size": "OMPI_COMM_WORLD_SIZE",
        "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
        "local_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    # OMPI_COMM_WORLD_NODE_RANK is no node's index, whatever its name: on 2 nodes of
    # 2 ranks it is 0, 1, 0, 1. No variable has the node.
    ("rank", "size", "local_rank", "local_size"),
    "PMIX_NAMESPACE",
)
PMI = LauncherEnv(
    Launcher.PMI,
    {
        "rank": "PMI_RANK",
        "size": "PMI_SIZE",
        "local_rank": "MPI_LOCALRANKID",
        "local_size": "MPI_LOCALNRANKS",
    },
)


def read_launcher_env(environ: Mapping[str, str]) -> list[LauncherReading]:
    """Read the variables of every launcher, the one that counts most first.

    MPI comes before Slurm: ``mpirun`` inside a Slurm job starts its daemons with
    ``srun``, and the ranks inherit the daemon's ``SLURM_PROCID``.
    """
    # RANK and its kin are shared by three launchers.
    ours, theirs = environ.get(RONDE.job_id), environ.get(TORCHRUN.job_id)
    if ours is not None and theirs not in (None, ours):
        raise WorldError(
            f"RANK must be written by one launcher, got RONDE_JOB_ID={ours} and "
            f"TORCHELASTIC_RUN_ID={theirs}. Start with one of ronde run and torchrun, "
            f"or unset the other's variable."
        )
    known = [HOROVOD, OPEN_MPI, PMI]
    if ours is None and theirs is None:
        known.append(PLAIN)  # of equal values the launcher's own know more
    else:
        known.insert(0, RONDE if ours is not None else TORCHRUN)
    found = [each.read(environ) for each in known]
    readings = [reading for reading in found if reading is not None]
    # Left over from another launcher's start they may well be at odds: do not look.
    if not any(r.is_above_slurm and r.place.local_rank is not None for r in readings):
        slurm = read_slurm(environ)
        readings += [slurm] if slurm else []
    return readings


def read_slurm(environ: Mapping[str, str]) -> LauncherReading | None:
    """Read what ``srun`` gives the tasks of a step; None outside a step.

    In an allocation without a step (``salloc``, a batch script) nobody is a rank yet,
    and Slurm's numbers describe what could be started.
    """
    step = environ.get("SLURM_STEP_ID")
    if step is None or (step.isdecimal() and int(step) in _PSEUDO_STEPS):
        return None

    def first(*names: str) -> str:
        return next((name for name in names if name in environ), names[-1])

    names = {
        "rank": "SLURM_PROCID",
        "size": first("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        "local_rank": "SLURM_LOCALID",
        "node_rank": "SLURM_NODEID",
        "num_nodes": first("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
    }
    tasks_name = first("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    place = KnownPlace(**{key: integer(environ, name) for key, name in names.items()})
    place.check(names)
    if tasks_name in environ:
        tasks = parse_tasks_per_node(environ[tasks_name], tasks_name)
        shown = f"{tasks_name}={environ[tasks_name]}"
        place = _place_among(place, tasks, shown, names)
    found = ("SLURM_STEP_ID", *names.values(), tasks_name)
    wanted = (names["rank"], names["size"])
    return LauncherReading(
        launcher=Launcher.SLURM,
        place=place,
        found=tuple(f"{name}={environ[name]}" for name in found if name in environ),
        missing=tuple(name for name in wanted if name not in environ),
        job_id=f"{environ.get('SLURM_JOB_ID', '')}.{step}",
    )


def parse_tasks_per_node(text: str, name: str = "tasks per node") -> list[int]:
    """Expand Slurm's run-length form: ``4(x2),3`` is ``[4, 4, 3]``."""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(
            r"\s*([0-9]{1,9})(?:\(x([0-9]{1,7})\))?\s*", part, re.ASCII
        )
        repeat = int(match[2] or 1) if match else 0
        if match is None or not 0 < repeat <= _MAX_NODES - len(tasks):
            raise WorldError(
                f"{name} must be counts such as 4(x2),3, got {text!r}. "
                f"Start the program with srun, which sets it."
            )
        tasks += [int(match[1])] * repeat
    return tasks


def _place_among(
    place: KnownPlace, tasks: list[int], shown: str, names: Mapping[str, str]
) -> KnownPlace:
    """Complete ``place`` from the number of tasks on every node."""
    if place.size is not None and sum(tasks) != place.size:
        raise WorldError(
            f"{names['size']} must be the sum of the tasks of all nodes: {shown} is "
            f"{' + '.join(map(str, tasks))} = {sum(tasks)}, got {place.size}. "
            f"Start the program with srun, which sets both."
        )
    node = 0 if len(tasks) == 1 else place.node_rank
    local_rank = place.local_rank
    if node is None or local_rank is None:
        return place
    if node >= len(tasks) or local_rank >= tasks[node]:
        raise WorldError(
            f"{names['local_rank']} must be below the tasks of node {node} in {shown}, "
            f"got {local_rank}. Start the program with srun, which sets all three."
        )
    return replace(
        place,
        local_size=tasks[node],
        cross_rank=sum(count > local_rank for count in tasks[:node]),
        cross_size=sum(count > local_rank for count in tasks),
        node_rank=node,
        num_nodes=len(tasks),
    )


def integer(environ: Mapping[str, str], name: str) -> int | None:
    """Read a variable that must be a count or an index; None where it is unset."""
    text = environ.get(name)
    if text is None:
        return None
    if re.fullmatch(r"[0-9]{1,9}", text.strip(), re.ASCII) is None:
        raise WorldError(
            f"{name} must be an integer of at least 0, got {text!r}. "
            f"Correct it, or unset it to run a world of one."
        )
    return int(text)
