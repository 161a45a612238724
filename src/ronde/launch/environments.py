"""The environment of each rank: inherited, forwarded, removed and new variables.

Only this module of ``launch`` reads ``os.environ``.
"""

import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ronde.errors import UsageError
from ronde.memory import MallocThresholds, malloc_thresholds
from ronde.topology.machine import read_gpus
from ronde.world.environment import read_malloc_tuning

if TYPE_CHECKING:
    from ronde.world import World

_ALLOWED_NAMES = frozenset(
    {"PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "HF_HOME", "LANG", "TZ"}
)
_ALLOWED_PREFIXES = (
    *("PYTHON", "CONDA_", "TORCH", "LC_"),
    *("NCCL_", "GLOO_", "UCX_", "CUDA_", "OMP_", "MKL_", "KMP_"),
    *("HOROVOD_", "RONDE_"),
)
# Hardly ever valid on another host.
_LOCAL_NAMES = frozenset({"CUDA_VISIBLE_DEVICES", "SSH_AUTH_SOCK", "LD_PRELOAD"})
_SECRET_PARTS = (
    *("TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "KEY"),
    *("COOKIE", "AUTHORIZATION", "BEARER", "WEBHOOK"),
)
_SECRET_ENDS = ("AUTH", "PASS", "PWD", "CREDS", "JWT", "DSN")
_NO_SECRETS = frozenset({"BYPASS", "COMPASS"})
_DIRECTORIES = frozenset({"PWD", "OLDPWD"})
_SECRET_VALUE = re.compile(
    # An address with a password or token, a setting, a header, a key.
    r"[a-z][a-z0-9+.-]*://[^/\s]*:[^/\s]*@|https?://[^/\s]+@"
    r"|(pass(word|wd)?|pwd|secret|token|key|sig|signature)=[^\s&;]"
    r"|\b(bearer|basic)\s+[a-z0-9]|-----BEGIN [A-Z ]*PRIVATE KEY",
    re.IGNORECASE,
)
# Set by other launchers: if passed on, all ranks would get the same rank.
_RANK_PREFIXES = (
    *("TORCHELASTIC_", "TORCH_ELASTIC_", "PET_", "OMPI_", "PMIX_", "PRTE_"),
    *("LWS_", "VC_TASK_", "SKYPILOT_N"),
    *("PMI_", "HYDI_", "MPI_LOCAL", "MV2_COMM_WORLD_"),
    *("HOROVOD_GLOO_RENDEZVOUS_", "SLURM_STEP", "SLURM_SRUN_COMM_"),
    *("SLURM_CPU_BIND",),
)
_RANK_NAMES = frozenset(
    {
        *("RONDE_JOB_ID", "RONDE_EPOCH", "RONDE_COOKIE", "RONDE_HOST"),
        *("RONDE_NODE_RANK", "RONDE_CHANNEL", "RONDE_STACKS", "RONDE_STORE"),
        *("RONDE_RANK", "RONDE_JOINS"),
        *("RONDE_NODES", "RONDE_NODE_INDEX", "RONDE_HEAD", "JOB_COMPLETION_INDEX"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK"),
        *("ROLE_WORLD_SIZE", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
        *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE"),
        *("SLURM_TASKS_PER_NODE", "SLURM_TASK_PID", "SLURM_GTIDS"),
    }
)
# Set by the login on a host. A key agent's socket stays: it works there.
_LOGIN_PREFIXES = ("SUDO_",)
_LOGIN_NAMES = frozenset(
    {
        *("SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "SSH_ORIGINAL_COMMAND"),
        *("OLDPWD", "MAIL", "_"),
    }
)
ALIAS_DIRECTORY = Path(__file__).parents[1] / "horovod" / "alias"
_FORCED = "RONDE_HOROVOD_ALIAS"


def own_environment() -> dict[str, str]:
    return dict(os.environ)  # noqa: TID251


class JobFacts(NamedTuple):
    """Facts about a job that all its ranks receive as environment variables."""

    job_id: str
    epoch: int  # generation of the world
    job_marker: str  # identifies processes of the job
    max_restarts: int = 0


class NodeFacts(NamedTuple):
    """Facts about a node that its ranks receive as environment variables."""

    host: str
    node_rank: int
    num_nodes: int


def default_environment(
    num_threads: int, *, is_elastic: bool = False
) -> dict[str, str]:
    # After an error NCCL's watchdog ends the process with 1; with 2 it only aborts the
    # communicator. Source: ``ErrorHandlingMode`` in torch's ProcessGroupNCCL.hpp.
    handling = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2" if is_elastic else "1"}
    if is_elastic:
        handling["TORCH_NCCL_RETHROW_CUDA_ERRORS"] = "0"
    return {"OMP_NUM_THREADS": str(num_threads), "PYTHONUNBUFFERED": "1", **handling}


def malloc_environment(environ: Mapping[str, str], num_ranks: int) -> dict[str, str]:
    if not read_malloc_tuning(environ) or read_gpus("", environ):
        return {}
    thresholds = _common_thresholds(num_ranks)
    return thresholds.environment() if thresholds else {}


@functools.cache
def _common_thresholds(num_ranks: int) -> MallocThresholds | None:
    # Cached, so that it does not depend on the memory of earlier ranks.
    return malloc_thresholds(num_ranks)


def rank_environment(world: "World", job: JobFacts, node: NodeFacts) -> dict[str, str]:
    numbers = {name.upper(): str(number) for name, number in world._asdict().items()}
    size = numbers.pop("SIZE")
    return {
        **numbers,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": numbers["LOCAL_SIZE"],
        "GROUP_RANK": str(node.node_rank),
        "GROUP_WORLD_SIZE": str(node.num_nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": numbers["RANK"],
        "ROLE_WORLD_SIZE": size,
        "TORCHELASTIC_RESTART_COUNT": str(job.epoch),
        "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
        "TORCHELASTIC_RUN_ID": job.job_id,
        # With True rank 0 would connect to a store that does not exist.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "NODE_RANK": str(node.node_rank),
        "HOROVOD_HOSTNAME": node.host,
        **{f"HOROVOD_{name}": number for name, number in numbers.items()},
        "HOROVOD_SIZE": size,
        "RONDE_JOB_ID": job.job_id,
        "RONDE_EPOCH": str(job.epoch),
        "RONDE_COOKIE": job.job_marker,
        "RONDE_HOST": node.host,
        "RONDE_NODE_RANK": str(node.node_rank),
    }


def is_rank_variable(name: str) -> bool:
    return name in _RANK_NAMES or name.startswith(_RANK_PREFIXES)


@functools.cache
def names_secret(name: str) -> bool:
    if name in _DIRECTORIES:
        return False
    words = [word.rstrip("0123456789") for word in re.split(r"[^A-Z0-9]", name.upper())]
    return any(part in name.upper() for part in _SECRET_PARTS) or any(
        word.endswith(_SECRET_ENDS) and word not in _NO_SECRETS for word in words
    )


def select_forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    # Imported late: agents do without.
    from ronde.world.launcher_env import HOROVOD

    of_one_rank = {*HOROVOD.names.values(), "HOROVOD_HOSTNAME"}
    return {
        name: value
        for name, value in environ.items()
        if (name in _ALLOWED_NAMES or name.startswith(_ALLOWED_PREFIXES))
        and _is_free(name)
        and name not in of_one_rank
    }


def read_assignments(
    words: Sequence[str], environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that ``-x`` options set; later options win.

    ``NAME=VALUE`` sets a variable, and ``NAME`` forwards one. A pattern such as
    ``WANDB_*`` forwards all matching variables, except probable secrets and variables
    of this host or of another launcher, which are forwarded only by their full names.
    """
    extra: dict[str, str] = {}
    for word in words:
        name, is_set, value = word.partition("=")
        if name and is_set and "*" not in name:
            extra[name] = value
        elif "*" in name and not is_set:
            # Imported late: it takes milliseconds.
            from fnmatch import fnmatchcase

            matching = [each for each in environ if fnmatchcase(each, name)]
            extra |= {each: environ[each] for each in matching if _is_free(each)}
        elif name in environ:
            extra[name] = environ[name]
        else:
            raise UsageError(
                "-x must be NAME=VALUE, the NAME of a variable that is set, or a "
                f"pattern such as 'NAME*', got {word!r}. "
                f"Type: -x {name.replace('*', '') or 'NAME'}=VALUE"
            )
    return extra


def base_environment(own: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in own.items()
        if name not in _LOGIN_NAMES
        and not name.startswith(_LOGIN_PREFIXES)
        and not is_rank_variable(name)
    }


def redacted(env: Mapping[str, str]) -> dict[str, str]:
    return {
        name: "<hidden>" if names_secret(name) or _SECRET_VALUE.search(value) else value
        for name, value in env.items()
    }


def _is_free(name: str) -> bool:
    return not (name in _LOCAL_NAMES or is_rank_variable(name) or names_secret(name))


def alias_environment(
    environ: Mapping[str, str], *, is_wanted: bool | None
) -> dict[str, str]:
    path = environ.get("PYTHONPATH")
    before = path.split(os.pathsep) if path else []
    after = [entry for entry in before if entry != str(ALIAS_DIRECTORY)]
    if is_wanted is not False:
        after.insert(0, str(ALIAS_DIRECTORY))
    env = {_FORCED: "1"} if is_wanted else {}
    return env if before == after else env | {"PYTHONPATH": os.pathsep.join(after)}


def find_horovod(paths: Iterable[str]) -> Path | None:
    # The package in the alias directory searches in the same way, without ronde.
    own = ALIAS_DIRECTORY.parts[-3:]
    others = [entry for entry in paths if Path(entry).parts[-3:] != own]
    spec = PathFinder.find_spec("horovod", others)
    # A directory of that name is a namespace package without a loader.
    if spec is None or spec.loader is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def warn_of_horovod(environ: Mapping[str, str], paths: Iterable[str]) -> str:
    """Return a warning if ranks import Horovod, not ronde's alias of it, else ""."""
    entries = environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(ALIAS_DIRECTORY) not in entries or environ.get(_FORCED) == "1":
        return ""
    found = find_horovod([*filter(None, entries), *paths])
    if found is None:
        return ""
    return (
        f"Horovod is installed beside ronde, in {found}, and is what the ranks import "
        "as horovod: --horovod-alias gives them ronde's, --no-horovod-alias ends this "
        "warning"
    )
