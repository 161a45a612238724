"""Hosts as a host file."""

from collections.abc import Iterator, Sequence

from ronde.launch.hosts.host import SLOTS_OPEN, Host


def tell_hostfile(hosts: Sequence[Host]) -> str:
    """Return a host file that names these hosts and says all that is known of them.

    Without hosts it has a comment alone, so that nothing is started by it.
    """
    if not hosts:
        return "# no host is ready\n"
    return "".join(f"{' '.join(_words(host))}\n" for host in hosts)


def _words(host: Host) -> Iterator[str]:
    yield f"[{host.name}]" if ":" in host.name else host.name
    if host.slots != SLOTS_OPEN:
        yield f"slots={host.slots}"
    if host.user:
        yield f"user={host.user}"
    if host.port:
        yield f"port={host.port}"
    if host.address:
        yield f"addr={host.address}"
    if host.gpus:
        yield f"gpus={','.join(host.gpus)}"
    for name, value in host.labels.items():
        yield f"label.{name}={value}"
