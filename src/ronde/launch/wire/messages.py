"""Messages and frames between controller and agent.

A frame is a 4-byte length (big endian, of what follows), a kind byte and a body; the
length is checked before anything is kept. Messages are named tuples and travel as JSON
objects with the field ``is`` naming the message. Each field is checked against its
annotation: nothing is evaluated, nothing unpickled, and nothing unknown passes.
"""

import json
import os
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from struct import Struct
from typing import Generic, NamedTuple, Protocol, TypeVar, cast, get_args

from ronde.addresses import InterfaceAddress
from ronde.errors import LaunchError, StoreError
from ronde.plain_values import PlainValueError, from_plain, shorten, to_plain
from ronde.store.protocol import MAX_FRAME_BYTES, Splitter
from ronde.topology.machine import Machine

T = TypeVar("T")
PROTOCOL = 14  # changes when a message changes; both sides must have the same
FIRST_CREDIT_BYTES = 16 << 10  # output that may be sent before any credit was granted

_READ_BYTES = 256 << 10
_LENGTH = Struct(">I")
_HEAD = Struct(">II")
_JSON = 1  # the kind of a frame whose body is a message as JSON


class WorkerSpec(NamedTuple):
    """What one rank has of its own."""

    worker: int
    env: dict[str, str]  # its own environment variables; they win over the job's
    cpus: tuple[int, ...] = ()  # those that it may use; empty for all of the agent's


class NodeJob(NamedTuple):
    """To the agent: check that this job can start here, and start nothing yet."""

    epoch: int  # generation of the world, 0 for the first start
    job_marker: str  # random, each process has it as RONDE_COOKIE; no secret
    argv: tuple[str, ...]
    env: dict[str, str]  # environment of all ranks, on top of what the agent itself has
    workers: tuple[WorkerSpec, ...]  # those of this agent, ascending
    cwd: str  # directory the ranks start in; empty for the agent's own
    grace_s: float  # seconds between the stop signal and the sweep
    address: str  # numeric address that the ranks meet at, where rank 0 is here
    master_port: int  # port to bind for the ranks to meet at, or 0 for any
    # elastic: the most workers that it may have, by ``StartWorkers``; it lasts until
    # ``StopWorkers``, even when all have ended. 0 for not elastic
    max_ranks: int = 0
    # where to look for notice of this host's end, as ``--notice`` has it
    notice: tuple[str, ...] = ()


class Start(NamedTuple):
    """To the agent: start the ranks, which meet at this address and port."""

    master_addr: str
    master_port: int


class StartWorkers(NamedTuple):
    """To the agent of an elastic job: start these as well, while others run."""

    workers: tuple[WorkerSpec, ...]


class SignalWorker(NamedTuple):
    """To the agent of an elastic job: signal a rank's processes."""

    worker: int
    signal: int


class SendToWorkers(NamedTuple):
    """To the agent of an elastic job: pass a text on to ranks, by their channels."""

    workers: tuple[int, ...]  # empty for all that run there
    text: str


class Locate(NamedTuple):
    """To the agent: report your own address towards each of these addresses."""

    addresses: tuple[str, ...]
    port: int  # where not 0, try also whether it answers there


class StartProgram(NamedTuple):
    """To the agent: start a program; see ``RemoteProgram``."""

    module: str  # the module of ronde that is the program


class Forward(NamedTuple):
    """To the agent: send a signal to every rank's process group, no more than that."""

    signal: int


class StopWorkers(NamedTuple):
    """To the agent: signal the ranks, give them the grace, then sweep.

    SIGKILL has no grace, and the output that waits is dropped.
    """

    signal: int


class TakeStacks(NamedTuple):
    """To the agent: report the stacks of ranks that run."""

    workers: tuple[int, ...]  # empty for all


class Credit(NamedTuple):
    """To the agent: so many more bytes of output may be sent."""

    num_bytes: int


class Ping(NamedTuple):
    """To the agent: the controller is there."""

    sent_at_s: float  # the controller's clock, which is sent back as it is
    # after so long without any message the agent ends everything, until the next
    # ``Ping`` changes that; after twice as long where the controller's host answers at
    # one of its addresses
    lease_s: float
    addresses: tuple[str, ...]


class Hello(NamedTuple):
    """From the agent, unasked and first: who it is and what ranks can have here."""

    protocol: int
    host: str  # name that the host itself goes by
    identity: str  # two agents with the same one are on one machine
    machine: Machine
    interfaces: tuple[InterfaceAddress, ...]  # addresses others might reach it by


class Located(NamedTuple):
    """From the agent: its own address towards each; empty where it has no route."""

    sources: tuple[str, ...]


class ProgramLine(NamedTuple):
    """A line from the program, or to the agent for the program."""

    line: str


class ProgramExited(NamedTuple):
    """From the agent: the program has ended, or did not start."""

    reason: str  # in half a sentence


class Ready(NamedTuple):
    """From the agent: the job can start here."""

    master_port: int  # bound and held for rank 0; 0 where that is not here


