"""Mutually authenticated TLS connections between the head node and joining nodes.

Both sides prove that they know the token, as in the note of
``ronde.store.authentication``, where the node's claim is its ``NodeInfo``. Until then
the head node parses nothing else, and the node sends nothing else. The token gives
access to the whole job. The functions for authentication never block: they yield the
event of ``select.poll`` to wait for.

Data is then sent in records of a length, a kind and a body. A record of a separate kind
marks the end of the data, and a last record has an exit code.
"""

import datetime as dt
import hmac
import os
import re
import select
import socket
import ssl
import stat
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeVar

from ronde.addresses import is_loopback, read_interfaces
from ronde.errors import LaunchError, StoreError, UsageError
from ronde.launch.host import SLOTS_CORES, resolve
from ronde.launch.signals import wait_for
from ronde.launch.wire.messages import PROTOCOL, decode_message, encode_message
from ronde.store.authentication import (
    GREETING_BYTES,
    NONCE_BYTES,
    ServerSession,
    SharedKey,
)
from ronde.store.protocol import Splitter

MIN_CHARACTERS = 32  # a shorter token could be guessed from one recorded proof
_MAX_BYTES = _RECEIVE_BYTES = 4096
_FOR_OTHERS = stat.S_IROTH | stat.S_IWOTH
_MAKE_ONE = "Make one: (umask 077; openssl rand -hex 32 > token)"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}")
T = TypeVar("T")
Steps = Generator[int, None, T]
_JOINING = b"ronde joins "
MAGIC = _JOINING + PROTOCOL.to_bytes(4, "big")
_HEAD_BYTES = 5  # length and kind of the record
_TLS_RECORD_BYTES = 16 << 10
_MAX_BODY_BYTES = _TLS_RECORD_BYTES - _HEAD_BYTES
_READ_BYTES = 256 << 10
_LAST_WORD_S = 0.5
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    # In total longer than the leases of head and agent.
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 20),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)
_GOODBYE_S = 2.0


