"""What is installed on a host, and which settings its ranks would find; all by files.

torch is never imported: that takes seconds, and may hang in a driver.
"""

import ast
import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import ronde
from ronde.check.facts import ENVIRONMENT, Reading, UnreadableError
from ronde.launch.forwarded import base_environment, redacted
from ronde.launch.inherited import own_environment
from ronde.topology.kernel_files import list_names, read_text
from ronde.topology.machine import read_cores, read_cpu_limit

ABSENT = "not installed"
"""The version of what is not there."""

_PREFIXES = ("NCCL_", "TORCH_", "CUDA_", "GLOO_", "OMP_", "UCX_", "RONDE_")
_NAMES = frozenset({"LD_LIBRARY_PATH", "LD_PRELOAD"})
_MAX_VALUE_CHARS = 200

_INFO = re.compile(r"(?P<name>[^-]+)-(?P<version>\d[^-]*)(-.*)?\.(dist|egg)-info")
_NVIDIA_MODULE = re.compile(r"Module\s.*?(\d+\.\d+(\.\d+)*)")


def read(reading: Reading) -> None:
    """Take down versions, settings, and how many CPUs may be used."""
    root = str(reading.settings.get("root", "/")).rstrip("/")
    environment = select_environment(
        own_environment(), reading.settings.get(ENVIRONMENT, {})
    )
    package = Path(ronde.__file__).parent
    reading.keep("versions.ronde", lambda: ronde.__version__)
    reading.keep("versions.ronde_code", lambda: digest_code(package))
    reading.keep("versions.python", lambda: sys.version.split()[0])
    reading.keep("versions.python_path", lambda: sys.executable)
    with reading.reading("versions.torch", "versions.torch_build"):
        version, build = read_torch(_find_torch())
        reading.values["versions.torch"] = version
        reading.values["versions.torch_build"] = build
    packages = read_packages(sys.path)
    reading.keep("versions.packages", lambda: packages)
    reading.keep("versions.nccl", lambda: find_nccl(packages))
    reading.keep(
        "versions.nccl_elsewhere", lambda: find_other_nccl(environment, sys.path)
    )
    reading.keep("versions.driver", lambda: read_driver(root))
    reading.keep("versions.environment", lambda: redacted(environment))
    reading.keep("versions.num_cpus", lambda: count_cpus(root))


def digest_code(package: Path) -> str:
    """Return the beginning of a hash of all Python files of a package."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def _find_torch() -> Path | None:
    spec = importlib.util.find_spec("torch")
    if spec is None:
        return None
    if not spec.origin:
        raise UnreadableError("torch has no file of its own")
    return Path(spec.origin).parent


def read_torch(package: Path | None) -> tuple[str, str]:
    """Return torch's version, and what it was built for: ``CUDA 12.8``.

    Args:
        package: Its directory; None if it is not installed.

    Raises:
        UnreadableError: Its file is broken, as one that was cut off.
    """
    if package is None:
        return ABSENT, ABSENT
    said: dict[str, str] = {}
    try:
        program = ast.parse((package / "version.py").read_text("utf-8"))
    except SyntaxError as error:
        raise UnreadableError(
            f"{package}/version.py is no Python: {error.msg}; install torch anew"
        ) from error
    for line in program.body:
        match line:
            case ast.Assign([ast.Name(name)], ast.Constant(value)) | ast.AnnAssign(
                ast.Name(name), value=ast.Constant(value)
            ) if isinstance(value, str):
                said[name] = value
            case _:
                pass
    for name, title in (("cuda", "CUDA"), ("hip", "HIP"), ("xpu", "XPU")):
        if name in said:
            return said["__version__"], f"{title} {said[name]}"
    return said["__version__"], "CPU"


def read_packages(directories: Iterable[str]) -> dict[str, str]:
    """Return the versions of all packages, by their normal names.

    The names of their directories tell: opening each would take longer.

    Args:
        directories: Where Python looks, the first first.
    """
    found: dict[str, str] = {}
    for directory in filter(None, directories):
        for entry in list_names(directory):
            match = _INFO.fullmatch(entry)
            if match:
                name = re.sub(r"[-_.]+", "-", match["name"]).lower()
                found.setdefault(name, match["version"])
    return found


def find_nccl(packages: Mapping[str, str]) -> str:
    """Return the version of NCCL that torch's wheels bring along."""
    versions = {v for name, v in packages.items() if name.startswith("nvidia-nccl-cu")}
    return ", ".join(sorted(versions)) or ABSENT


def find_other_nccl(
    environ: Mapping[str, str], directories: Iterable[str]
) -> list[str]:
    """Return each NCCL that the loader's variables put before the wheel's.

    Args:
        environ: Of a rank.
        directories: Where Python looks: a wheel's own NCCL lies below one of them.
    """
    preloaded = re.split(r"[:\s]+", environ.get("LD_PRELOAD", ""))
    found = [path for path in preloaded if "libnccl.so" in path]
    for directory in environ.get("LD_LIBRARY_PATH", "").split(":"):
        library = Path(directory, "libnccl.so.2")
        if directory and os.path.isfile(library):  # noqa: PTH113 - it may be denied
            found.append(str(library.resolve()))
    own = {Path(each, "nvidia/nccl/lib").resolve() for each in directories if each}
    return [path for path in found if Path(path).resolve().parent not in own]


def read_driver(root: str) -> str:
    """Return the version of the GPUs' kernel driver.

    Args:
        root: Where ``proc`` and ``sys`` are; empty for this machine.
    """
    told = read_text(f"{root}/proc/driver/nvidia/version")
    if told:
        match = _NVIDIA_MODULE.search(told)
        if match is None:
            raise UnreadableError(f"its version is not told in {told.splitlines()[0]}")
        return f"NVIDIA {match[1]}"
    amdgpu = read_text(f"{root}/sys/module/amdgpu/version")
    return f"amdgpu {amdgpu}" if amdgpu else ABSENT


def select_environment(
    own: Mapping[str, str], forwarded: Mapping[str, str]
) -> dict[str, str]:
    """Return those variables of a rank here that change how it trains.

    Args:
        own: The environment of this host's agent.
        forwarded: What every rank is given on top.
    """
    known = base_environment(own) | dict(forwarded)
    return {
        name: _tell(value)
        for name, value in sorted(known.items())
        if name.startswith(_PREFIXES) or name in _NAMES
    }


def _tell(value: str) -> str:
    if re.search(r"\b(GPU|MIG)-[0-9a-f]", value):
        # No two hosts have the same.
        return f"{value.count(',') + 1} by UUID"
    if len(value) <= _MAX_VALUE_CHARS:
        return value
    mark = hashlib.sha256(value.encode(errors="replace")).hexdigest()[:8]
    return f"{value[:_MAX_VALUE_CHARS]}... (sha256 {mark})"


def count_cpus(root: str) -> float:
    """Return how many CPUs may be used at a time: threads, cut to the quota.

    Args:
        root: Where ``proc`` and ``sys`` are; empty for this machine.
    """
    threads = sum(len(core.cpus) for core in read_cores(root))
    if not threads:
        raise UnreadableError("no CPU is shown")
    limit = read_cpu_limit(root)
    return min(threads, limit) if limit else threads