class Refused(NamedTuple):
    """From the agent: the job cannot start, and nothing was started."""

    reason: str
    is_usage: bool  # the user can change it


class Started(NamedTuple):
    """From the agent: a rank runs."""

    worker: int
    pid: int


class HostEnding(NamedTuple):
    """From the agent: its host (Slurm, Kubernetes) ends the ranks by this signal."""

    signal: int


class HostLeaving(NamedTuple):
    """From the agent of an elastic job: there is notice that its host will end."""

    reason: str  # in half a sentence, about the host: ``AWS takes it at 10:31:02 UTC``


class Exited(NamedTuple):
    """From the agent: a rank is gone. Times are on the agent's monotonic clock."""

    worker: int
    status: int  # its exit code, or minus the number of the signal that ended it
    began_s: float  # when it reported its exit, dumped core, or was reaped
    traceback_s: float  # when its last Python traceback was read; 0 for none
    stopped_s: float  # when the agent began to end the job; 0 for not yet
    evidence: str  # what the kernel reports of it, in half a sentence, or empty


class ProcessStack(NamedTuple):
    """Where one process of a rank is."""

    pid: int
    name: str  # its program, as the kernel has it
    state: str  # its state in the kernel, where there is no text
    text: str  # the stacks of its threads as ``faulthandler`` writes them, or empty


class WorkerText(NamedTuple):
    """What one rank of an elastic job said by its channel."""

    worker: int
    text: str


class WorkerTexts(NamedTuple):
    """From the agent of an elastic job: what ranks said since the last of these."""

    texts: tuple[WorkerText, ...]


class StatusText(NamedTuple):
    """The newest status of one rank."""

    worker: int
    text: str  # as the rank wrote it: JSON of a ``ronde.status.RankStatus``, unchecked
    age_s: float  # for how long the agent has had it


class Statuses(NamedTuple):
    """From the agent, at most once a second: statuses that are new."""

    statuses: tuple[StatusText, ...]


class WorkerStopped(NamedTuple):
    """From the agent of an elastic job: a rank was stopped, or goes on again."""

    worker: int
    is_stopped: bool


class WorkerEnding(NamedTuple):
    """From the agent of an elastic job: the kernel ends a rank; Exited follows."""

    worker: int
    status: int  # as ``subprocess`` has it, not 0
    evidence: str


class Stacks(NamedTuple):
    """From the agent: where a rank is, its own process first."""

    worker: int
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


JobOrder = (
    Start
    | StartWorkers
    | SignalWorker
    | SendToWorkers
    | Forward
    | StopWorkers
    | TakeStacks
)
ToAgent = NodeJob | JobOrder | Locate | StartProgram | ProgramLine | Credit | Ping
FromStart = Hello | Located | ProgramLine | ProgramExited | Ready | Refused
FromWorkers = Started | Exited | WorkerTexts | WorkerStopped | WorkerEnding | Stacks
FromJob = FromWorkers | Statuses | HostEnding | HostLeaving | Notice | Pong | Finished
FromAgent = FromStart | FromJob
TO_AGENT: tuple[type[ToAgent], ...] = get_args(ToAgent)
FROM_AGENT: tuple[type[FromAgent], ...] = get_args(FromAgent)


def encode_message(message: object) -> bytes:
    plain = cast("dict[str, object]", to_plain(message))
    return json.dumps({"is": type(message).__name__, **plain}).encode()


def decode_message(raw: bytes, kinds: tuple[type[T], ...]) -> T:
    """Return the message that ``raw`` is; it must be one of ``kinds``."""
    try:
        decoded: object = json.loads(raw)
    except ValueError as error:
        raise LaunchError(f"control message must be JSON: {error}.") from None
    if not isinstance(decoded, dict):
        raise LaunchError(f"control message must be an object, got {shorten(decoded)}.")
    values = cast("dict[str, object]", decoded)
    kind = _find_kind(values.pop("is", None), kinds)
    try:
        return from_plain(kind, values)
    except PlainValueError as error:
        raise LaunchError(
            f"{error} Run the same version of ronde on every host."
        ) from None


def _find_kind(name: object, kinds: tuple[type[T], ...]) -> type[T]:
    for kind in kinds:
        if kind.__name__ == name:
            return kind
    names = ", ".join(kind.__name__ for kind in kinds)
    raise LaunchError(f"message must be one of {names}, got {shorten(name)}.")


class Stream(IntEnum):
    """Which of a rank's two output streams."""

    STDOUT = 1
    STDERR = 2


class Output(NamedTuple):
    """Bytes that one rank wrote to one stream, as it wrote them."""

    worker: int
    stream: Stream
    data: bytes


class Relayed(NamedTuple):
    """Bytes of one connection to the store, in either direction."""

    epoch: int  # of which generation of ranks
    connection: int  # its number, which the agent gives and never gives again
    data: bytes  # empty when the connection is closed


_RAW: dict[int, type[Output | Relayed]] = {3: Output, 4: Relayed}
"""Kinds of frames whose bodies are two numbers and bytes."""


