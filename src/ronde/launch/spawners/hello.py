"""The first words of a program on another host, found among a login's noise."""

import json
import shlex
import sys
from dataclasses import dataclass
from typing import cast

import ronde
from ronde.errors import Failure, LaunchError
from ronde.launch.hosts.host import Host
from ronde.launch.spawners.base import type_there

MAX_NOISE_BYTES = 64 << 10  # what is kept of the noise before a hello: the latest
MAX_WORDS_BYTES = 8 << 10  # the longest that a hello may be
_FIELDS = ("python", "executable", "ronde", "problem")


@dataclass(frozen=True, slots=True)
class RemotePython:
    """What was found on a host."""

    program: str  # what led there: ``ssh``, ``srun`` or ``mpirun``
    python: str  # version of the Python there: ``3.11.2``
    executable: str
    ronde: str  # version of ronde there; empty where it cannot be imported
    why: str

    def problem(self, host: Host) -> Failure | None:
        """Say why no agent of ours can work there, or None."""
        here = "{}.{}".format(*sys.version_info[:2])
        there = ".".join(self.python.split(".")[:2])
        if here != there:
            return Failure(
                f"its Python is {self.python} ({self.executable}), here it is {here}",
                f"name a Python {here} there with --python",
            )
        if self.ronde == ronde.__version__:
            return None
        words = [self.executable, "-m", "pip", "install", f"ronde=={ronde.__version__}"]
        cure = f"{type_there(self.program, host)} {shlex.join(words)}"
        if self.ronde:
            return Failure(
                f"its ronde is {self.ronde}, here it is {ronde.__version__}", cure
            )
        if self.why.startswith("ModuleNotFoundError: No module named 'ronde'"):
            return Failure(f"ronde is missing for {self.executable}", cure)
        return Failure(f"its ronde cannot be imported: {self.why}", cure)


class HelloReader:
    """Waits for a sentinel, and then for what was found there."""

    def __init__(self, program: str, sentinel: bytes) -> None:
        self.met: RemotePython | None = None
        self.noise = b""
        self._program = program
        self._sentinel = sentinel
        self._words: bytes | None = None

    def feed(self, data: bytes) -> bytes | None:
        if self._words is None:
            noise, found, after = (self.noise + data).partition(self._sentinel)
            self.noise = noise[-MAX_NOISE_BYTES:]
            if not found:
                return None
            data, self._words = after, b""
        words, is_whole, after = (self._words + data).partition(b"\n")
        if len(words) > MAX_WORDS_BYTES:
            raise LaunchError(
                f"greeting must have at most {MAX_WORDS_BYTES} bytes, got more."
            )
        self._words = words
        if not is_whole:
            return None
        self.met = _read(self._program, words)
        return after


def _read(program: str, words: bytes) -> RemotePython:
    try:
        said: object = json.loads(words)
    except (ValueError, RecursionError) as error:
        raise LaunchError(f"greeting must be JSON: {error}.") from None
    values = cast("dict[str, object]", said) if isinstance(said, dict) else {}
    texts = [value for name in _FIELDS if isinstance(value := values.get(name), str)]
    if len(texts) != len(_FIELDS) or len(values) != len(_FIELDS):
        raise LaunchError(
            f"greeting must have the texts {', '.join(_FIELDS)}, got {said!r:.80}."
        )
    # They are shown on a terminal.
    python, executable, version, why = (
        "".join(filter(str.isprintable, text)) for text in texts
    )
    return RemotePython(program, python, executable, version, why)
