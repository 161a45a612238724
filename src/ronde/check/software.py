"""Checks that software and environment variables are the same on all hosts.

The probe only reads files; ``torch_import`` is the probe that imports torch.
"""

import ast
import hashlib
import importlib.util
import re
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import ronde
from ronde.check.check import FAIL, WARN, Problem, Problems, check, each_host
from ronde.check.fleet import ENVIRONMENT, Fleet, Values
from ronde.check.majority import (
    differing,
    find_odd,
    once_a_host,
    same_everywhere,
    usual_value,
)
from ronde.check.probing import FactReader, UnreadableError
from ronde.check.torch_import import IMPORT_ERROR, SHADOWING
from ronde.launch.environments import base_environment, own_environment, redacted
from ronde.topology.kernel_files import list_names, read_text
from ronde.units import list_first

ABSENT = "not installed"  # in place of a version
# From ronde's requirements.
_OLDEST_TORCH = (2, 11)
_TORCH, _BUILD = "versions.torch", "versions.torch_build"
_NCCL = "versions.nccl"
_PYTHON_PATH, _PACKAGES = "versions.python_path", "versions.packages"
_SETTINGS, _DRIVER = "versions.environment", "versions.driver"

_PREFIXES = ("NCCL_", "TORCH_", "CUDA_", "GLOO_", "OMP_", "UCX_", "RONDE_")
_NAMES = frozenset({"LD_LIBRARY_PATH", "LD_PRELOAD"})
_MAX_VALUE_CHARS = 200
_MAX_NAMED = 3
_INFO = re.compile(r"(?P<name>[^-]+)-(?P<version>\d[^-]*)(-.*)?\.(dist|egg)-info")
_NVIDIA_MODULE = re.compile(r"Kernel Module\s.*?(\d+\.\d+(\.\d+)*)")
_NCCL_WHEEL = re.compile(r"nvidia-nccl-cu\d+")
_HAS_ITS_CHECK = re.compile(r"torch|nvidia-nccl-.*|pip|setuptools|wheel")


def read(reader: FactReader) -> None:
    environment = select_environment(
        own_environment(), reader.settings.get(ENVIRONMENT, {})
    )
    reader.values["versions.python"] = sys.version.split()[0]
    reader.values[_PYTHON_PATH] = sys.executable
    spec = importlib.util.find_spec("torch")
    package = Path(spec.origin).parent if spec and spec.origin else None
    reader.store_each((_TORCH, _BUILD), lambda: read_torch(package))
    packages = read_packages(sys.path)
    code = _digest_code(Path(ronde.__file__).parent)
    packages["ronde"] = f"{ronde.__version__} (code {code})"
    reader.values[_PACKAGES] = packages
    reader.values[_NCCL] = find_nccl(packages)
    reader.store(_DRIVER, lambda: read_driver(reader.root))
    reader.values[_SETTINGS] = redacted(environment)


