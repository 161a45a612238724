"""Messages and frames between controller and agent.

A frame is a 4-byte length (big endian, of the rest), a kind byte and a body; the length
is checked before anything is stored. Messages are named tuples, in the form of
``ronde.plain_values``.
"""

import os
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from struct import Struct
from typing import Generic, NamedTuple, Protocol, TypeVar, cast, get_args

from ronde import plain_values
from ronde.addresses import InterfaceAddress
from ronde.errors import LaunchError, StoreError
from ronde.store.protocol import MAX_FRAME_BYTES, Splitter
from ronde.topology.machine import Machine

T = TypeVar("T")
PROTOCOL = 16  # changes with any message; both sides must have the same
FIRST_CREDIT_BYTES = 16 << 10  # output that may be sent before any credit was granted

_READ_BYTES = 256 << 10
_LENGTH = Struct(">I")
_HEAD = Struct(">II")
_JSON = 1  # the kind of a frame whose body is a message as JSON


class WorkerSpec(NamedTuple):
    """A worker's id, with the variables and CPUs that differ between workers."""

    worker: int
    env: dict[str, str]  # these override the job's
    cpus: tuple[int, ...] = ()  # empty for all of the agent's


class NodeJob(NamedTuple):
    """To the agent: check that this job can start here, but start nothing yet."""

    epoch: int  # generation of the world, 0 for the first start
    job_marker: str  # random; RONDE_COOKIE of each process; no secret
    argv: tuple[str, ...]
    env: dict[str, str]  # of all ranks, added to the agent's own
    workers: tuple[WorkerSpec, ...]  # of this agent, ascending
    cwd: str  # of the ranks; empty for the agent's own
    grace_s: float  # from the stop signal to the sweep
    address: str  # numeric, of the rendezvous, where rank 0 is here
    master_port: int  # of the rendezvous; 0 for any
    # of an elastic job: the most workers here. It lasts until ``StopWorkers``, even
    # when all have ended. 0 for a plain job
    max_ranks: int = 0
    notice: tuple[str, ...] = ()  # sources of ``--notice`` to poll


class Start(NamedTuple):
    """To the agent: start the ranks, which rendezvous at this address."""

    master_addr: str
    master_port: int


class StartWorkers(NamedTuple):
    """To the agent of an elastic job: start more workers."""

    workers: tuple[WorkerSpec, ...]


class SignalWorker(NamedTuple):
    """To the agent of an elastic job: signal a worker's processes."""

    worker: int
    signal: int


class SendToWorkers(NamedTuple):
    """To the agent of an elastic job: send a text on the channels of workers."""

    workers: tuple[int, ...]  # empty for all that run there
    text: str


class Locate(NamedTuple):
    """To the agent: report the local address on the route to each address."""

    addresses: tuple[str, ...]
    port: int  # if not 0, it must also answer there


class StartProgram(NamedTuple):
    """To the agent: start a ``RemoteProgram``."""

    module: str


class Forward(NamedTuple):
    """To the agent: forward a signal to the ranks."""

    signal: int


class StopWorkers(NamedTuple):
    """To the agent: signal the ranks, and kill them after the grace period.

    With SIGKILL there is no grace period, and unsent output is dropped.
    """

    signal: int


class TakeStacks(NamedTuple):
    """To the agent: report the stacks of running workers."""

    workers: tuple[int, ...]  # empty for all


class Observe(NamedTuple):
    """To the agent: pass a question on to the observer of the job on this host."""

    line: str  # JSON, see ``ronde.monitor.observer``


class Credit(NamedTuple):
    """To the agent: more bytes of output may be sent."""

    num_bytes: int


class Ping(NamedTuple):
    """To the agent: heartbeat of the controller."""

    sent_at_s: float  # on the controller's clock; returned in ``Pong``
    lease_s: float  # the agent ends everything after so much silence,
    addresses: tuple[str, ...]  # or twice as much, if the host answers at one of these


class Hello(NamedTuple):
    """First message of an agent: its host, and the resources for ranks there."""

    protocol: int
    host: str  # its own name for itself
    identity: str  # equal for two agents on one machine
    machine: Machine
    interfaces: tuple[InterfaceAddress, ...]


