"""horovodrun: its command, its options and its configuration file.

``ronde run`` takes all of its options.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import ronde
from ronde.arguments import attribute_of, read_number
from ronde.cli.hosts import HorovodOptions, read_text
from ronde.errors import UsageError
from ronde.launch.job.output import Attempt, JobFile, NewWorker, attempt_dir
from ronde.launch.program import absolute_path

_HELP = """\
usage: horovodrun [-np N] [options] program [arguments]

Start ronde run with the options of Horovod's horovodrun.

  -np N                number of ranks
  -cb, --check-build   show the frameworks and libraries that ronde can use
  -v, --version        show the version of ronde

ronde run --help lists the other options.
"""

_CHECK = """\
ronde {version}, with the interface of Horovod {horovod}:

Available Frameworks:
    [{tensorflow}] TensorFlow
    [X] PyTorch
    [ ] MXNet

Available Controllers:
    [{mpi}] MPI
    [{gloo}] Gloo

Available Tensor Operations:
    [{nccl}] NCCL
    [ ] DDL
    [ ] CCL
    [{mpi}] MPI
    [{gloo}] Gloo
    [X] shared memory"""

# Options that set a variable, by the variable's name without HOROVOD_.
_VALUES = {
    "fusion-threshold-mb": "FUSION_THRESHOLD",
    "cycle-time-ms": "CYCLE_TIME",
    "cache-capacity": "CACHE_CAPACITY",
    "autotune-log-file": "AUTOTUNE_LOG",
    "autotune-warmup-samples": "AUTOTUNE_WARMUP_SAMPLES",
    "autotune-steps-per-sample": "AUTOTUNE_STEPS_PER_SAMPLE",
    "autotune-bayes-opt-max-samples": "AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
    "timeline-filename": "TIMELINE",
    "stall-check-warning-time-seconds": "STALL_CHECK_TIME_SECONDS",
    "stall-check-shutdown-time-seconds": "STALL_SHUTDOWN_TIME_SECONDS",
    "thread-affinity": "THREAD_AFFINITY",
    "gloo-timeout-seconds": "GLOO_TIMEOUT_SECONDS",
    "log-level": "LOG_LEVEL",
    "start-timeout": "START_TIMEOUT",
    "reset-limit": "RESET_LIMIT",
    "network-interfaces": "GLOO_IFACE",
}
# Options that set a variable to 1, or with no- to 0.
_SWITCHES = {
    "hierarchical-allreduce": "HIERARCHICAL_ALLREDUCE",
    "hierarchical-allgather": "HIERARCHICAL_ALLGATHER",
    "torus-allreduce": "TORUS_ALLREDUCE",
    "autotune": "AUTOTUNE",
    "timeline-mark-cycles": "TIMELINE_MARK_CYCLES",
    "stall-check": "STALL_CHECK_DISABLE",
}
_SSH = ("ssh-port", "ssh-identity-file")
# Options of elastic jobs, read by ``ronde.cli.elastic``.
_OF_RUN = ("elastic-timeout", "reset-limit")  # also declared by ``ronde run``
_LIMITS = ("min-num-proc", "max-num-proc")
_ELASTIC = (*_LIMITS, "blacklist-cooldown-range", *_OF_RUN)
_READ_HERE = ("output-filename", "config-file", *_ELASTIC, *_SSH)
_CONTROLLERS = ("gloo", "mpi", "jsrun")
_VALUES_IGNORED = (
    *("mpi-args", "binding-args", "num-nccl-streams"),
    "autotune-gaussian-process-noise",
)
_FLAGS_IGNORED = (
    *("disable-cache", "tcp", "prefix-output-with-timestamp", "jsrun", "mpi"),
    *("log-with-timestamp", "log-without-timestamp", "log-hide-timestamp"),
    *("no-log-hide-timestamp", "mpi-threads-disable", "no-mpi-threads-disable"),
    "no-python",
)
_IGNORED = frozenset((*_VALUES_IGNORED, *_FLAGS_IGNORED))
_OTHER_NAMES = {
    "network-interfaces": ["--network-interface"],
    "ssh-port": ["-p"],
    "ssh-identity-file": ["-i"],
    "min-num-proc": ["--min-np"],
    "max-num-proc": ["--max-np"],
    "prefix-output-with-timestamp": ["-prefix-timestamp"],
}
_CONFIGURABLE = _IGNORED.union(_VALUES, _SWITCHES, _CONTROLLERS, _SSH, _LIMITS, _OF_RUN)
# Sections of a configuration file, and the prefix of their options.
_SECTIONS = {
    "params": "",
    "autotune": "autotune-",
    "timeline": "timeline-",
    "stall_check": "stall-check-",
    "library_options": "",
    "logging": "log-",
}


def run_horovodrun(words: list[str], run: Callable[[list[str]], int]) -> int:
    match words:
        case [] | ["-h" | "--help", *_]:
            print(_HELP, end="")
        case ["-v" | "--version", *_]:
            print(f"ronde {ronde.__version__}, as horovodrun")
        case ["-cb" | "--check-build", *_]:
            from ronde import session
            from ronde.horovod import __version__ as horovod

            built = {
                n: getattr(session, f"{n}_built")() for n in ("mpi", "gloo", "nccl")
            }
            built["tensorflow"] = find_spec("tensorflow") is not None
            marks = {name: "X" if has else " " for name, has in built.items()}
            print(_CHECK.format(version=ronde.__version__, horovod=horovod, **marks))
        case _:
            command = shlex.join(["ronde", "run", *words]).replace("\n", "\\n")
            print(f"horovodrun: runs {command}", file=sys.stderr)
            return run(words)
    return 0


def add_horovod_options(parser: argparse.ArgumentParser) -> None:
    """Declare horovodrun's options that ``ronde run`` does not have."""

    def add(name: str, dest: str = "", **how: Any) -> None:  # noqa: ANN401  argparse's own
        names = [f"--{name}", *_OTHER_NAMES.get(name, [])]
        parser.add_argument(*names, dest=dest or name, **how)

    for name in (*_VALUES, *_READ_HERE, *_VALUES_IGNORED):
        if name in _OF_RUN:
            continue
        add(name, nargs=2 if name == "blacklist-cooldown-range" else None)
    for name in _SWITCHES:
        add(name, action="store_const", const="1")
        add(f"no-{name}", dest=name, action="store_const", const="0")
    for name in dict.fromkeys((*_CONTROLLERS, *_FLAGS_IGNORED)):
        add(name, action="store_const", const="1")