def _digest_code(package: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def read_torch(package: Path | None) -> tuple[str, str]:
    """Return the version of torch and its build, such as ``CUDA 12.8``."""
    if package is None:
        return ABSENT, ABSENT
    try:
        program = ast.parse((package / "version.py").read_text("utf-8"))
    except SyntaxError as error:
        raise UnreadableError(
            f"{package}/version.py is not valid Python: {error.msg}; reinstall torch"
        ) from error
    found: dict[str, str] = {}
    for line in program.body:
        match line:
            case ast.Assign([ast.Name(name)], ast.Constant(str(value))) | ast.AnnAssign(
                ast.Name(name), value=ast.Constant(str(value))
            ):
                found[name] = value
            case _:
                pass
    for name, title in (("cuda", "CUDA"), ("hip", "HIP"), ("xpu", "XPU")):
        if name in found:
            return found["__version__"], f"{title} {found[name]}"
    return found["__version__"], "CPU"


def read_packages(directories: Iterable[str]) -> dict[str, str]:
    """Return package versions by normalised name, read from metadata folders."""
    found: dict[str, str] = {}
    for directory in filter(None, directories):
        for match in filter(None, map(_INFO.fullmatch, list_names(directory))):
            name = re.sub(r"[-_.]+", "-", match["name"]).lower()
            found.setdefault(name, match["version"])
    return found


def find_nccl(packages: Mapping[str, str]) -> str:
    versions = {v for name, v in packages.items() if _NCCL_WHEEL.fullmatch(name)}
    return ", ".join(sorted(versions)) or ABSENT


def read_module(root: str) -> str:
    """Return the version of NVIDIA's module, such as ``560.35.03 (open)``, or ""."""
    text = read_text(f"{root}/proc/driver/nvidia/version")
    match = _NVIDIA_MODULE.search(text)
    is_open = "Open Kernel Module" in text
    return match[1] + " (open)" * is_open if match else ""


def read_driver(root: str) -> str:
    if module := read_module(root):
        return f"NVIDIA {module.removesuffix(' (open)')}"
    if text := read_text(f"{root}/proc/driver/nvidia/version"):
        raise UnreadableError(f"found no version in {text.splitlines()[0]!r}")
    amdgpu = read_text(f"{root}/sys/module/amdgpu/version")
    return f"amdgpu {amdgpu}" if amdgpu else ABSENT


def select_environment(
    own: Mapping[str, str], forwarded: Mapping[str, str]
) -> dict[str, str]:
    """Return those environment variables of the ranks that affect training."""
    known = base_environment(own) | dict(forwarded)
    return {
        name: _show_setting(value)
        for name, value in sorted(known.items())
        if name.startswith(_PREFIXES) or name in _NAMES
    }


def _show_setting(value: str) -> str:
    if re.search(r"\b(GPU|MIG)-[0-9a-f]", value):
        # UUIDs differ between hosts.
        return f"{value.count(',') + 1} by UUID"
    if len(value) <= _MAX_VALUE_CHARS:
        return value
    mark = hashlib.sha256(value.encode(errors="replace")).hexdigest()[:8]
    return f"{value[:_MAX_VALUE_CHARS]}... (sha256 {mark})"


@check(FAIL, _TORCH, _BUILD)
def torch(fleet: Fleet) -> Problems:
    """All hosts have the same torch.

    reads: torch/version.py, without importing torch
    threshold: the same version, built for the same CUDA or HIP, everywhere
    fix: Install the version and build of the other hosts there, with python -m pip
        install: pytorch.org/get-started/locally names the index of each build
    needs: several hosts
    why: Ranks compute different results, disagree on messages, or hang.
    """
    # torch-installed reports hosts without torch.
    having = [f for f in fleet.having(_TORCH, _BUILD) if f.values[_TORCH] != ABSENT]
    fleet = Fleet(tuple(having), fleet.settings)
    found = once_a_host(
        differing(fleet, _TORCH, "torch"), differing(fleet, _BUILD, "torch built for")
    )
    for problem in found:
        yield _with_pip(problem, fleet, "torch")


def _pip_install(values: Values, *words: str) -> str:
    python = values.get(_PYTHON_PATH, "python")
    return f"{python} -m pip install {shlex.join(words)}"


def _with_pip(problem: Problem, fleet: Fleet, package: str) -> Problem:
    """Add the command that installs the majority's version, if there is a majority."""
    version = usual_value(problem.usual)
    # A package index may lack the local version behind the plus sign.
    number = version.partition("+")[0]
    if not number[:1].isdecimal():
        return problem
    values = next(f.values for f in fleet.hosts if f.host == problem.host)
    fix = _pip_install(values, f"{package}=={number}")
    if number != version:
        fix += f"  # for {version}: pytorch.org/get-started/locally names its index"
    return problem._replace(fix=fix)


@each_host(FAIL, _PYTHON_PATH, IMPORT_ERROR, optional=(_TORCH, _PACKAGES, SHADOWING))
def torch_installed(values: Values, fleet: Fleet) -> Problems:
    """Torch can be imported, and is new enough.

    reads: an import of torch by the Python that runs ronde; torch/version.py
    threshold: the import succeeds, and torch is at least 2.11
    source: ronde's requirements
    fix: python -m pip install 'torch>=2.11', or name the ranks' Python with --python.
        Ranks that need no torch: --skip torch-installed
    why: No rank can start training.
    """
    version, error = values.get(_TORCH, ABSENT), values[IMPORT_ERROR]
    if not error and not () < _numbers(version) < _OLDEST_TORCH:
        return
    others = (v.partition("+")[0] for v in fleet.known(_TORCH).values() if v != version)
    fit = [v for v in others if _numbers(v) >= _OLDEST_TORCH]
    words = [f"torch=={max(fit, key=_numbers)}" if fit else "torch>=2.11"]
    # An installed torch whose dependencies are missing need not be reinstalled.
    lacks_others = re.match(r"ModuleNotFoundError: No module named '(?!torch\b)", error)
    if error and "torch" in values.get(_PACKAGES, {}) and not lacks_others:
        words.insert(0, "--force-reinstall")
    message = f"torch {version} is older than ronde can use"
    if error:
        message = f"{values[_PYTHON_PATH]} cannot import torch: {error}"
    fix = _pip_install(values, *words)
    if folder := values.get(SHADOWING):
        moving = shlex.join(["mv", folder, f"{folder}.old"])
        fix = f"{moving}  # PYTHONPATH puts it before any other torch"
    yield Problem(message, fix=fix)


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


@check(FAIL, _NCCL, optional=(_PACKAGES, _PYTHON_PATH))
def nccl(fleet: Fleet) -> Problems:
    """All hosts have the same NCCL.

    reads: the installed nvidia-nccl wheel
    threshold: the same version everywhere
    source: NCCL 2.30.7 (src/init.cc), which refuses with: Mismatched NCCL version
        detected
    fix: Install the nvidia-nccl wheel of the other hosts there, with python -m pip
        install
    needs: several hosts
    why: NCCL does not form a communicator, so training does not start.
    """
    wheels = [n for each in fleet.known(_PACKAGES).values() for n in each]
    wheel = next(filter(_NCCL_WHEEL.fullmatch, wheels), "nvidia-nccl-cu12")
    for problem in differing(fleet, _NCCL, "NCCL"):
        yield _with_pip(problem, fleet, wheel)


def _differing_names(
    fleet: Fleet,
    fact: str,
    join: str,
    absent: str,
    find_fix: Callable[[Values, Mapping[str, str]], str],
) -> Problems:
    """Yield one problem per differing host, which lists the names that differ.

    ``find_fix`` gets the host's facts and, for each such name, the message that
    ``find_odd`` returned.
    """
    known: dict[str, dict[str, str]] = fleet.known(fact)
    values: dict[str, list[str]] = defaultdict(list)
    usual: dict[str, dict[str, str]] = defaultdict(dict)
    for name in sorted({name for each in known.values() for name in each}):
        if not _HAS_ITS_CHECK.fullmatch(name):
            shown = {host: each.get(name, absent) for host, each in known.items()}
            for host, value, others in find_odd(shown):
                values[host].append(f"{name}{join}{value}")
                usual[host][name] = others
    for facts in fleet.hosts:
        if own := usual.get(facts.host):
            named = [f"{n}{join}{others}" for n, others in own.items()][:_MAX_NAMED]
            same = {*own.values()}
            yield Problem(
                list_first(values[facts.host], _MAX_NAMED),
                usual=same.pop() if len(same) == 1 else "; ".join(named),
                fix=find_fix(facts.values, own),
                host=facts.host,
            )


@check(WARN, _PACKAGES)
def packages(fleet: Fleet) -> Problems:
    """All hosts have the same Python packages.

    reads: the names of *.dist-info and *.egg-info in Python's path; a hash of ronde's
        code
    threshold: the same names and versions; torch and NCCL have their own checks
    fix: python -m pip freeze >lock.txt on a correct host, and python -m pip install -r
        lock.txt on the others
    needs: several hosts
    why: Ranks run different code: an import fails, or results differ.
    """
    return _differing_names(fleet, _PACKAGES, " ", ABSENT, _install_usual)


def _install_usual(values: Values, usual: Mapping[str, str]) -> str:
    """Return a command that installs the majority's versions, "" if there are none."""
    # Except ronde, whose version here contains a hash of the code.
    versions = {n: usual_value(text) for n, text in usual.items() if n != "ronde"}
    wanted = [f"{name}=={v}" for name, v in versions.items() if v and v != ABSENT]
    return _pip_install(values, *wanted) if wanted else ""


@check(WARN, _SETTINGS)
def environment(fleet: Fleet) -> Problems:
    """Variables that affect training have the same values on all hosts.

    reads: NCCL_*, TORCH_*, CUDA_*, GLOO_*, OMP_*, UCX_*, RONDE_*, LD_* of ranks
    threshold: the same values everywhere
    fix: look for leftovers there: grep -s NAME ~/.bashrc ~/.profile /etc/environment
    needs: several hosts
    why: Ranks choose different networks, algorithms or libraries, or hang.
    """
    return _differing_names(fleet, _SETTINGS, "=", "(not set)", _look_for)


def _look_for(_: Values, usual: Mapping[str, str]) -> str:
    files = "~/.bashrc ~/.profile /etc/environment /etc/profile.d/*"
    return f"grep -sE {shlex.quote('|'.join(usual))} {files}  # there, for leftovers"


@same_everywhere(WARN, _DRIVER, "GPU driver")
def gpu_driver(version: str) -> str:
    """All hosts have the same GPU driver.

    reads: /proc/driver/nvidia/version, else /sys/module/amdgpu/version
    threshold: the same version everywhere
    fix: install the driver of the other hosts there, and reboot
    needs: several hosts
    why: Drivers differ in peer access, NVLink, and the CUDA versions that they support.
    """
    return version
