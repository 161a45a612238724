"""Addresses and encrypted connections between the head and the nodes that join.

What goes through are records: a kind, a length, a body. TLS alone would do for the
bytes, but not for their end: the head has to close the agent's input and to send the
job's exit code after that.
"""

import datetime as dt
import os
import select
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct

from ronde.addresses import InterfaceAddress, family_of, is_loopback, read_interfaces
from ronde.errors import LaunchError, UsageError
from ronde.launch.signals import wait_for

_WILDCARDS = frozenset({"0.0.0.0", "::"})  # noqa: S104 - to be warned of
_NAME = "ronde"
_HEAD = Struct(">BH")
_TLS_RECORD_BYTES = 16 << 10
_MAX_BODY_BYTES = _TLS_RECORD_BYTES - _HEAD.size
_READ_BYTES = 256 << 10
_LAST_WORD_S = 0.5
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    # Later than the head and the agent give each other up.
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 3),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)
_GOODBYE_S = 2.0
_UNANSWERED_NODE_S = 20.0  # longer than the head gives a silent node


def is_wildcard(address: str) -> bool:
    """Say whether listening there would be listening on all networks."""
    return address in _WILDCARDS


def with_port(address: str, port: int) -> str:
    """Return address and port as one types them."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def parse_endpoint(text: str, option: str) -> tuple[str, int]:
    """Read ``HOST:PORT``, ``[IPV6]:PORT`` or ``PORT``, whose host is empty."""
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


def choose_address(host: str, interface: str = "") -> str:
    """Return the one numeric address to listen on."""
    if host:
        return _resolve(host)
    own = [a for a in read_interfaces() if interface in ("", a.interface)]
    named = [] if interface else _resolve_all(socket.gethostname())
    for each in own:
        if each.address in named:
            return each.address
    first_of_each = {each.interface: each.address for each in reversed(own)}
    if len(first_of_each) == 1:
        return first_of_each.popitem()[1]
    raise UsageError(
        f"--listen must say one address of this machine, got a port alone, and there "
        f"{_several(own)}. Type: --listen ADDRESS:PORT"
    )


def _several(own: Sequence[InterfaceAddress]) -> str:
    if not own:
        return "is none that others could reach"
    names = ", ".join(f"{each.address} ({each.interface})" for each in own)
    return f"are several: {names}"


def _resolve(host: str) -> str:
    found = _resolve_all(host)
    # A name may stand for its loopback address besides the real one.
    found = [a for a in found if not is_loopback(a)] or found
    if not found:
        raise UsageError(
            f"--listen must be an address of this machine, got {host!r}, which no "
            "address is known for. Type: --listen ADDRESS:PORT"
        )
    return found[0]


def _resolve_all(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def listen(address: str, port: int, backlog: int) -> socket.socket:
    """Return a non-blocking socket that listens there and nowhere else."""
    try:
        sock = socket.create_server(
            (address, port), family=family_of(address), backlog=backlog
        )
    except OSError as error:
        raise UsageError(
            f"--listen must be an address of this machine with a free port, got "
            f"{with_port(address, port)}: {error.strerror or error}."
        ) from None
    sock.settimeout(0)
    return sock


@dataclass(frozen=True, slots=True)
class HeadTls:
    """What the head listens with."""

    context: ssl.SSLContext  # has the certificate and its private key
    certificate: bytes  # as it is sent, in DER


def make_head_tls() -> HeadTls:
    """Make a certificate for this job alone; its private key reaches no disk."""
    pem, certificate = _make_certificate()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Nobody comes a second time: each connection proves itself anew.
    context.num_tickets = 0
    # ssl reads certificates from files only; this one lies in memory.
    fd = os.memfd_create("certificate")
    try:
        os.write(fd, pem)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return HeadTls(context, certificate)


def make_node_context() -> ssl.SSLContext:
    """Return what a node connects with; the proof takes the place of an authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _make_certificate() -> tuple[bytes, bytes]:
    """Return key and certificate as PEM, and the certificate as DER."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise UsageError(
            "cryptography must be installed to let nodes join, but it is not. "
            "Type: pip install 'ronde[agent]'"
        ) from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
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
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ) + certificate.public_bytes(serialization.Encoding.PEM)
    return pem, certificate.public_bytes(serialization.Encoding.DER)


class _Kind(IntEnum):
    DATA = 0
    END = 1  # there is no more data in this direction; the result is still to come
    RESULT = 2  # the last word: an exit code


class TlsChannel:
    """One proven connection, from either side; nothing is ever waited for."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self.result: int | None = None  # the other side's last word, once it has come
        self.is_ended = False  # whether the other side sends no more data
        self._sock = sock
        self._received = bytearray()
        self._is_broken = False
        self._record = b""
        for level, option, value in _KEEPALIVE:
            sock.setsockopt(level, option, value)

    def require_answers(self, limit_s: float) -> None:
        """Count the other side as gone when it takes nothing for so long.

        Without this only a side that is silent while nothing is on its way to it is
        found out. It does not suit a side that may stand still for good reason: for the
        kernel a receiver that takes nothing is no better than none.
        """
        if self.fd >= 0:
            level, option = socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT
            self._sock.setsockopt(level, option, int(limit_s * 1000))

    @property
    def fd(self) -> int:
        return self._sock.fileno()

    def read(self) -> bytes | None:
        """Return all data that is there, empty at the end, None when there is none now.

        The end is the other side's result or the end of the connection.
        """
        if self.result is not None or self._is_broken:
            return b""
        try:
            self._pull()
            data = self._unpack()
        except (OSError, LaunchError):
            # Broken, or no records: either way there is nobody to talk to any more.
            self._is_broken = True
            data = b""
        if data or self.result is not None or self._is_broken:
            return data
        return None

    def _pull(self) -> None:
        pulled = 0
        while pulled < _READ_BYTES:
            try:
                # Room for a whole TLS record: so nothing decrypted ever stays behind,
                # of which no poll would tell.
                data = self._sock.recv(_TLS_RECORD_BYTES)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            if not data:
                self._is_broken = True
                return
            self._received += data
            pulled += len(data)

    def _unpack(self) -> bytes:
        data: list[bytes] = []
        start = 0
        while len(self._received) - start >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._received, start)
            begin = start + _HEAD.size
            if len(self._received) < begin + length:
                break
            start = begin + length
            body = bytes(memoryview(self._received)[begin:start])
            if kind == _Kind.DATA:
                data.append(body)
            elif kind == _Kind.END:
                self.is_ended = True
            elif kind == _Kind.RESULT and length == 1:
                self.is_ended = True
                self.result = body[0]
            else:
                raise LaunchError(f"record must be one of ours, got kind {kind}.")
        del self._received[:start]
        return b"".join(data)

    def write(self, data: memoryview) -> int:
        """Return how many bytes were taken, 0 when none are taken now.

        After a 0 the next call must begin with the same bytes: TLS may have encrypted
        them already.
        """
        piece = data[:_MAX_BODY_BYTES]
        if not self._record:
            self._record = _HEAD.pack(_Kind.DATA, len(piece)) + piece
        taken = len(self._record) - _HEAD.size
        return taken if self._send_record() else 0

    def _send_record(self) -> bool:
        try:
            # Not longer than one TLS record: taken whole or not at all.
            self._sock.send(self._record)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except OSError as error:
            raise BrokenPipeError(str(error)) from None
        self._record = b""
        return True

    def end(self) -> None:
        self._say(_HEAD.pack(_Kind.END, 0))

    def tell_result(self, code: int) -> None:
        self._say(_HEAD.pack(_Kind.RESULT, 1) + bytes((code & 0xFF,)))

    def _say(self, record: bytes) -> None:
        """Send a record after the one that is in hand; who is gone does not get it."""
        ends_at = time.monotonic() + _LAST_WORD_S
        waiting = [record]
        poll = select.poll()
        if self.fd < 0:
            return
        poll.register(self.fd, select.POLLOUT)
        try:
            while self._record or waiting:
                self._record = self._record or waiting.pop()
                if not self._send_record():
                    left_s = ends_at - time.monotonic()
                    if left_s <= 0 or not poll.poll(left_s * 1000):
                        return
        except BrokenPipeError:
            return

    def close(self) -> None:
        self._is_broken = True
        self._sock.close()


