"""Addresses and encrypted connections between the head and the nodes that join.

What goes through are records: a kind, a length, a body. TLS alone would do but for the
end: the head closes the agent's input, and sends the job's exit code after that.
"""

import datetime as dt
import os
import socket
import ssl
import time
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from ronde.addresses import family_of, is_loopback, read_interfaces
from ronde.errors import LaunchError, UsageError
from ronde.launch.signals import wait_for

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


def with_port(address: str, port: int) -> str:
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


def choose_address(host: str) -> str:
    if host:
        found = _resolve(host)
        # A name may stand for its loopback address besides the real one.
        found = [a for a in found if not is_loopback(a)] or found
        if found:
            return found[0]
        raise UsageError(
            f"--listen must be an address of this machine, got {host!r}, which no "
            "address is known for. Type: --listen ADDRESS:PORT"
        )
    own, named = read_interfaces(), _resolve(socket.gethostname())
    for each in own:
        if each.address in named:
            return each.address
    first_of_each = {each.interface: each.address for each in reversed(own)}
    if len(first_of_each) == 1:
        return first_of_each.popitem()[1]
    names = ", ".join(f"{each.address} ({each.interface})" for each in own)
    there = f"are several: {names}" if own else "is none that others could reach"
    raise UsageError(
        "--listen must name one address of this machine, got a port alone, and there "
        f"{there}. Type: --listen ADDRESS:PORT"
    )


def _resolve(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def listen(address: str, port: int, backlog: int) -> socket.socket:
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


class HeadTls(NamedTuple):
    """What the head listens with, made for this job; the key reaches no disk."""

    context: ssl.SSLContext  # has the certificate and its private key
    certificate: bytes  # as it is sent, in DER


def make_head_tls() -> HeadTls:
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
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ) + certificate.public_bytes(serialization.Encoding.PEM)
    return pem, certificate.public_bytes(serialization.Encoding.DER)


class _Kind(IntEnum):
    DATA = 0
    END = 1  # there is no more data in this direction; the result is still to come
    RESULT = 2  # the last record: an exit code


class TlsChannel:
    """One authenticated connection, from either side; an ``AgentTransport``."""

    error_fd = -1  # the node shows its agent's complaints itself

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
        """Count the other side as gone when it takes nothing for so long."""
        if self.read_fd >= 0:
            level, option = socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT
            self._sock.setsockopt(level, option, int(limit_s * 1000))

    @property
    def read_fd(self) -> int:
        """Readable when ``read`` has something; -1 when it was closed."""
        return self._sock.fileno()

    write_fd = read_fd

    def read(self) -> bytes | None:
        """Return all data that is there, empty at the end, None for none now."""
        data = b""
        if self.result is None and not self._is_broken:
            try:
                self._pull()
                data = self._unpack()
            except (OSError, LaunchError):
                # Broken, or no records: either way there is nobody any more.
                self._is_broken = True
        is_over = self.is_ended or self._is_broken
        return data if data or is_over else None

    def _pull(self) -> None:
        pulled = 0
        # Room for a whole TLS record: so nothing decrypted ever stays behind, which no
        # poll would show.
        with suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
            while pulled < _READ_BYTES and not self._is_broken:
                data = self._sock.recv(_TLS_RECORD_BYTES)
                self._is_broken = not data
                self._received += data
                pulled += len(data)

    def _unpack(self) -> bytes:
        data, start = list[bytes](), 0
        while len(self._received) - start >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._received, start)
            begin = start + _HEAD.size
            if len(self._received) < begin + length:
                break
            start = begin + length
            body = bytes(memoryview(self._received)[begin:start])
            is_result = kind == _Kind.RESULT and length == 1
            if kind == _Kind.DATA:
                data.append(body)
            elif kind == _Kind.END or is_result:
                self.is_ended = True
                self.result = body[0] if is_result else self.result
            else:
                raise LaunchError(f"record must be one of ours, got kind {kind}.")
        del self._received[:start]
        return b"".join(data)

    def write(self, data: memoryview) -> int:
        """Return how many bytes were taken, 0 when none are taken now."""
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

    def wait(self, timeout_s: float | None) -> int | None:
        """Return the other side's result, 0 where it went without; None at the end.

        Data that comes before is lost.
        """
        ends_at = time.monotonic() + (timeout_s or 0.0)
        while self.result is None and not self._is_broken:
            left_s = None if timeout_s is None else ends_at - time.monotonic()
            if left_s is not None and left_s <= 0:
                return None
            wait_for([self.read_fd], [], left_s)
            self.read()
        return self.result or 0

    def close(self) -> None:
        """Announce that there is no more data; a result may follow."""
        self._send(_HEAD.pack(_Kind.END, 0))

    def send_result(self, code: int) -> None:
        self._send(_HEAD.pack(_Kind.RESULT, 1) + bytes((code & 0xFF,)))

    def _send(self, record: bytes) -> None:
        """Send a record after the one that is in hand; who is gone does not get it."""
        ends_at = time.monotonic() + _LAST_WORD_S
        waiting = [record]
        if self.read_fd < 0:
            return
        with suppress(BrokenPipeError):
            while self._record or waiting:
                self._record = self._record or waiting.pop()
                if not self._send_record():
                    left_s = max(0.0, ends_at - time.monotonic())
                    if not wait_for([], [self.write_fd], left_s):
                        return

    def kill(self) -> None:
        self._is_broken = True
        self._sock.close()


def release(nodes: Sequence[TlsChannel], code: int) -> None:
    """Send all nodes the job's exit code, with which they end, and let them go."""
    for node in nodes:
        node.send_result(code)
    ends_at = time.monotonic() + _GOODBYE_S
    for node in nodes:
        if node.read_fd >= 0:
            node.wait(max(0.0, ends_at - time.monotonic()))
        node.kill()
