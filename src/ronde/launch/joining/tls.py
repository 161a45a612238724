"""TLS for one job: a certificate of its own on the head, and none on the nodes."""

import datetime as dt
import os
import ssl
from dataclasses import dataclass

from ronde.errors import UsageError

_NAME = "ronde"


@dataclass(frozen=True, slots=True)
class HeadTls:
    """What the head listens with.

    Attributes:
        context: Has the certificate and its private key.
        certificate: As it is sent, in DER.
    """

    context: ssl.SSLContext
    certificate: bytes


def make_head_tls() -> HeadTls:
    """Make a certificate for this job alone; its private key reaches no disk.

    Raises:
        UsageError: The package that makes certificates is not installed.
    """
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
    """Return what a node connects with; the proof takes the place of an authority.

    See Note [Who proves what to whom] in ``proof``.
    """
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
