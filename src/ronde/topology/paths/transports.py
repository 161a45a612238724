"""What NCCL is told of its transports by its environment."""

from collections.abc import Mapping
from typing import NamedTuple

from ronde.errors import UsageError
from ronde.topology.paths.path import PathKind

# What a number means where a level is asked for, since before levels had names.
_OLD_LEVELS = (
    PathKind.LOC,
    PathKind.PIX,
    PathKind.PXB,
    PathKind.PHB,
    PathKind.SYS,
    PathKind.SYS,
)


_LEVELS = _PEERS, _DIRECT = "NCCL_P2P_LEVEL", "NCCL_NET_GDR_LEVEL"
_NO_PEERS = "NCCL_P2P_DISABLE"
_SWITCHES = (_NO_PEERS, "NCCL_PXN_DISABLE", "NCCL_NET_GDR_C2C", "NCCL_PXN_C2C")


class Transports(NamedTuple):
    """What NCCL is told by its environment.

    Attributes:
        peer_level: Farthest path by which GPUs reach one another (``NCCL_P2P_LEVEL``;
            ``LOC`` for ``NCCL_P2P_DISABLE=1``); none for its own choice.
        gdr_level: Farthest path for GPUDirect RDMA (``NCCL_NET_GDR_LEVEL``).
        has_relays: Whether GPUs pass on to adapters (``NCCL_PXN_DISABLE=0``).
        has_gdr_over_c2c: Whether C2C and PCI together are near enough for GPUDirect
            RDMA (``NCCL_NET_GDR_C2C=1``).
        relays_over_c2c: Whether they are for passing on (``NCCL_PXN_C2C=1``).
    """

    peer_level: PathKind | None = None
    gdr_level: PathKind | None = None
    has_relays: bool = True
    has_gdr_over_c2c: bool = True
    relays_over_c2c: bool = True


AS_IT_LIKES = Transports()
"""Without any word from the environment."""


def level_of(text: str) -> PathKind:
    """Return what NCCL reads in ``NCCL_P2P_LEVEL``: ``PIX``, or a number from 0.

    Raises:
        UsageError: It is neither; NCCL would ignore it.
    """
    if text.isascii() and text.isdigit():
        return _OLD_LEVELS[min(int(text[:9]), len(_OLD_LEVELS) - 1)]
    names = [kind for kind in PathKind if kind <= PathKind.SYS]
    if text in names:
        return PathKind(text)
    raise UsageError(
        f"level must be one of {', '.join(names)} or a number from 0 to 5, got "
        f"{text!r}. Leave it out for NCCL's own choice."
    )


def read_transports(settings: Mapping[str, str]) -> Transports:
    """Return what variables of NCCL's say, by their names.

    Raises:
        UsageError: One says nothing of how far GPUs and adapters reach, or its value is
            none that it may have.
    """
    unknown = sorted({*settings} - {*_LEVELS, *_SWITCHES})
    if unknown:
        raise UsageError(
            f"NCCL's settings must be of {', '.join((*_LEVELS, *_SWITCHES))}, got "
            f"{unknown[0]}. The others change no path; leave it out."
        )
    levels = {n: level_of(v) for n, v in settings.items() if n in _LEVELS}
    switches = {n: _is_on(n, v) for n, v in settings.items() if n in _SWITCHES}
    peer_level = levels.get(_PEERS)
    return Transports(
        peer_level=PathKind.LOC if switches.get(_NO_PEERS) else peer_level,
        gdr_level=levels.get(_DIRECT),
        has_relays=not switches.get("NCCL_PXN_DISABLE", False),
        has_gdr_over_c2c=switches.get("NCCL_NET_GDR_C2C", True),
        relays_over_c2c=switches.get("NCCL_PXN_C2C", True),
    )


def _is_on(name: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise UsageError(f"{name} must be 0 or 1, got {text!r}. Give one of them.")
    return text == "1"