def with_port(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def parse_endpoint(text: str, option: str) -> tuple[str, int]:
    """Parse ``HOST:PORT``, ``[IPV6]:PORT``, or ``PORT``, which leaves HOST empty."""
    host, colon, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    is_number = port.isascii() and port.isdecimal() and int(port) <= 65535
    is_host = is_bracketed or ":" not in host
    if not is_number or not is_host or bool(colon) != bool(host.strip("[]")):
        raise UsageError(
            f"{option} must be HOST:PORT or [IPV6]:PORT, got {text!r}. "
            f"Type: {option} node1:29400"
        )
    return host.strip("[]"), int(port)


def choose_address(host: str) -> str:
    found: Sequence[str] = ()
    with suppress(OSError):
        found = resolve(host or socket.gethostname())
    if host:
        # A name may have a loopback address besides the real one.
        found = [a for a in found if not is_loopback(a)] or found
        if found:
            return found[0]
        raise UsageError(
            f"--listen: the name {host!r} has no address. Type: --listen ADDRESS:PORT"
        )
    own = read_interfaces()
    named = [each.address for each in own if each.address in found]
    if named or len({each.interface for each in own}) == 1:
        return (named or [own[0].address])[0]
    names = ", ".join(f"{each.address} ({each.interface})" for each in own)
    found = f"several addresses: {names}" if own else "none that others can reach"
    raise UsageError(
        f"--listen must name an address, since this machine has {found}. "
        "Type: --listen ADDRESS:PORT"
    )


def read_token(path: str) -> SharedKey:
    """Read the token from a file, or from standard input for the path ``-``."""
    try:
        with open(0 if path == "-" else path, "rb", closefd=path != "-") as file:
            status = os.fstat(file.fileno())
            is_file = path != "-" and stat.S_ISREG(status.st_mode)
            if is_file and status.st_mode & _FOR_OTHERS:
                raise UsageError(
                    f"--token-file {path!r} can be read or written by every user (mode "
                    f"{stat.S_IMODE(status.st_mode):04o}). Type: chmod 600 {path}, or "
                    "set defaultMode: 0440 for a Kubernetes Secret"
                )
            text = file.read(2 * _MAX_BYTES).strip()
    except OSError as error:
        raise UsageError(
            f"cannot read --token-file {path!r}: {error.strerror}. {_MAKE_ONE}"
        ) from None
    if len(text) < MIN_CHARACTERS:
        raise UsageError(
            f"token in {path!r} must have at least {MIN_CHARACTERS} characters, "
            f"got {len(text)}. {_MAKE_ONE}"
        )
    if len(text) > _MAX_BYTES or any(not 33 <= byte <= 126 for byte in text):
        raise UsageError(
            f"token in {path!r} must be at most {_MAX_BYTES} printable ASCII "
            f"characters without blanks. {_MAKE_ONE}"
        )
    return SharedKey(text)


class NodeInfo(NamedTuple):
    """A node's description of itself when it joins."""

    host: str  # its name, for messages
    slots: int  # as in ``Host``
    number: int = -1  # of its place among the nodes; -1 if unknown


def decode_node_info(raw: bytes) -> NodeInfo:
    node_info = decode_message(raw, (NodeInfo,))
    if not _NAME.fullmatch(node_info.host):
        raise LaunchError(f"host must be a valid host name, got {node_info.host!r}.")
    if node_info.slots == 0 or node_info.slots < SLOTS_CORES:
        raise LaunchError(f"slots must be at least 1, got {node_info.slots}.")
    return node_info


def host_name(nodename: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", nodename).lstrip(".-")[:253] or "node"


class HeadTls(NamedTuple):
    """The head node's TLS context for one job; its key exists only in memory."""

    context: ssl.SSLContext
    certificate: bytes  # in DER


def make_head_tls() -> HeadTls:
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise UsageError(
            "the package cryptography, which --listen needs, is not installed. "
            "Type: pip install 'ronde[agent]'"
        ) from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "ronde")])
    now = dt.datetime.now(dt.UTC)
    day = dt.timedelta(days=1)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + 3650 * day)
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding
    pem = key.private_bytes(
        encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # no session is resumed
    # ssl reads certificates only from files: use one in memory.
    fd = os.memfd_create("certificate")
    try:
        os.write(fd, pem + certificate.public_bytes(encoding.PEM))
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return HeadTls(context, certificate.public_bytes(encoding.DER))


def make_node_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def authenticate_node(
    sock: ssl.SSLSocket, token: SharedKey, certificate: bytes
) -> Steps[NodeInfo]:
    """Run the head node's side of the authentication; the node's proof comes first."""
    yield from _go_on(sock.do_handshake)
    session = ServerSession(token, MAGIC, certificate)
    # Shorter than one TLS record: sent whole or not at all.
    yield from _go_on(partial(sock.send, session.unsent))
    session.unsent.clear()
    while not session.is_trusted:
        session.feed((yield from _receive(sock, _RECEIVE_BYTES)))
    decoded = decode_node_info(session.claim)
    yield from _go_on(partial(sock.send, session.unsent))
    return decoded


def answer_node(sock: ssl.SSLSocket, refusal: str = "") -> None:
    """Let an authenticated node in, or send it the reason for a refusal."""
    text = refusal.encode()
    with suppress(OSError):  # its end is noticed by reading
        sock.send(len(text).to_bytes(2, "big") + text)


def authenticate_head(
    sock: ssl.SSLSocket, token: SharedKey, node_info: NodeInfo
) -> Steps[None]:
    """Run the node's side of the authentication; the node's proof comes first."""
    yield from _go_on(sock.do_handshake)
    certificate = sock.getpeercert(binary_form=True) or b""
    greeting = yield from _receive_all(sock, GREETING_BYTES)
    if not greeting.startswith(_JOINING):
        raise LaunchError("the program on that port does not speak ronde's protocol.")
    protocol = int.from_bytes(greeting[len(_JOINING) : -NONCE_BYTES], "big")
    if protocol != PROTOCOL:
        raise LaunchError(
            f"the head node speaks protocol {protocol}, this node {PROTOCOL}. "
            "Run the same version of ronde on every node."
        )
    claim = encode_message(node_info)
    _, hello, expected = token.answer(greeting, claim, certificate)
    yield from _go_on(partial(sock.send, hello))
    reply = yield from _receive_all(sock, len(expected))
    if not hmac.compare_digest(reply, expected):
        raise StoreError(
            "the program that answered does not know the token: it is not the head "
            "node, or it intercepts the connection."
        )
    size = int.from_bytes((yield from _receive_all(sock, 2)), "big")
    if size:
        refusal = yield from _receive_all(sock, size)
        raise LaunchError(refusal.decode("utf-8", "backslashreplace"))


def _go_on(call: Callable[[], T]) -> Steps[T]:
    while True:
        try:
            return call()
        except ssl.SSLWantReadError:
            yield select.POLLIN
        except ssl.SSLWantWriteError:
            yield select.POLLOUT


def _receive(sock: ssl.SSLSocket, most: int) -> Steps[bytes]:
    data = yield from _go_on(partial(sock.recv, most))
    if not data:
        raise EOFError("the other side closed the connection")
    return data


def _receive_all(sock: ssl.SSLSocket, size: int) -> Steps[bytes]:
    received = b""
    while len(received) < size:
        received += yield from _receive(sock, size - len(received))
    return received


# Kinds of records. A result, an exit code, may follow the end of the data.
_DATA, _END, _RESULT = range(3)


def _record(kind: int, body: bytes | memoryview = b"") -> bytes:
    return (1 + len(body)).to_bytes(4, "big") + bytes((kind,)) + body


class TlsChannel:
    """An authenticated connection that serves as an ``AgentTransport``."""

    error_fd = -1  # the node shows the errors of its agent itself

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self.result: int | None = None  # of the other side, its last record
        self.is_ended = False  # the other side sends no more data
        self.is_closed = False  # by this side
        self._sock = sock
        self._splitter = Splitter(_TLS_RECORD_BYTES)
        self._is_broken = False
        self._record = b""
        for level, option, value in _KEEPALIVE:
            sock.setsockopt(level, option, value)

    def require_answers(self, limit_s: float) -> None:
        if self.read_fd >= 0:
            level, option = socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT
            self._sock.setsockopt(level, option, int(limit_s * 1000))

    @property
    def silence_s(self) -> float:
        """Time since the last packet of the other host; its kernel is asked often."""
        # Source: tcpi_last_ack_recv in linux/tcp.h.
        info = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
        return int.from_bytes(info[56:60], sys.byteorder) / 1000

    def sever(self) -> None:
        """Make the next ``read`` find the end of the connection."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    @property
    def read_fd(self) -> int:
        return self._sock.fileno()

    write_fd = read_fd

    def read(self) -> bytes | None:
        data = b""
        if self.result is None and not self._is_broken:
            try:
                records = self._splitter.feed(self._pull())
            except (OSError, StoreError):
                self._is_broken, records = True, []
            data = b"".join(each[1:] for each in records if each[0] == _DATA)
            for last in (each for each in records if each[0] != _DATA):
                self.is_ended = True
                self.result = last[-1] if last[0] == _RESULT else None
        is_over = self.is_ended or self._is_broken
        return data if data or is_over else None

    def _pull(self) -> bytes:
        pulled = bytearray()
        # A whole TLS record at a time, so that no decrypted rest is left, which poll
        # would not show.
        with suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
            while len(pulled) < _READ_BYTES and not self._is_broken:
                data = self._sock.recv(_TLS_RECORD_BYTES)
                self._is_broken = not data
                pulled += data
        return bytes(pulled)

    def write(self, data: memoryview) -> int:
        self._record = self._record or _record(_DATA, data[:_MAX_BODY_BYTES])
        size = len(self._record) - _HEAD_BYTES
        return size if self._send_record() else 0

    def _send_record(self) -> bool:
        try:
            # At most one TLS record: sent whole or not at all.
            self._sock.send(self._record)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except OSError as error:
            raise BrokenPipeError(str(error)) from None
        self._record = b""
        return True

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the peer's exit code, and drop its data.

        Returns 0 if the peer closed the connection without a code, None on a timeout.
        """
        ends_at = time.monotonic() + timeout_s
        while self.result is None and not self._is_broken:
            left_s = ends_at - time.monotonic()
            if left_s <= 0:
                return None
            wait_for([self.read_fd], [], left_s)
            self.read()
        return self.result or 0

    def close(self) -> None:
        self.is_closed = True
        self._send(_record(_END))

    def send_result(self, code: int) -> None:
        self._send(_record(_RESULT, bytes((code & 0xFF,))))

    def _send(self, record: bytes) -> None:
        ends_at = time.monotonic() + _LAST_WORD_S
        waiting = [record] if self.read_fd >= 0 else []
        with suppress(BrokenPipeError):
            while waiting or self._record:
                self._record = self._record or waiting.pop()
                left_s = ends_at - time.monotonic()
                if not (self._send_record() or wait_for([], [self.write_fd], left_s)):
                    return

    def kill(self) -> None:
        self._is_broken = self.is_closed = True
        self._sock.close()


def release(nodes: Sequence[TlsChannel], code: int) -> None:
    for node in nodes:
        node.send_result(code)
    ends_at = time.monotonic() + _GOODBYE_S
    for node in nodes:
        if node.read_fd >= 0:
            node.wait(ends_at - time.monotonic())
        node.kill()
