"""A host's RDMA adapters and their ports, as the kernel shows them in /sys."""

import ctypes
import os
from pathlib import Path

from ronde.check.facts import Value
from ronde.topology.kernel_files import list_names, read_number, read_text
from ronde.topology.machine import parse_rate

_LIBRARY = "libibverbs.so.1"
_LIBRARY_DIRS = ("lib", "lib64", "usr/lib", "usr/lib64", "usr/local/lib")
_MAX_GIDS = 64
_NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
_FLAPS = "link_downed"
_ERRORS = {
    "counters": (
        "symbol_error",
        "link_error_recovery",
        _FLAPS,
        "port_rcv_errors",
        "local_link_integrity_errors",
    ),
    "hw_counters": (
        "out_of_sequence",
        "packet_seq_err",
        "local_ack_timeout_err",
        "rnr_nak_retry_err",
    ),
}
"""By directory of a port, what counts what should not be."""


def read_adapters(root: str) -> dict[str, Value]:
    """Return by adapter its ``firmware``, ``model`` and ``board``; empty: not told."""
    found: dict[str, Value] = {}
    for name in list_names(f"{root}/sys/class/infiniband"):
        own = f"{root}/sys/class/infiniband/{name}"
        found[name] = {
            "firmware": read_text(f"{own}/fw_ver"),
            "model": read_text(f"{own}/hca_type"),
            "board": read_text(f"{own}/board_id"),
        }
    return found


def read_ports(root: str) -> dict[str, Value]:
    """Return the ports of all adapters, by names such as ``mlx5_0:1``.

    Each has ``state`` and ``physical_state`` as the kernel calls them, such as
    ``ACTIVE`` and ``LinkUp``, ``mbit_per_s``, ``layer`` (``InfiniBand`` or
    ``Ethernet``), ``lid``, ``manager_lid`` (0: none), ``gids`` and ``downs``: how often
    the link went down (-1: not told). A GID has ``address``, ``type`` and
    ``interface``; empty ones are left out.

    Raises:
        OSError: A port cannot be read.
    """
    found: dict[str, Value] = {}
    top = f"{root}/sys/class/infiniband"
    for adapter in list_names(top):
        is_function = _is_function(f"{top}/{adapter}")
        for port in list_names(f"{top}/{adapter}/ports"):
            own = f"{top}/{adapter}/ports/{port}"
            downs = f"{own}/counters/{_FLAPS}"
            found[f"{adapter}:{port}"] = {
                "state": _behind_colon(own, "state"),
                "physical_state": _behind_colon(own, "phys_state"),
                "mbit_per_s": parse_rate(read_text(f"{own}/rate")),
                "layer": read_text(f"{own}/link_layer"),
                "lid": _hex(read_text(f"{own}/lid")),
                "manager_lid": _hex(read_text(f"{own}/sm_lid")),
                "gids": _read_gids(own),
                "downs": -1 if is_function else read_number(downs, -1),
            }
    return found


def read_errors(root: str) -> dict[str, dict[str, int]]:
    """Return by port the errors that it has counted, as far as it does so, by name.

    Counters may start anew, and some stop at their highest number. Virtual functions
    are left out.
    """
    found: dict[str, dict[str, int]] = {}
    top = f"{root}/sys/class/infiniband"
    for adapter in list_names(top):
        if _is_function(f"{top}/{adapter}"):
            continue
        for port in list_names(f"{top}/{adapter}/ports"):
            own = f"{top}/{adapter}/ports/{port}"
            counts = {
                name: read_number(f"{own}/{directory}/{name}", -1)
                for directory, names in _ERRORS.items()
                for name in names
            }
            told = {name: count for name, count in counts.items() if count >= 0}
            if told:
                found[f"{adapter}:{port}"] = told
    return found


def _is_function(adapter: str) -> bool:
    """Say whether a counter that is read makes some drivers fill the kernel's log."""
    return Path(f"{adapter}/device/physfn").exists()


def _behind_colon(own: str, name: str) -> str:
    """Return ``ACTIVE`` of ``4: ACTIVE``."""
    return Path(f"{own}/{name}").read_text(encoding="ascii").partition(":")[2].strip()


def _hex(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        return 0


def _read_gids(own: str) -> dict[str, Value]:
    found: dict[str, Value] = {}
    indices = sorted(int(n) for n in list_names(f"{own}/gids") if n.isdecimal())
    for index in indices[:_MAX_GIDS]:
        address = read_text(f"{own}/gids/{index}")
        if address and address != _NO_GID:
            found[str(index)] = {
                "address": address,
                "type": read_text(f"{own}/gid_attrs/types/{index}"),
                "interface": read_text(f"{own}/gid_attrs/ndevs/{index}"),
            }
    return found


def read_device_files(root: str) -> dict[str, bool]:
    """Return by its name whether each ``uverbs`` file may be opened."""
    directory = f"{root}/dev/infiniband"
    return {
        name: os.access(f"{directory}/{name}", os.R_OK | os.W_OK)
        for name in list_names(directory)
        if name.startswith("uverbs")
    }


def has_library(root: str) -> bool:
    """Say whether NCCL would find the library by which it speaks to adapters."""
    if not root:
        try:
            ctypes.CDLL(_LIBRARY)
        except OSError:
            return False
        return True
    places = (Path(root) / directory for directory in _LIBRARY_DIRS)
    return any(
        (place / _LIBRARY).exists() or any(place.glob(f"*-linux-gnu/{_LIBRARY}"))
        for place in places
    )
