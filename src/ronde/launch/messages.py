"""What controller and agent say to each other, and the check of every word of it.

Messages are named tuples, which are made in a tenth of a dataclass's time: controller
and agent make all of these at their start. On the wire they are JSON objects with the
field ``is`` naming the message. Each field is checked against its annotation when a
message comes in: nothing is evaluated, nothing unpickled, nothing unknown is let
through.
"""

import json
from typing import NamedTuple, TypeVar, cast

from ronde.addresses import InterfaceAddress
from ronde.errors import LaunchError
from ronde.launch.job import Job
from ronde.plain_values import PlainValueError, from_plain, shorten, to_plain
from ronde.topology.machine import Machine

T = TypeVar("T")

PROTOCOL = 6
"""Changes when a message changes; both sides must have the same."""


class Prepare(NamedTuple):
    """To the agent: check that this job can start here, and start nothing yet."""

    job: Job


class Start(NamedTuple):
    """To the agent: start the ranks, which meet at this address and port."""

    master_addr: str
    master_port: int


class Locate(NamedTuple):
    """To the agent: say from where you would reach these addresses.

    Where ``port`` is not 0, see also whether it answers there.
    """

    addresses: tuple[str, ...]
    port: int


class Converse(NamedTuple):
    """To the agent: start a program to be spoken with; see ``conversation``.

    Attributes:
        module: The module of ronde that is the program.
    """

    module: str


class Say(NamedTuple):
    """To the agent: tell the program this line."""

    line: str


class Forward(NamedTuple):
    """To the agent: send a signal to every rank's process group, no more than that."""

    signal: int


class Stop(NamedTuple):
    """To the agent: signal the ranks, give them the grace, then sweep."""

    signal: int


class Kill(NamedTuple):
    """To the agent: sweep now."""


class TakeStacks(NamedTuple):
    """To the agent: say of every rank that runs where it is; see ``stacks``."""


class Leave(NamedTuple):
    """To the agent: there is no further job; end."""


class Credit(NamedTuple):
    """To the agent: so many more bytes of output may be sent."""

    num_bytes: int


class Ping(NamedTuple):
    """To the agent: the controller is there.

    Attributes:
        sent_at_s: The controller's clock, which is sent back as it is.
        lease_s: After so long without any word the agent ends everything, until the
            next ``Ping`` says otherwise; after twice as long where the controller's
            host answers at one of its addresses.
        addresses: Those.
    """

    sent_at_s: float
    lease_s: float
    addresses: tuple[str, ...]


class Hello(NamedTuple):
    """From the agent, unasked and first: who it is and what ranks can have here.

    Attributes:
        protocol: Version of these messages.
        host: Name that the host itself goes by.
        identity: Two agents that say the same are on one machine.
        pid: The agent's process there.
        directory: Where it was started.
        machine: What ranks have to share.
        interfaces: Addresses that other hosts might reach it by.
    """

    protocol: int
    host: str
    identity: str
    pid: int
    directory: str
    machine: Machine
    interfaces: tuple[InterfaceAddress, ...]


class Located(NamedTuple):
    """From the agent: its own address towards each that it was asked for.

    An empty one stands for an address that is not reached from here.
    """

    sources: tuple[str, ...]


class Said(NamedTuple):
    """From the agent: a line that the program wrote."""

    line: str


class Silent(NamedTuple):
    """From the agent: the program has ended, or did not start.

    Attributes:
        reason: In half a sentence.
    """

    reason: str


class Ready(NamedTuple):
    """From the agent: the job can start here.

    ``master_port`` is the port that is bound and held for rank 0; 0 where that is not
    here.
    """

    master_port: int


class Refused(NamedTuple):
    """From the agent: the job cannot start, and nothing was started.

    ``is_usage`` is True where the one who asked for it can change that.
    """

    reason: str
    is_usage: bool


class Started(NamedTuple):
    """From the agent: a rank runs, since ``at_s`` on the agent's clock."""

    rank: int
    pid: int
    at_s: float


class Ending(NamedTuple):
    """From the agent: its host wants the ranks to end, by this signal.

    Slurm and Kubernetes do that before they take a host away.
    """

    signal: int


class Exited(NamedTuple):
    """From the agent: a rank is gone.

    Attributes:
        rank: Which.
        status: Its exit code, or minus the number of the signal that ended it.
        began_s: When it began to end, on the agent's monotonic clock: when it said so,
            or was found dumping core, or was reaped.
        traceback_s: When its last Python traceback was read; 0 for none.
        stopped_s: When the agent began to end the job; 0 for not yet.
        evidence: What the kernel says of it, in half a sentence, or empty.
    """

    rank: int
    status: int
    began_s: float
    traceback_s: float
    stopped_s: float
    evidence: str


class ProcessStack(NamedTuple):
    """Where one process of a rank is.

    Attributes:
        pid: Its number there.
        name: Its program, as the kernel has it.
        state: What the kernel says of it, where there is no text.
        text: The stacks of its threads as ``faulthandler`` writes them, or empty.
    """

    pid: int
    name: str
    state: str
    text: str


class Stacks(NamedTuple):
    """From the agent: where a rank is, its own process first."""

    rank: int
    processes: tuple[ProcessStack, ...]


class Notice(NamedTuple):
    """From the agent: something the user should know and that ends nothing."""

    text: str


class Pong(NamedTuple):
    """From the agent: the answer to a ``Ping``, with its own monotonic clock."""

    sent_at_s: float
    here_s: float


class Finished(NamedTuple):
    """From the agent: no process of the job is left, but those that are ``stuck``.

    Attributes:
        num_swept: Processes that outlived their rank and were killed.
        stuck: Processes that the kernel does not let die, each named.
    """

    num_swept: int
    stuck: tuple[str, ...]


TO_AGENT = (
    Prepare,
    Start,
    Locate,
    Converse,
    Say,
    Forward,
    Stop,
    Kill,
    TakeStacks,
    Leave,
    Credit,
    Ping,
)
FROM_AGENT = (
    Hello,
    Located,
    Said,
    Silent,
    Ready,
    Refused,
    Started,
    Ending,
    Exited,
    Stacks,
    Notice,
    Pong,
    Finished,
)

ToAgent = (
    Prepare
    | Start
    | Locate
    | Converse
    | Say
    | Forward
    | Stop
    | Kill
    | TakeStacks
    | Leave
    | Credit
    | Ping
)
FromAgent = (
    Hello
    | Located
    | Said
    | Silent
    | Ready
    | Refused
    | Started
    | Ending
    | Exited
    | Stacks
    | Notice
    | Pong
    | Finished
)


def encode_message(message: tuple[object, ...]) -> bytes:
    """Return a message as JSON; text may hold any bytes, as surrogates.

    Args:
        message: A named tuple.
    """
    plain = cast("dict[str, object]", to_plain(message))
    return json.dumps({"is": type(message).__name__, **plain}).encode()


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
        raise LaunchError(f"control message must be an object, got {shorten(said)}.")
    values = cast("dict[str, object]", said)
    name = values.pop("is", None)
    for kind in kinds:
        if kind.__name__ == name:
            try:
                return from_plain(kind, values)
            except PlainValueError as error:
                raise LaunchError(
                    f"{error} Run the same version of ronde on every host."
                ) from None
    names = ", ".join(kind.__name__ for kind in kinds)
    raise LaunchError(f"message must be one of {names}, got {shorten(name)}.")
