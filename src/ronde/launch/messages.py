"""Messages between controller and agent, and how they are checked.

Messages are named tuples, which are made in a tenth of a dataclass's time: controller
and agent make all of these at their start. They travel as JSON objects with the field
``is`` naming the message. Each field is checked against its annotation when a message
comes in: nothing is evaluated, nothing unpickled, and nothing unknown passes.
"""

import json
from typing import NamedTuple, TypeVar, cast, get_args

from ronde.addresses import InterfaceAddress
from ronde.errors import LaunchError
from ronde.plain_values import PlainValueError, from_plain, shorten, to_plain
from ronde.topology.machine import UNKNOWN_NODE, Machine

T = TypeVar("T")
PROTOCOL = 7  # changes when a message changes; both sides must have the same


class RankSpec(NamedTuple):
    """What one rank has of its own."""

    rank: int  # its number among all
    env: dict[str, str]  # its own environment variables; they win over the job's
    # those that it may use; empty leaves it all of the agent's
    cpus: tuple[int, ...] = ()
    memory_node: int = UNKNOWN_NODE  # where its memory is to lie, or ``UNKNOWN_NODE``


class NodeJob(NamedTuple):
    """All that one agent must know to start its ranks, but where they meet."""

    job_id: str  # name of the job, also of its directory of logs
    epoch: int  # generation of the world, 0 for the first start
    # random, carried by every process of the job as RONDE_COOKIE; no secret
    job_marker: str
    argv: tuple[str, ...]
    env: dict[str, str]  # environment of all ranks, on top of what the agent itself has
    ranks: tuple[RankSpec, ...]  # the ranks of this agent, ascending
    cwd: str  # directory the ranks start in; empty for the agent's own
    grace_s: float  # seconds between the stop signal and the sweep
    address: str  # numeric address that the ranks meet at, where rank 0 is here
    master_port: int  # port to bind for the ranks to meet at, or 0 for any
    is_mpi: bool  # the ranks are to be able to initialise MPI


class Prepare(NamedTuple):
    """To the agent: check that this job can start here, and start nothing yet."""

    job: NodeJob


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


class StartProgram(NamedTuple):
    """To the agent: start a program; see ``remote_program``."""

    module: str  # the module of ronde that is the program


class WriteLine(NamedTuple):
    """To the agent: tell the program this line."""

    line: str


class Forward(NamedTuple):
    """To the agent: send a signal to every rank's process group, no more than that."""

    signal: int


class StopRanks(NamedTuple):
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
    """To the agent: the controller is there."""

    sent_at_s: float  # the controller's clock, which is sent back as it is
    # after so long without any word the agent ends everything, until the next ``Ping``
    # says otherwise; after twice as long where the controller's host answers at one of
    # its addresses
    lease_s: float
    addresses: tuple[str, ...]


class Hello(NamedTuple):
    """From the agent, unasked and first: who it is and what ranks can have here."""

    protocol: int  # version of these messages
    host: str  # name that the host itself goes by
    identity: str  # two agents that say the same are on one machine
    pid: int  # the agent's process there
    directory: str  # where it was started
    machine: Machine  # what ranks have to share
    # addresses that other hosts might reach it by
    interfaces: tuple[InterfaceAddress, ...]


class Located(NamedTuple):
    """From the agent: its own address towards each that it was asked for.

    An empty one stands for an address that is not reached from here.
    """

    sources: tuple[str, ...]


class ProgramLine(NamedTuple):
    """From the agent: a line that the program wrote."""

    line: str


class ProgramExited(NamedTuple):
    """From the agent: the program has ended, or did not start."""

    reason: str  # in half a sentence


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


class HostEnding(NamedTuple):
    """From the agent: its host wants the ranks to end, by this signal.

    Slurm and Kubernetes do that before they take a host away.
    """

    signal: int


class Exited(NamedTuple):
    """From the agent: a rank is gone."""

    rank: int
    status: int  # its exit code, or minus the number of the signal that ended it
    # when it began to end, on the agent's monotonic clock: when it said so, or was
    # found dumping core, or was reaped
    began_s: float
    traceback_s: float  # when its last Python traceback was read; 0 for none
    stopped_s: float  # when the agent began to end the job; 0 for not yet
    evidence: str  # what the kernel says of it, in half a sentence, or empty


class ProcessStack(NamedTuple):
    """Where one process of a rank is."""

    pid: int
    name: str  # its program, as the kernel has it
    state: str  # what the kernel says of it, where there is no text
    text: str  # the stacks of its threads as ``faulthandler`` writes them, or empty


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
    """From the agent: no process of the job is left, but those that are ``stuck``."""

    num_swept: int  # processes that outlived their rank and were killed
    stuck: tuple[str, ...]  # processes that the kernel does not let die, each named


ToAgent = (
    Prepare
    | Start
    | Locate
    | StartProgram
    | WriteLine
    | Forward
    | StopRanks
    | Kill
    | TakeStacks
    | Leave
    | Credit
    | Ping
)


FromAgent = (
    Hello
    | Located
    | ProgramLine
    | ProgramExited
    | Ready
    | Refused
    | Started
    | HostEnding
    | Exited
    | Stacks
    | Notice
    | Pong
    | Finished
)


TO_AGENT: tuple[type[ToAgent], ...] = get_args(ToAgent)
FROM_AGENT: tuple[type[FromAgent], ...] = get_args(FromAgent)


def encode_message(message: tuple[object, ...]) -> bytes:
    """Return a message as JSON; text may hold any bytes, as surrogates."""
    plain = cast("dict[str, object]", to_plain(message))
    return json.dumps({"is": type(message).__name__, **plain}).encode()


def decode_message(raw: bytes, kinds: tuple[type[T], ...]) -> T:
    """Return the message that ``raw`` is; it must be one of ``kinds``."""
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