def read_horovod_options(
    options: argparse.Namespace, environ: Mapping[str, str]
) -> HorovodOptions:
    given = _given(options)
    controllers = [name for name in _CONTROLLERS if name in given]
    if len(controllers) > 1:
        one, other = controllers[:2]
        raise UsageError(f"--{one} cannot be combined with --{other}. Drop one.")
    port = 0
    if text := given.get("ssh-port"):
        port = read_number("--ssh-port", text, "Correct it.", least=1, most=65535)
    identity = given.get("ssh-identity-file")
    return HorovodOptions(
        env=_variables(given, environ),
        elastic={name: given[name] for name in _ELASTIC if name in given},
        ssh_port=port,
        ssh_args=("-i", identity) if identity is not None else (),
        output_dir=given.get("output-filename", ""),
        ignored=tuple(f"--{name}" for name in given if name in _IGNORED),
    )


def _given(options: argparse.Namespace) -> dict[str, Any]:
    known = (*_VALUES, *_SWITCHES, *_READ_HERE, *_VALUES_IGNORED, *_FLAGS_IGNORED)
    given = {name: getattr(options, name, None) for name in (*known, *_CONTROLLERS)}
    given |= {name: getattr(options, attribute_of(name)) for name in _OF_RUN}
    given = {name: value for name, value in given.items() if value is not None}
    if "config-file" in given:
        given = _configured(given) | given
    return given