def encode(message: object) -> bytes:
    """Return a message as a frame."""
    for kind, raw in _RAW.items():
        if isinstance(message, raw):
            return encode_frame(kind, _HEAD.pack(*message[:2]) + message.data)
    return encode_frame(_JSON, encode_message(message))


def encode_frame(kind: int, body: bytes) -> bytes:
    length = len(body) + 1
    if length > MAX_FRAME_BYTES:
        raise LaunchError(
            f"control message must be at most {MAX_FRAME_BYTES} bytes, got {length}. "
            "Make the environment or the arguments smaller."
        )
    return _LENGTH.pack(length) + bytes((kind,)) + body


class MessageDecoder(Generic[T]):
    """Turns received bytes, cut anywhere, back into messages of some kinds."""

    def __init__(self, kinds: tuple[type[T], ...]) -> None:
        self._kinds = kinds
        self._splitter = Splitter(MAX_FRAME_BYTES)

    def feed(self, data: bytes) -> list[T]:
        """Return the messages that are complete now.

        LaunchError where it is none of them: the stream cannot be used further.
        """
        try:
            frames = self._splitter.feed(data)
        except StoreError as error:
            raise LaunchError(
                f"{error} Something other than ronde wrote to the control channel."
            ) from None
        return [self._open(frame[0], frame[1:]) for frame in frames]

    def _open(self, kind: int, body: bytes) -> T:
        if kind == _JSON:
            return decode_message(body, self._kinds)
        raw = _RAW.get(kind)
        if raw is None or len(body) < _HEAD.size:
            raise LaunchError(
                f"frame must be of kind {_JSON}, or of {list(_RAW)} with {_HEAD.size} "
                f"bytes or more, got kind {kind} with {len(body)} bytes. Run the same "
                "version of ronde on every host."
            )
        _find_kind(raw.__name__, self._kinds)
        number, other = _HEAD.unpack_from(body)
        message = Relayed(number, other, body[_HEAD.size :])
        if raw is Output:
            if other not in (1, 2):
                raise LaunchError(f"output stream must be 1 or 2, got {other}.")
            message = Output(number, Stream(other), message.data)
        return cast("T", message)


class MessageWriter:
    """Writes messages to where nothing waits, keeping what is not taken yet.

    ``write`` returns how many bytes it took, 0 for none now, or raises BrokenPipeError;
    at most ``limit_bytes`` are kept. What goes to or from the store comes after all
    messages.
    """

    def __init__(
        self, write: Callable[[memoryview], int], limit_bytes: int = 2 * MAX_FRAME_BYTES
    ) -> None:
        self._write = write
        self._limit_bytes = limit_bytes
        self._unsent = bytearray()
        self._relayed: deque[Relayed] = deque()
        self.relayed_bytes = 0  # of the store's that wait for the messages

    @property
    def waiting_bytes(self) -> int:
        """How much of the messages has not been taken yet."""
        return len(self._unsent)

    @property
    def is_writing(self) -> bool:
        """Whether ``flush`` should be called when more is taken."""
        return bool(self._unsent or self._relayed)

    def send(self, message: object) -> None:
        """Keep a message, and write what is taken now."""
        frame = encode(message)
        if len(self._unsent) + len(frame) > self._limit_bytes:
            raise LaunchError(
                f"unsent frames must stay under {self._limit_bytes} bytes, "
                f"got {len(self._unsent) + len(frame)}. The other side is stuck."
            )
        self._unsent += frame
        self._flush_messages()

    def relay(self, relayed: Relayed) -> None:
        self._relayed.append(relayed)
        self.relayed_bytes += len(relayed.data)
        self.flush()

    def flush(self) -> None:
        self._flush_messages()
        while self._relayed and not self._unsent:
            relayed = self._relayed.popleft()
            self.relayed_bytes -= len(relayed.data)
            self.send(relayed)

    def _flush_messages(self) -> None:
        taken = -1
        while self._unsent and taken:
            with memoryview(self._unsent) as unsent:
                taken = self._write(unsent)
            del self._unsent[:taken]


class Transport(Protocol):
    """Two directions of bytes, neither of which is ever waited for.

    Who has it polls ``read_fd``, and ``write_fd`` with something to write. ``read``
    returns what has come, empty at the end, None when nothing is there now; ``write``
    returns how many bytes were taken.
    """

    @property
    def read_fd(self) -> int: ...

    @property
    def write_fd(self) -> int: ...

    def read(self) -> bytes | None: ...

    def write(self, data: memoryview) -> int: ...


class PipeTransport:
    """Two pipes, which are made non-blocking here."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.read_fd, self.write_fd = read_fd, write_fd
        for fd in (read_fd, write_fd):
            os.set_blocking(fd, False)

    def read(self) -> bytes | None:
        try:
            return os.read(self.read_fd, _READ_BYTES)
        except BlockingIOError:
            return None

    def write(self, data: memoryview) -> int:
        try:
            return os.write(self.write_fd, data)
        except BlockingIOError:
            return 0