class Located(NamedTuple):
    """From the agent: the answer to ``Locate``, in the form of ``locate()``."""

    sources: tuple[str, ...]


class ProgramLine(NamedTuple):
    """A line of the ``RemoteProgram``'s input or output."""

    line: str


class ProgramExited(NamedTuple):
    """From the agent: the ``RemoteProgram`` has ended, or did not start."""

    reason: str  # in half a sentence


class Ready(NamedTuple):
    """From the agent: the job can start here."""

    master_port: int  # reserved for rank 0; 0 where that is not here


class Refused(NamedTuple):
    """From the agent: the job cannot start; nothing was started."""

    reason: str
    is_usage: bool  # the user can change it


class Started(NamedTuple):
    """From the agent: a worker runs."""

    worker: int
    pid: int


class HostEnding(NamedTuple):
    """From the agent: Slurm or Kubernetes ends its part of the job with this signal."""

    signal: int


class HostLeaving(NamedTuple):
    """From the agent of an elastic job: its host will be reclaimed soon."""

    reason: str  # in half a sentence, about the host: ``AWS takes it at 10:31:02 UTC``


class Exited(NamedTuple):
    """From the agent: a worker has ended. Times are on the agent's monotonic clock."""

    worker: int
    status: int  # exit code, or minus the signal
    began_s: float  # when it reported its exit, dumped core, or was reaped
    traceback_s: float  # last Python traceback on stderr; 0 for none
    stopped_s: float  # when the job's end began; 0 for not yet
    evidence: str  # the kernel's report, in half a sentence, or empty


class ProcessStack(NamedTuple):
    """The stacks of one process of a worker."""

    pid: int
    name: str  # of its program
    state: str  # in the kernel, if there is no text
    text: str  # as ``faulthandler`` writes it, or empty


class WorkerText(NamedTuple):
    """A membership message of one worker."""

    worker: int
    text: str


class WorkerTexts(NamedTuple):
    """From the agent of an elastic job: new messages of workers."""

    texts: tuple[WorkerText, ...]


class StatusText(NamedTuple):
    """The newest status of one worker."""

    worker: int
    text: str  # JSON of a ``ronde.status.RankStatus``, unchecked
    age_s: float


class Statuses(NamedTuple):
    """From the agent, at most once a second: new statuses."""

    statuses: tuple[StatusText, ...]


class WorkerStopped(NamedTuple):
    """From the agent of an elastic job: a worker was stopped or continued."""

    worker: int
    is_stopped: bool


class WorkerEnding(NamedTuple):
    """From the agent of an elastic job: a worker is dying; ``Exited`` follows."""

    worker: int
    status: int  # as ``subprocess`` has it, not 0
    evidence: str


class Stacks(NamedTuple):
    """From the agent: the stacks of a worker, its own process first."""

    worker: int
    processes: tuple[ProcessStack, ...]


class Observed(NamedTuple):
    """From the agent: an answer from the observer."""

    line: str


class Notice(NamedTuple):
    """From the agent: a text to show to the user."""

    text: str


class Pong(NamedTuple):
    """From the agent: the answer to a ``Ping``, with its clock and its memory."""

    sent_at_s: float
    here_s: float
    used_bytes: int = 0  # of the control group nearest to its limit
    limit_bytes: int = 0  # 0 without one


class Finished(NamedTuple):
    """From the agent: all processes of the job have ended, except the ``stuck``."""

    num_swept: int  # processes that outlived their rank and were killed
    stuck: tuple[str, ...]  # processes that survive SIGKILL, by name


ToWorkers = Start | StartWorkers | SignalWorker | SendToWorkers | Forward | TakeStacks
JobOrder = ToWorkers | StopWorkers | Observe
ToAgent = NodeJob | JobOrder | Locate | StartProgram | ProgramLine | Credit | Ping
FromStart = Hello | Located | ProgramLine | ProgramExited | Ready | Refused
FromWorkers = Started | Exited | WorkerTexts | WorkerStopped | WorkerEnding | Stacks
FromJob = (
    FromWorkers
    | Statuses
    | Observed
    | HostEnding
    | HostLeaving
    | Notice
    | Pong
    | Finished
)
FromAgent = FromStart | FromJob
TO_AGENT: tuple[type[ToAgent], ...] = get_args(ToAgent)
FROM_AGENT: tuple[type[FromAgent], ...] = get_args(FromAgent)