def _variables(given: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    env = {
        f"HOROVOD_{variable}": given[name]
        for name, variable in (_VALUES | _SWITCHES).items()
        if name in given
    }
    if "stall-check" in given:
        env["HOROVOD_STALL_CHECK_DISABLE"] = str(int(given["stall-check"] == "0"))
    if "fusion-threshold-mb" in given:
        text, cure = given["fusion-threshold-mb"], "Type: --fusion-threshold-mb 128"
        num_mib = read_number("--fusion-threshold-mb", text, cure)
        env["HOROVOD_FUSION_THRESHOLD"] = str(num_mib << 20)
    known = {**environ, **env}
    # Gloo and NCCL open sockets themselves.
    if names := known.get("HOROVOD_GLOO_IFACE"):
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            env[name] = known.get(name, names)
    return env


def _configured(given: Mapping[str, str]) -> dict[str, str]:
    path = given["config-file"]
    configured: dict[str, str] = {}
    for section, key, value in read_config(path, ("controller", *_SECTIONS)):
        if section == "controller":
            option = value.lower() if value.lower() in _CONTROLLERS else ""
            is_chosen = any(name in given for name in _CONTROLLERS)
            configured |= {} if is_chosen else {option: "1"}
        else:
            option = _SECTIONS[section] + key.replace("_", "-")
            option = section.replace("_", "-") if key == "enabled" else option
            configured[option] = value
        if option not in _CONFIGURABLE:
            raise UsageError(
                f"{path} has {section}.{key}={value}, which is not an option of "
                "horovodrun. Correct it."
            )
    return configured


def read_config(path: str, sections: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the section, key and value of each entry in a YAML configuration file.

    If a section is not a mapping, its key is empty. ``true`` becomes 1, ``false`` 0.
    """
    text = read_text(path, "--config-file")
    try:
        import yaml
    except ModuleNotFoundError:
        raise UsageError(
            "--config-file needs PyYAML, which is not installed. Type: pip install "
            "pyyaml"
        ) from None
    try:
        content: Any = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not valid YAML: {error}. Correct it.") from None
    if not isinstance(content, dict) or not set(cast("Any", content)) <= set(sections):
        raise UsageError(
            f"{path} may only have the sections {', '.join(sections)}. Correct it."
        )
    for section, values in cast("dict[str, Any]", content).items():
        is_section = isinstance(values, dict)
        pairs = cast("dict[str, Any]", values if is_section else {"": values})
        for key, value in pairs.items():
            text = str(int(value)) if isinstance(value, bool) else str(value)
            yield section, str(key), text


class LinkedOutputs(JobFile):
    """Links to the ranks' files as horovodrun names them: ``DIR/rank.<r>/stdout``."""

    def begin(self, attempt: Attempt) -> None:
        super().begin(attempt)
        root = absolute_path(self._path)
        width = len(str(len(attempt.hosts) - 1))
        try:
            for rank in range(len(attempt.hosts)):
                self._link(rank, f"rank.{rank:0{width}}")
        except OSError as error:
            raise UsageError(
                f"cannot write to {str(root)!r}, the directory of --output-filename: "
                f"{error.strerror}. Create it or name another."
            ) from None

    def add_worker(self, new: NewWorker) -> None:
        super().add_worker(new)
        try:
            self._link(new.worker, f"rank.{new.worker}")
        except OSError as error:
            self._notice(f"rank {new.worker} is not linked: {error.strerror}")

    def _link(self, rank: int, name: str) -> None:
        root = absolute_path(self._path)
        directory = root / name
        directory.mkdir(parents=True, exist_ok=True)
        for stream in ("stdout", "stderr"):
            (directory / stream).unlink(missing_ok=True)
            logs = Path(attempt_dir(str(root), self._attempt))
            (directory / stream).symlink_to(logs / str(rank) / f"{stream}.log")
