"""What each launcher's variables say of this process."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

from ronde.errors import WorldError
from ronde.world.rank_info import Launcher


@dataclass(frozen=True, slots=True)
class KnownPlace:
    """A place among the ranks, None where nobody said.

    Attributes:
        rank: As in ``World``.
        size: As in ``World``.
        local_rank: As in ``World``.
        local_size: As in ``World``.
        cross_rank: As in ``World``.
        cross_size: As in ``World``.
        node_rank: Index of this node among the nodes.
        num_nodes: Number of nodes.
    """

    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    cross_rank: int | None = None
    cross_size: int | None = None
    node_rank: int | None = None
    num_nodes: int | None = None

    def known(self) -> dict[str, int]:
        """Return what was said, by attribute."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


INDEX_AND_COUNT = (
    ("rank", "size"),
    ("local_rank", "local_size"),
    ("cross_rank", "cross_size"),
    ("node_rank", "num_nodes"),
)

_ORDER = (
    *((index, "below", count) for index, count in INDEX_AND_COUNT),
    *((count, "at most", "size") for _, count in INDEX_AND_COUNT[1:]),
    *((index, "below", "size") for index, _ in INDEX_AND_COUNT[1:]),
)
"""What must hold between any two numbers that are both known."""


@dataclass(frozen=True, slots=True)
class LauncherReading:
    """One launcher's view of this process.

    Attributes:
        launcher: Whose variables they are.
        place: What they say.
        said: The variables that were there, as ``NAME=value``.
        missing: The variables that this launcher always sets and that are not there.
        job_id: As in ``RankInfo``.
        hosts: As in ``RankInfo``.
    """

    launcher: Launcher
    place: KnownPlace
    said: tuple[str, ...]
    missing: tuple[str, ...] = ()
    job_id: str = ""
    hosts: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether it says at least who of how many this process is."""
        return not self.missing

    @property
    def is_stray(self) -> bool:
        """Whether it is left over: it gives no rank, and nothing implies other ranks.

        So is ``LOCAL_RANK=0`` alone. A launcher's own variables are never left over.
        """
        counts = {count for _, count in INDEX_AND_COUNT}
        is_of_one = all(
            value == (name in counts) for name, value in self.place.known().items()
        )
        is_plain = self.launcher is Launcher.PLAIN
        return is_plain and self.place.rank is None and is_of_one

    @property
    def is_above_slurm(self) -> bool:
        """Whether Slurm's variables are left over from starting this launcher."""
        by_hand = (Launcher.SLURM, Launcher.PLAIN)
        return self.is_complete and self.launcher not in by_hand

    def agrees_with(self, other: "LauncherReading") -> bool:
        """Say whether nothing that both say differs."""
        theirs = other.place.known()
        return all(
            theirs.get(name, value) == value
            for name, value in self.place.known().items()
        )

    def is_inside(self, other: "LauncherReading") -> bool:
        """Say whether ``other`` started one launcher a node and this is that one."""
        place = self.place
        node = (place.node_rank, place.num_nodes)
        if place.num_nodes is None:
            node = (place.cross_rank, place.cross_size)
        return None not in node and node == (other.place.rank, other.place.size)


def integer(environ: Mapping[str, str], name: str) -> int | None:
    """Read a variable that must be a count or an index; None where it is unset.

    Raises:
        WorldError: It is no integer of at least 0.
    """
    text = environ.get(name)
    if text is None:
        return None
    if re.fullmatch(r"[0-9]{1,9}", text.strip(), re.ASCII) is None:
        raise WorldError(
            f"{name} must be an integer of at least 0, got {text!r}. "
            f"Correct it, or unset it to run a world of one."
        )
    return int(text)


def check_place(place: KnownPlace, names: Mapping[str, str]) -> None:
    """Refuse numbers that cannot all be true.

    Args:
        place: The numbers.
        names: The variable that each attribute of ``place`` was read from.

    Raises:
        WorldError: An index is not below its count, or a count is above the size.
    """
    known = place.known()
    for _, count in INDEX_AND_COUNT:
        if known.get(count) == 0:
            raise WorldError(
                f"{names[count]} must be at least 1, got 0. "
                f"Set it anew, or unset it to run a world of one."
            )
    for low, rule, high in _ORDER:
        limit = known.get(high)
        if limit is not None and known.get(low, 0) >= limit + (rule == "at most"):
            _refuse(known, names, low, rule, high)
    if known.keys() >= {"size", "local_size", "num_nodes"}:
        _check_every_node_has_a_rank(known, names)