class TlsTransport:
    """A connection to an agent of a joined node; see ``node.AgentTransport``."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._channel = TlsChannel(sock)
        # A node never stands still; a head does that its user has suspended.
        self._channel.require_answers(_UNANSWERED_NODE_S)

    @property
    def read_fd(self) -> int:
        return self._channel.fd

    @property
    def write_fd(self) -> int:
        return self._channel.fd

    @property
    def error_fd(self) -> int:
        return -1

    def read(self) -> bytes | None:
        return self._channel.read()

    def write(self, data: memoryview) -> int:
        return self._channel.write(data)

    def wait(self, timeout_s: float) -> int | None:
        ends_at = time.monotonic() + timeout_s
        while (data := self._channel.read()) != b"":
            left_s = ends_at - time.monotonic()
            if left_s <= 0 or (
                data is None and not wait_for([self.read_fd], [], left_s)
            ):
                return None
        return self._channel.result or 0

    def close(self) -> None:
        self._channel.end()

    def kill(self) -> None:
        self._channel.close()

    def tell_result(self, code: int) -> None:
        """Tell the node how the job ended: with this exit code it ends itself."""
        self._channel.tell_result(code)


def release(transports: Sequence[TlsTransport], code: int) -> None:
    """Tell all nodes the job's exit code and let them go.

    It waits a little for their end: a connection that is closed while something of
    theirs is unread is reset, and what they were told is lost.
    """
    for transport in transports:
        transport.tell_result(code)
    ends_at = time.monotonic() + _GOODBYE_S
    for transport in transports:
        if transport.read_fd >= 0:
            transport.wait(max(0.0, ends_at - time.monotonic()))
        transport.kill()
