"""Horovod's ``horovod.run``, and small functions of its ``runner`` modules."""

import pickle
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple, TextIO, cast

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]

from ronde.errors import UsageError
from ronde.world import read_rank_info
from ronde.world.environment import select_variables

_USAGE_EXIT_CODE = 64
_TAIL_LINES = 20
_FAILED = (
    "Horovod detected that one or more processes exited with non-zero status, thus "
    "causing the job to be terminated. The first process to do so was:\n"
    "Process name: {name}\nExit code: {code}\n"
)
_OLD_NAMES = {
    "np": "num_proc",
    "min_np": "min_num_proc",
    "max_np": "max_num_proc",
    "network_interface": "network_interfaces",
}
_OPTION_NAMES = {
    "slots": "--slots-per-host",
    "cooldown_range": "--blacklist-cooldown-range",
    "use_gloo": "--gloo",
    "use_mpi": "--mpi",
}
"""Arguments with an option of another name."""
_NO_OPTIONS = ("func", "args", "kwargs", "executable")


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Start ranks here, call a function on each, and return the results by rank.

    The ranks' output is shown while they run. ``func``, its arguments and its result
    can be anything that cloudpickle supports. The arguments from ``num_proc`` on are
    horovodrun's options; ``np``, ``min_np``, ``max_np`` and ``network_interface`` are
    deprecated names. All hosts must be this machine. ``ssh_port``,
    ``ssh_identity_file``, ``disable_cache`` and ``mpi_args`` are ignored.

    Args:
        min_num_proc: The fewest ranks that may start if there are fewer slots than
            ``num_proc``; also the number of results that are returned.
        slots: Slots of a host for which the discovery script prints no number.
        executable: The ranks' Python; None means the caller's.

    Raises:
        UsageError: The arguments are invalid; nothing was started.
        RuntimeError: A rank failed.
    """
    asked = _renamed(dict(locals()))
    asked["verbose"] = bool(verbose)
    if hosts and hostfile:
        raise UsageError("Argument hosts and hostfile only allow one provided.")
    if use_gloo and use_mpi:
        raise UsageError("Argument use_gloo and use_mpi only allow one set True.")
    call = partial(func, *args, **dict(kwargs or {}))
    with tempfile.TemporaryDirectory(prefix="ronde-run-") as name:
        folder = Path(name)
        # Functions of a module are pickled by name: ranks must find the module.
        (folder / "path").write_bytes(pickle.dumps(sys.path))
        (folder / "call").write_bytes(cloudpickle.dumps(call))
        words = [*_words(asked), "--", executable or sys.executable]
        code, errors = _show_job([*words, "-m", "ronde.horovod", name])
        outcomes = _collect_outcomes(folder, asked["num_proc"])
    if code == _USAGE_EXIT_CODE and not any(outcomes):
        raise UsageError(_usage_text(errors))
    _require_success(code, outcomes)
    results = [outcome.result for outcome in outcomes if outcome is not None]
    return results[: asked["min_num_proc"]]


class _CallOutcome(NamedTuple):
    result: Any
    traceback: str  # of the call's exception; empty if it returned
    ended_ns: int
    size: int  # number of ranks


def run_rank(folder: Path) -> None:
    """Unpickle and execute the call that ``run`` wrote to a folder."""
    rank_info = read_rank_info()
    path: list[str] = pickle.loads((folder / "path").read_bytes())  # noqa: S301  ours
    sys.path.extend(entry for entry in path if entry not in sys.path)

    def leave(result: object, text: str) -> None:
        ended_ns = time.monotonic_ns()
        outcome = _CallOutcome(result, text, ended_ns, rank_info.size)
        content = cloudpickle.dumps(outcome)
        (folder / f"outcome-{rank_info.rank}").write_bytes(content)

    try:
        call = pickle.loads((folder / "call").read_bytes())  # noqa: S301  ours
        leave(call(), "")
    except BaseException:
        leave(None, traceback.format_exc())
        raise


def _collect_outcomes(folder: Path, max_size: int) -> list[_CallOutcome | None]:
    files = [folder / f"outcome-{rank}" for rank in range(max_size)]
    outcomes: list[_CallOutcome | None] = [
        pickle.loads(file.read_bytes()) if file.exists() else None  # noqa: S301  ours
        for file in files
    ]
    # Fewer ranks may have started than requested.
    started = next((each.size for each in outcomes if each is not None), max_size)
    return outcomes[:started]


def _renamed(asked: dict[str, Any]) -> dict[str, Any]:
    for old, new in _OLD_NAMES.items():
        value = asked.pop(old)
        if value is not None and value != "":
            warnings.warn(
                f"{old} is deprecated, use {new} instead",
                DeprecationWarning,
                stacklevel=3,
            )
            asked[new] = value.split(",") if isinstance(value, str) else value
    return asked


def _words(asked: Mapping[str, Any]) -> list[str]:
    """Return the ``ronde run`` command that starts the ranks, without their program."""
    # --standalone, as the call is in a folder of this machine.
    words = [sys.executable, "-m", "ronde", "run", "--standalone", "--horovod-alias"]
    if read_rank_info().size == 1:
        # A program of size 1 may itself be a rank of another launcher.
        words.append("--nested")
    for name, value in asked.items():
        option = _OPTION_NAMES.get(name) or f"--{name.replace('_', '-')}"
        if value is None or value is False or name in _NO_OPTIONS:
            continue
        if value is True:
            words.append(option)
        elif name == "cooldown_range":
            words += [option, *map(str, value)]
        else:
            # In one word, as a value may begin with a dash.
            text = ",".join(value) if name == "network_interfaces" else value
            words.append(f"{option}={text}")
    return words


def run_job(words: Sequence[str]) -> None:
    """Run a command that starts ranks, and show its output.

    Raises:
        UsageError: The command line was invalid.
        RuntimeError: The command failed; the message has its last lines.
    """
    code, errors = _show_job(words)
    if code == _USAGE_EXIT_CODE:
        raise UsageError(_usage_text(errors))
    if code:
        raise RuntimeError(
            _FAILED.format(name="see below", code=code) + "".join(errors)
        )


def _show_job(words: Sequence[str]) -> tuple[int, Iterable[str]]:
    """Run a command and show its output; return its exit code and last stderr lines."""
    errors: deque[str] = deque(maxlen=_TAIL_LINES)
    # In a notebook ``sys.stdout`` and ``sys.stderr`` are not the process's own.
    devnull, pipe = subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(
        words, stdin=devnull, stdout=pipe, stderr=pipe, errors="backslashreplace"
    ) as process:
        outputs = (process.stdout, sys.stdout, deque[str](maxlen=0))
        thread = Thread(target=_show, args=outputs)
        thread.start()
        _show(process.stderr or (), sys.stderr, errors)
        thread.join()
    return process.returncode, errors


def _usage_text(errors: Iterable[str]) -> str:
    return "".join(errors).strip().removeprefix("ronde: ")


def _show(lines: Iterable[str], shown: TextIO, kept: deque[str]) -> None:
    for line in lines:
        shown.write(line)
        shown.flush()
        kept.append(line)


def _require_success(code: int, outcomes: Sequence[_CallOutcome | None]) -> None:
    """Raise Horovod's error if a rank failed."""
    numbered = list(enumerate(outcomes))
    failures = [(o.ended_ns, rank, o.traceback) for rank, o in numbered if o]
    failures = sorted(each for each in failures if each[-1])
    silent = [rank for rank, outcome in numbered if outcome is None]
    if code == 0 and not failures and not silent:
        return
    _, name, reason = failures[0] if failures else (0, f"one of {silent}", "")
    raise RuntimeError(_FAILED.format(name=name, code=code) + reason)


def get_env_rank_and_size() -> tuple[int, int]:
    """Return rank and size from the environment; (0, 1) if they are not set."""
    for prefix in ("HOROVOD", "OMPI_COMM_WORLD", "PMI"):
        names = [f"{prefix}_RANK", f"{prefix}_SIZE"]
        values = select_variables(names)
        if len(values) == 2:
            return int(values[names[0]]), int(values[names[1]])
        if values:
            raise RuntimeError(
                "Could not determine process rank and size: only one of "
                f"{names[0]} and {names[1]} found in environment"
            )
    return 0, 1


def in_thread(
    target: Callable[..., object],
    args: tuple[Any, ...] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> Thread:
    """Call a function in a new thread; ``silent`` suppresses its exceptions."""
    if not isinstance(cast("object", args), tuple):
        raise ValueError(  # noqa: TRY004  Horovod's type
            f"args must be a tuple, got {type(args).__name__}. "
            "Write (arg,) for a single argument."
        )

    def call() -> None:
        with suppress(Exception) if silent else nullcontext():
            target(*args)

    thread = Thread(target=call, name=name, daemon=daemon)
    thread.start()
    return thread
