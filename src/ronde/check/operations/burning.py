"""Computing on a host: a little to see how fast it is, for long to see how well."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any, cast

from ronde.check.facts import Value
from ronde.check.operations.site import Site

_MAX_SPIN_S = 5.0
_BASE, _EXPONENT, _MODULUS = 3, (1 << 512) - 1, (1 << 521) - 1
"""Half a millisecond or so, in the interpreter's own arithmetic: no library of which a
host may have another one, and no instructions that some processors lack."""

_MAX_CPUS = 8
_NUM_PIECES = 8
"""On each CPU of a tour: the first ones find cold caches and a slow clock."""

_BESIDES_S = 110.0
"""For torch to be imported, drivers to start, and each GPU to copy."""

_KILLED_S = 1.0
_PACKAGE_DIR = __file__.rpartition("/ronde/check/")[0]
_BOOT = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from ronde.check.operations.product import main; main()"
)
_MAX_SAID_CHARS = 200


def spin(_site: Site, question: dict[str, Value]) -> dict[str, Value]:
    """Compute the same again and again for ``seconds``, where the system puts it.

    Returns:
        ``wall_s`` for one piece of work, waiting included: what a host that must share
        its CPUs, or is limited, has more of. ``cpu_s`` of the quickest one, on any of
        some CPUs that are spread over the host: what a slower processor has more of. A
        busy neighbour on the same core slows one CPU, and says nothing of the others.
    """
    seconds = min(float(question["seconds"]), _MAX_SPIN_S)
    begun_s = now_s = time.monotonic()
    num_pieces, best_s = 0, float("inf")
    while num_pieces == 0 or now_s < begun_s + seconds:
        best_s = min(best_s, _compute_piece())
        num_pieces += 1
        now_s = time.monotonic()
    return {
        "wall_s": (now_s - begun_s) / num_pieces,
        "cpu_s": min(best_s, _tour_cpus()),
    }


def _compute_piece() -> float:
    """Return the seconds of CPU that one piece of work takes now and here."""
    cpu_s = time.thread_time()
    pow(_BASE, _EXPONENT, _MODULUS)
    return time.thread_time() - cpu_s


def _tour_cpus() -> float:
    """Return the least seconds of CPU for a piece of work on some of the CPUs.

    It is infinite where no CPU may be chosen, as in some containers.
    """
    allowed = sorted(os.sched_getaffinity(0))
    toured = allowed[:: -(-len(allowed) // _MAX_CPUS)]
    try:
        os.sched_setaffinity(0, allowed)
    except PermissionError:
        return float("inf")
    try:
        return min(_compute_pieces_on(cpu) for cpu in toured)
    finally:
        os.sched_setaffinity(0, allowed)


def _compute_pieces_on(cpu: int) -> float:
    os.sched_setaffinity(0, {cpu})
    return min(_compute_piece() for _ in range(_NUM_PIECES))


def burn(_site: Site, question: dict[str, Value]) -> dict[str, Value]:
    """Multiply two seeded matrices of ``size`` for ``seconds``, on all processors.

    Then each GPU copies, one after the other.

    Returns:
        ``products``: by device; see ``product.multiply``. Of a device that failed, and
        of all where all hung, ``failure`` alone. ``copies`` and ``links``: by GPU; see
        ``copies.examine_gpu``.

    Raises:
        OSError: There is no torch.
    """
    seconds = float(question["seconds"])
    given = json.dumps([seconds, int(question["size"]), int(question["seed"])])
    said, trouble = _run([sys.executable, "-c", _BOOT, _PACKAGE_DIR, given], seconds)
    told = _merge(said)
    if "missing" in told:
        raise OSError(told["missing"])
    if "products" not in told:
        told["products"] = {"all processors": {"failure": trouble}}
    gpus = [name for name in told["products"] if name.startswith("cuda:")]
    not_reached = {name: {"failure": f"its program {trouble}"} for name in gpus}
    for part in ("copies", "links"):
        told[part] = not_reached | told.get(part, {})
    return told


def _run(words: list[str], seconds: float) -> tuple[bytes, str]:
    """Run a program; return what it wrote, and how it ended, in half a sentence.

    One that takes much longer than it should is killed.
    """
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        said, complaint = process.communicate(timeout=seconds + _BESIDES_S)
    except subprocess.TimeoutExpired as late:
        os.killpg(process.pid, signal.SIGKILL)
        # What hangs in a driver dies when that lets go of it.
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_KILLED_S)
        return (
            late.output or b"",
            f"hung, and was killed {_BESIDES_S:g} s after its time",
        )
    last = complaint.decode(errors="replace").strip().splitlines()[-1:]
    reason = f"ended with code {process.returncode}: {''.join(last)}"
    return said, reason[:_MAX_SAID_CHARS]


def _merge(said: bytes) -> dict[str, Any]:
    """Return what the lines of a program tell together, those that are JSON objects."""
    told: dict[str, Any] = {}
    for line in said.splitlines():
        try:
            answer = json.loads(line)
        except ValueError:
            # Libraries write there as well.
            continue
        if not isinstance(answer, dict):
            continue
        for name, value in cast("dict[str, Any]", answer).items():
            if isinstance(value, dict):
                told.setdefault(name, {}).update(value)
            else:
                told[name] = value
    return told
