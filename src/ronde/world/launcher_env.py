"""Each launcher's variables: which one says what, one table row a launcher."""

from collections.abc import Mapping
from dataclasses import dataclass

from ronde.errors import WorldError
from ronde.world.reading import Place, Reading, check_place, integer
from ronde.world.slurm import read_slurm
from ronde.world.value import Launcher


@dataclass(frozen=True, slots=True)
class LauncherEnv:
    """How one launcher says a process's place.

    Attributes:
        launcher: Whose variables they are.
        names: The variable for each attribute of ``Place`` that it can say.
        required: The attributes that it always says.
        job_id: The variable that names the job, or empty.
        is_marked: ``job_id`` alone already says that this launcher is there.
    """

    launcher: Launcher
    names: Mapping[str, str]
    required: tuple[str, ...] = ("rank", "size")
    job_id: str = ""
    is_marked: bool = False

    def read(self, environ: Mapping[str, str]) -> Reading | None:
        """Read this launcher's variables; None when there are none.

        Raises:
            WorldError: They are not numbers, or not all of them can be true.
        """
        marks = [self.job_id] if self.is_marked else []
        said = [name for name in (*marks, *self.names.values()) if name in environ]
        if not said:
            return None
        place = Place(**{k: integer(environ, name) for k, name in self.names.items()})
        check_place(place, self.names)
        return Reading(
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


def read_launcher_env(environ: Mapping[str, str]) -> list[Reading]:
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