def _check_every_node_has_a_rank(
    known: Mapping[str, int], names: Mapping[str, str]
) -> None:
    local_size, num_nodes = known["local_size"], known["num_nodes"]
    if num_nodes == 1 and known["size"] != local_size:
        rule = f"equal where {names['num_nodes']}=1 to"
        _refuse(known, names, "local_size", rule, "size")
    least = local_size + num_nodes - 1
    if known["size"] < least:
        raise WorldError(
            f"{names['size']} must be at least {names['local_size']} + "
            f"{names['num_nodes']} - 1 = {local_size} + {num_nodes} - 1 = {least}, "
            f"got {known['size']}. Set the variables anew, all from one launcher."
        )


def _refuse(
    known: Mapping[str, int], names: Mapping[str, str], low: str, rule: str, high: str
) -> None:
    raise WorldError(
        f"{names[low]} must be {rule} {names[high]}, got {names[low]}={known[low]} "
        f"and {names[high]}={known[high]}. "
        f"Set the variables anew, all from one launcher."
    )


_PSEUDO_STEPS = range(4294967290, 4294967293)
"""Interactive, batch and extern: shells that Slurm counts as steps, not ``srun``."""

_MAX_NODES = 1 << 20


def read_slurm(environ: Mapping[str, str]) -> LauncherReading | None:
    """Read the step's variables; None outside a step.

    Raises:
        WorldError: They are not numbers, or not all of them can be true.
    """
    step = environ.get("SLURM_STEP_ID")
    if step is None or (step.isdecimal() and int(step) in _PSEUDO_STEPS):
        return None
    names = {
        "rank": "SLURM_PROCID",
        "size": _first(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        "local_rank": "SLURM_LOCALID",
        "node_rank": "SLURM_NODEID",
        "num_nodes": _first(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
    }
    tasks_name = _first(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    place = KnownPlace(**{key: integer(environ, name) for key, name in names.items()})
    check_place(place, names)
    if tasks_name in environ:
        tasks = parse_tasks_per_node(environ[tasks_name], tasks_name)
        place = _place_among(place, tasks, f"{tasks_name}={environ[tasks_name]}", names)
    said = ("SLURM_STEP_ID", *names.values(), tasks_name)
    return LauncherReading(
        launcher=Launcher.SLURM,
        place=place,
        said=tuple(f"{name}={environ[name]}" for name in said if name in environ),
        missing=tuple(
            names[key] for key in ("rank", "size") if names[key] not in environ
        ),
        job_id=f"{environ.get('SLURM_JOB_ID', '')}.{step}",
    )


def parse_tasks_per_node(text: str, name: str = "tasks per node") -> list[int]:
    """Expand Slurm's run-length form: ``4(x2),3`` is ``[4, 4, 3]``.

    Raises:
        WorldError: It is not of that form; the message calls it ``name``.
    """
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
    place: KnownPlace, tasks: list[int], said: str, names: Mapping[str, str]
) -> KnownPlace:
    """Complete ``place`` from the number of tasks on every node."""
    if place.size is not None and sum(tasks) != place.size:
        raise WorldError(
            f"{names['size']} must be the sum of the tasks of all nodes: {said} is "
            f"{' + '.join(map(str, tasks))} = {sum(tasks)}, got {place.size}. "
            f"Start the program with srun, which sets both."
        )
    node = 0 if len(tasks) == 1 else place.node_rank
    local_rank = place.local_rank
    if node is None or local_rank is None:
        return place
    if node >= len(tasks) or local_rank >= tasks[node]:
        raise WorldError(
            f"{names['local_rank']} must be below the tasks of node {node} in {said}, "
            f"got {local_rank}. Start the program with srun, which sets all three."
        )
    return KnownPlace(
        rank=place.rank,
        size=place.size,
        local_rank=local_rank,
        local_size=tasks[node],
        cross_rank=sum(count > local_rank for count in tasks[:node]),
        cross_size=sum(count > local_rank for count in tasks),
        node_rank=node,
        num_nodes=len(tasks),
    )


def _first(environ: Mapping[str, str], *names: str) -> str:
    """Return the first name that is set, or the last one."""
    return next((name for name in names if name in environ), names[-1])


@dataclass(frozen=True, slots=True)
class LauncherEnv:
    """How one launcher says a process's place.

    Attributes:
        launcher: Whose variables they are.
        names: The variable for each attribute of ``KnownPlace`` that it can say.
        required: The attributes that it always says.
        job_id: The variable that names the job, or empty.
        is_marked: ``job_id`` alone already says that this launcher is there.
    """

    launcher: Launcher
    names: Mapping[str, str]
    required: tuple[str, ...] = ("rank", "size")
    job_id: str = ""
    is_marked: bool = False

    def read(self, environ: Mapping[str, str]) -> LauncherReading | None:
        """Read this launcher's variables; None when there are none.

        Raises:
            WorldError: They are not numbers, or not all of them can be true.
        """
        marks = [self.job_id] if self.is_marked else []
        said = [name for name in (*marks, *self.names.values()) if name in environ]
        if not said:
            return None
        place = KnownPlace(
            **{k: integer(environ, name) for k, name in self.names.items()}
        )
        check_place(place, self.names)
        return LauncherReading(
            launcher=self.launcher,
            place=place,
            said=tuple(f"{name}={environ[name]}" for name in said),
            missing=self._missing(environ),
            job_id=environ.get(self.job_id, ""),
        )

    def _missing(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        wanted = [self.names[key] for key in self.required]
        # An index without its count, or the reverse, is half a pair.
        for index, count in (
            ("cross_rank", "cross_size"),
            ("node_rank", "num_nodes"),
        ):
            pair = [self.names[key] for key in (index, count) if key in self.names]
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
    Launcher.RONDE,
    _TORCH_NAMES,
    tuple(_TORCH_NAMES),
    job_id="RONDE_JOB_ID",
    is_marked=True,
)
TORCHRUN = LauncherEnv(
    Launcher.TORCHRUN,
    _TORCHRUN_NAMES,
    tuple(_TORCHRUN_NAMES),
    job_id="TORCHELASTIC_RUN_ID",
    is_marked=True,
)
PLAIN = LauncherEnv(Launcher.PLAIN, _TORCH_NAMES)
HOROVOD = LauncherEnv(
    Launcher.HOROVOD,
    {
        "rank": "HOROVOD_RANK",
        "size": "HOROVOD_SIZE",
        "local_rank": "HOROVOD_LOCAL_RANK",
        "local_size": "HOROVOD_LOCAL_SIZE",
        "cross_rank": "HOROVOD_CROSS_RANK",
        "cross_size": "HOROVOD_CROSS_SIZE",
    },
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
    # 2 ranks it is 0, 1, 0, 1. No variable tells the node.
    ("rank", "size", "local_rank", "local_size"),
    job_id="PMIX_NAMESPACE",
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

    Raises:
        WorldError: One of them is not of numbers, or contradicts itself.
    """
    family = _torch_family(environ)
    known = [HOROVOD, OPEN_MPI, PMI]
    # By hand counts least: of equal claims the launcher's knows more.
    known.insert(len(known) if family is PLAIN else 0, family)
    found = [each.read(environ) for each in known]
    readings = [reading for reading in found if reading is not None]
    # Left over from another launcher's start they may well be at odds: do not look.
    if not any(r.is_above_slurm and r.place.local_rank is not None for r in readings):
        found = [read_slurm(environ)]
        readings += [reading for reading in found if reading is not None]
    return readings


def _torch_family(environ: Mapping[str, str]) -> LauncherEnv:
    """Choose who wrote ``RANK`` and its kin, which three launchers share."""
    ours = environ.get(RONDE.job_id)
    theirs = environ.get(TORCHRUN.job_id)
    if ours is None:
        return PLAIN if theirs is None else TORCHRUN
    if theirs not in (None, ours):
        raise WorldError(
            f"RANK must be written by one launcher, got RONDE_JOB_ID={ours} and "
            f"TORCHELASTIC_RUN_ID={theirs}. Start with one of ronde run and torchrun, "
            f"or unset the other's variable."
        )
    return RONDE