def encode_message(message: object) -> bytes:
    return plain_values.encode_message(message).encode()


def decode_message(raw: bytes, kinds: tuple[type[T], ...]) -> T:
    try:
        return plain_values.decode_message(raw, kinds)
    except plain_values.PlainValueError as error:
        raise LaunchError(
            f"{error} Run the same version of ronde on every host."
        ) from None


class Stream(IntEnum):
    """The two output streams of a rank."""

    STDOUT = 1
    STDERR = 2


class Output(NamedTuple):
    """Bytes that a worker wrote to one stream."""

    worker: int
    stream: Stream
    data: bytes


class Relayed(NamedTuple):
    """Bytes of one connection to the store, in either direction."""

    epoch: int
    connection: int  # the agent's number for it, never used again
    data: bytes  # empty at the end of the connection


_RAW: dict[int, type[Output | Relayed]] = {3: Output, 4: Relayed}
"""Kinds of frames whose bodies are two numbers and bytes."""


def encode(message: object) -> bytes:
    kind, body = _JSON, b""
    for number, raw in _RAW.items():
        if isinstance(message, raw):
            kind, body = number, _HEAD.pack(*message[:2]) + message.data
    length = len(body := body or encode_message(message)) + 1
    if length > MAX_FRAME_BYTES:
        raise LaunchError(
            f"control message must be at most {MAX_FRAME_BYTES} bytes, got {length}. "
            "Make the environment or the arguments smaller."
        )
    return _LENGTH.pack(length) + bytes((kind,)) + body


class MessageDecoder(Generic[T]):
    """Decodes messages of some kinds from a stream of bytes."""

    def __init__(self, kinds: tuple[type[T], ...]) -> None:
        self._kinds = kinds
        self._splitter = Splitter(MAX_FRAME_BYTES)

    def feed(self, data: bytes) -> list[T]:
        """Add received bytes; return the messages that are complete now.

        Raises LaunchError for malformed data; after that, the stream is unusable.
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
        if raw not in self._kinds or len(body) < _HEAD.size:
            raise LaunchError(
                f"frame must be of kind {_JSON}, or of {list(_RAW)} with {_HEAD.size} "
                f"bytes or more, got kind {kind} with {len(body)} bytes. Run the same "
                "version of ronde on every host."
            )
        number, other = _HEAD.unpack_from(body)
        message = Relayed(number, other, body[_HEAD.size :])
        if raw is Output:
            if other not in (1, 2):
                raise LaunchError(f"output stream must be 1 or 2, got {other}.")
            message = Output(number, Stream(other), message.data)
        return cast("T", message)


class MessageWriter:
    """Buffered writer for a non-blocking pipe or socket.

    ``write`` returns the number of bytes written, perhaps 0, or raises BrokenPipeError.
    At most ``limit_bytes`` are buffered. Store traffic is sent after all messages.
    """

    def __init__(
        self, write: Callable[[memoryview], int], limit_bytes: int = 2 * MAX_FRAME_BYTES
    ) -> None:
        self._write = write
        self._limit_bytes = limit_bytes
        self._unsent = bytearray()
        self._relayed: deque[Relayed] = deque()
        self.relayed_bytes = 0  # of the store, waiting

    @property
    def waiting_bytes(self) -> int:
        return len(self._unsent)

    @property
    def is_writing(self) -> bool:
        return bool(self._unsent or self._relayed)

    def send(self, message: object) -> None:
        frame = encode(message)
        if len(self._unsent) + len(frame) > self._limit_bytes:
            raise LaunchError(
                f"more than {self._limit_bytes} bytes are unsent: the other side does "
                "not read."
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
        num_written = -1
        while self._unsent and num_written:
            with memoryview(self._unsent) as unsent:
                num_written = self._write(unsent)
            del self._unsent[:num_written]


class Transport(Protocol):
    """A non-blocking connection, polled by its owner.

    ``read`` returns new bytes, ``b""`` at the end, or None if there is no data yet.
    ``write`` returns the number of bytes written.
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
