"""What controller and agent say to each other, and the check of every word of it.

Messages are frozen dataclasses; on the wire they are JSON objects with the field ``is``
naming the message. Each field is checked against its annotation when a message comes
in: nothing is evaluated, nothing unpickled, nothing unknown is let through.
"""

import json
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, TypeVar, cast

from ronde.errors import LaunchError
from ronde.launch.job import Job

T = TypeVar("T")

PROTOCOL = 2
"""Changes when a message changes; both sides must have the same."""


@dataclass(frozen=True, slots=True)
class Prepare:
    """To the agent: check that this job can start here, and start nothing yet."""

    protocol: int
    job: Job


@dataclass(frozen=True, slots=True)
class Start:
    """To the agent: start the ranks, which meet at this address and port."""

    master_addr: str
    master_port: int


@dataclass(frozen=True, slots=True)
class Forward:
    """To the agent: send a signal to every rank's process group, no more than that."""

    signal: int


@dataclass(frozen=True, slots=True)
class Stop:
    """To the agent: signal the ranks, give them the grace, then sweep."""

    signal: int


@dataclass(frozen=True, slots=True)
class Kill:
    """To the agent: sweep now."""


@dataclass(frozen=True, slots=True)
class Credit:
    """To the agent: so many more bytes of output may be sent."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class Ready:
    """From the agent: the job can start here; the port is bound and held."""

    protocol: int
    host: str
    pid: int
    master_port: int


@dataclass(frozen=True, slots=True)
class Refused:
    """From the agent: the job cannot start, and nothing was started.

    ``is_usage`` is True where the one who asked for it can change that.
    """

    reason: str
    is_usage: bool


@dataclass(frozen=True, slots=True)
class Started:
    """From the agent: a rank runs."""

    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class Exited:
    """From the agent: a rank is gone.

    Attributes:
        rank: Which.
        status: Its exit code, or minus the number of the signal that ended it.
        at_s: Seconds since the ranks were started.
        was_stopped: True when the agent had already begun to end the job.
    """

    rank: int
    status: int
    at_s: float
    was_stopped: bool


@dataclass(frozen=True, slots=True)
class Notice:
    """From the agent: something the user should know and that ends nothing."""

    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """From the agent: no process of the job is left, but those that are ``stuck``.

    Attributes:
        num_swept: Processes that outlived their rank and were killed.
        stuck: Processes that the kernel does not let die, each named.
    """

    num_swept: int
    stuck: tuple[str, ...]


ToAgent = Prepare | Start | Forward | Stop | Kill | Credit
FromAgent = Ready | Refused | Started | Exited | Notice | Finished

TO_AGENT: tuple[type[ToAgent], ...] = (Prepare, Start, Forward, Stop, Kill, Credit)
FROM_AGENT: tuple[type[FromAgent], ...] = (
    Ready,
    Refused,
    Started,
    Exited,
    Notice,
    Finished,
)


def encode_message(message: ToAgent | FromAgent) -> bytes:
    """Return a message as JSON; text may hold any bytes, as surrogates."""
    return json.dumps({"is": type(message).__name__, **asdict(message)}).encode()


def decode_message(raw: bytes, kinds: tuple[type[T], ...]) -> T:
    """Return the message that ``raw`` is; it must be one of ``kinds``.

    Raises:
        LaunchError: Not JSON, an unknown message, or a field missing, unknown or of
            another type.
    """
    try:
        said: object = json.loads(raw)
    except ValueError as error:
        raise LaunchError(f"control message must be JSON: {error}.") from None
    if not isinstance(said, dict):
        raise LaunchError(f"control message must be an object, got {_short(said)}.")
    values = cast("dict[str, object]", said)
    name = values.pop("is", None)
    for kind in kinds:
        if kind.__name__ == name:
            return _build(kind, values, kind.__name__)
    names = ", ".join(kind.__name__ for kind in kinds)
    raise LaunchError(f"message must be one of {names}, got {_short(name)}.")


def _build(kind: type[T], values: dict[str, object], where: str) -> T:
    wanted = {f.name: f.type for f in fields(cast("Any", kind))}
    if wanted.keys() != values.keys():
        raise LaunchError(
            f"{where} must have the fields {sorted(wanted)}, got {sorted(values)}. "
            "Run the same version of ronde on every host."
        )
    return kind(
        **{
            name: _checked(values[name], wanted[name], f"{where}.{name}")
            for name in wanted
        }
    )


def _checked(value: object, wanted: Any, where: str) -> object:  # noqa: ANN401 - an annotation is any object
    """Return the value as the annotation wants it, lists as tuples."""
    outer = getattr(wanted, "__origin__", wanted)
    if is_dataclass(outer) and isinstance(value, dict):
        nested = cast("dict[str, object]", value)
        return _build(cast("type[Any]", wanted), nested, where)
    if outer is tuple and isinstance(value, list):
        items = cast("list[object]", value)
        inner = wanted.__args__[0]
        return tuple(_checked(v, inner, f"{where}[{i}]") for i, v in enumerate(items))
    if outer is dict and isinstance(value, dict):
        entries = cast("dict[str, object]", value)
        inner = wanted.__args__[1]
        return {k: _checked(v, inner, f"{where}[{k!r}]") for k, v in entries.items()}
    if outer is float and type(value) is int:
        return float(value)
    if type(value) is outer:
        return value
    raise LaunchError(f"{where} must be {_name(wanted)}, got {_short(value)}.")


def _name(wanted: Any) -> str:  # noqa: ANN401 - an annotation is any object
    return wanted.__name__ if isinstance(wanted, type) else str(wanted)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
