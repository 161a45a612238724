"""What is installed, and which settings ranks would find: the same on every host."""

import re
from collections.abc import Callable, Iterable, Iterator

from ronde.check.check import Check, Family, Finding, Severity, alike
from ronde.check.facts import HostFacts, Value
from ronde.check.fleet import Fleet
from ronde.check.probes.versions import ABSENT

OLDEST_TORCH = (2, 11)
"""What ronde's own requirements say."""

RAS_CRASHES = (2, 26, 2), (2, 27, 7)
"""NCCL from the first to the last of these may crash in its RAS thread."""

_MAX_NAMED = 3
_JUDGED_APART = re.compile(r"torch|ronde|nvidia-nccl-.*|pip|setuptools|wheel")
_MAJORITY = "what most hosts have, of three or more"


def _alike_in_steps(
    name: str, *steps: tuple[str, str, Severity]
) -> Callable[[Fleet], Iterator[Finding]]:
    """Return a judge of several facts: each host is told once.

    Args:
        name: Id of the check.
        steps: Fact, what it is for people, and severity; the weightiest first.
    """

    def judge(fleet: Fleet) -> Iterator[Finding]:
        told: set[str] = set()
        for fact, title, severity in steps:
            for host, value, usual in fleet.odd_ones(fact):
                if host not in told:
                    told.add(host)
                    yield Finding(name, severity, host, f"{title} {value}", usual)

    return judge


def _alike_by_name(
    check: str, fact: str, join: str, absent: str
) -> Callable[[Fleet], Iterator[Finding]]:
    """Return a judge of what has a value by name; each host is told once of all.

    Args:
        check: Its id.
        fact: Whose value is an object of texts.
        join: Stands between name and value.
        absent: The value of a name that a host does not have.
    """

    def judge(fleet: Fleet) -> Iterator[Finding]:
        told: dict[str, list[tuple[str, str]]] = {}
        for name in _differing(each.values[fact] for each in fleet.having(fact)):
            values = tuple(
                HostFacts(
                    each.host, {name: each.values[fact].get(name, absent)}, {}, {}
                )
                for each in fleet.having(fact)
            )
            for host, value, usual in Fleet(values, fleet.settings).odd_ones(name):
                told.setdefault(host, []).append((f"{name}{join}{value}", usual))
        for host, differences in told.items():
            what, usual = zip(*differences[:_MAX_NAMED], strict=True)
            num_more = len(differences) - _MAX_NAMED
            more = f" and {num_more} more" if num_more > 0 else ""
            yield Finding(
                check, Severity.WARN, host, ", ".join(what) + more, "; ".join(usual)
            )

    return judge


def _differing(objects: Iterable[dict[str, str]]) -> list[str]:
    """Return the names, sorted, whose values are not the same in all."""
    known = list(objects)
    return [
        name
        for name in sorted({name for each in known for name in each})
        if len({each.get(name) for each in known}) > 1
        and not _JUDGED_APART.fullmatch(name)
    ]


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def _judge_torch_there(fleet: Fleet) -> Iterator[Finding]:
    for facts in fleet.having("versions.torch", "versions.python_path"):
        version = facts.values["versions.torch"]
        if version == ABSENT:
            what = f"torch is not installed for {facts.values['versions.python_path']}"
            yield Finding("torch-installed", Severity.WARN, facts.host, what)
        elif () < _numbers(version) < OLDEST_TORCH:
            what = f"torch {version} is older than ronde can use"
            yield Finding("torch-installed", Severity.FAIL, facts.host, what)


def _judge_ras(fleet: Fleet) -> Iterator[Finding]:
    first, last = RAS_CRASHES
    for facts in fleet.having("versions.nccl", "versions.environment"):
        version = facts.values["versions.nccl"]
        is_off = facts.values["versions.environment"].get("NCCL_RAS_ENABLE") == "0"
        if first <= _numbers(version) <= last and not is_off:
            what = f"NCCL {version} may crash in its RAS thread"
            yield Finding("nccl-ras", Severity.WARN, facts.host, what)


def _judge_other_nccl(fleet: Fleet) -> Iterator[Finding]:
    for facts in fleet.having("versions.nccl", "versions.nccl_elsewhere"):
        found = facts.values["versions.nccl_elsewhere"]
        if found and facts.values["versions.nccl"] != ABSENT:
            what = f"{found[0]} may be loaded instead of torch's own NCCL"
            yield Finding("nccl-elsewhere", Severity.WARN, facts.host, what)


def count_threads(environ: dict[str, str]) -> int:
    """Return the threads that ``OMP_NUM_THREADS`` gives a rank; 0 where it does not.

    For nested regions it lists a number each; the first is that of the outermost.
    """
    first = environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isascii() and first.isdecimal() else 0


def _judge_threads(fleet: Fleet) -> Iterator[Finding]:
    num_ranks: Value = fleet.settings.get("num_ranks") or 1
    for facts in fleet.having("versions.environment", "versions.num_cpus"):
        num_threads = count_threads(facts.values["versions.environment"])
        num_cpus: float = facts.values["versions.num_cpus"]
        if num_threads * num_ranks > num_cpus:
            what = (
                f"{num_ranks} ranks * OMP_NUM_THREADS={num_threads} is more than "
                f"{num_cpus:g} CPUs"
            )
            fix = f"export OMP_NUM_THREADS={max(1, int(num_cpus / num_ranks))}"
            yield Finding("threads", Severity.WARN, facts.host, what, fix=fix)


CHECKS = (
    Check(
        id="python",
        family=Family.VERSIONS,
        title="all hosts have the same Python",
        reads="the version of the Python that ronde runs with",
        threshold="the same everywhere, to the last number; a host with another minor "
        "version, as 3.12 for 3.11, cannot even be asked: see taking-part",
        source=f"ronde's own; {_MAJORITY}",
        severity=Severity.WARN,
        fix="make the environment anew there, with the Python of the other hosts",
        needs="several hosts",
        why="The standard library differs a little, and so may packages.",
        facts=("versions.python",),
        judge=alike("python", Severity.WARN, "versions.python", "Python"),
    ),
    Check(
        id="torch",
        family=Family.VERSIONS,
        title="all hosts have the same torch",
        reads="torch/version.py, without importing torch",
        threshold="the same version, built for the same CUDA or HIP, everywhere",
        source=f"ronde's own; {_MAJORITY}",
        severity=Severity.FAIL,
        fix="pip install torch==VERSION there, with the version of the other hosts",
        needs="several hosts",
        why="Ranks compute different things, disagree on what they send, or hang.",
        facts=("versions.torch", "versions.torch_build"),
        judge=_alike_in_steps(
            "torch",
            ("versions.torch", "torch", Severity.FAIL),
            ("versions.torch_build", "torch built for", Severity.FAIL),
        ),
    ),
    Check(
        id="torch-installed",
        family=Family.VERSIONS,
        title="torch is installed, and new enough",
        reads="torch/version.py, where the Python that ronde runs with finds it",
        threshold="at least 2.11",
        source="ronde's own requirements",
        severity=Severity.FAIL,
        fix="pip install 'torch>=2.11', or name the ranks' Python with --python",
        needs="",
        why="No rank can start training.",
        facts=("versions.torch", "versions.python_path"),
        judge=_judge_torch_there,
    ),
    Check(
        id="nccl",
        family=Family.VERSIONS,
        title="all hosts have the same NCCL",
        reads="which nvidia-nccl wheel is installed",
        threshold="the same version everywhere",
        source=f"NCCL itself refuses: Mismatched NCCL version detected; {_MAJORITY}",
        severity=Severity.FAIL,
        fix="pip install --force-reinstall torch==VERSION there",
        needs="several hosts",
        why="NCCL does not form a communicator, so training does not start.",
        facts=("versions.nccl",),
        judge=alike("nccl", Severity.FAIL, "versions.nccl", "NCCL"),
    ),
    Check(
        id="nccl-ras",
        family=Family.VERSIONS,
        title="NCCL is none that is known to crash",
        reads="which nvidia-nccl wheel is installed, and NCCL_RAS_ENABLE",
        threshold="not 2.26.2 to 2.27.7, or NCCL_RAS_ENABLE=0",
        source="NVIDIA/nccl issues 1669, 1718, 1762 and 1996",
        severity=Severity.WARN,
        fix="export NCCL_RAS_ENABLE=0, or install a newer NCCL",
        needs="",
        why="Its RAS thread crashes a rank now and then, mostly when it is asked.",
        facts=("versions.nccl", "versions.environment"),
        judge=_judge_ras,
    ),
    Check(
        id="nccl-elsewhere",
        family=Family.VERSIONS,
        title="no other NCCL comes before torch's own",
        reads="LD_PRELOAD, and libnccl.so.2 in the directories of LD_LIBRARY_PATH",
        threshold="none, where an nvidia-nccl wheel is installed",
        source="ld.so(8): LD_PRELOAD comes first, LD_LIBRARY_PATH before a RUNPATH",
        severity=Severity.WARN,
        fix="unset LD_PRELOAD LD_LIBRARY_PATH, or take that NCCL out of them",
        needs="",
        why="Another version than torch was built with may fail, or lack features.",
        facts=("versions.nccl", "versions.nccl_elsewhere"),
        judge=_judge_other_nccl,
    ),
    Check(
        id="ronde",
        family=Family.VERSIONS,
        title="all hosts have the same code of ronde",
        reads="a hash of ronde's code",
        threshold="the same everywhere; a host with another version cannot even be "
        "asked: see taking-part",
        source=f"ronde's own; {_MAJORITY}",
        severity=Severity.WARN,
        fix="pip install --force-reinstall ronde there, from where the other hosts "
        "have it",
        needs="several hosts",
        why="Ranks may not understand what those of other code send.",
        facts=("versions.ronde_code",),
        judge=alike("ronde", Severity.WARN, "versions.ronde_code", "ronde's code"),
    ),
    Check(
        id="packages",
        family=Family.VERSIONS,
        title="all hosts have the same Python packages",
        reads="the names of *.dist-info and *.egg-info where Python looks",
        threshold="the same names and versions; torch, NCCL and ronde are judged apart",
        source=f"ronde's own; {_MAJORITY}",
        severity=Severity.WARN,
        fix="pip install -r with the lock file of the other hosts",
        needs="several hosts",
        why="Ranks run different code: one fails to import, or computes otherwise.",
        facts=("versions.packages",),
        judge=_alike_by_name("packages", "versions.packages", " ", ABSENT),
    ),
    Check(
        id="environment",
        family=Family.VERSIONS,
        title="ranks find the same settings on all hosts",
        reads="variables NCCL_*, TORCH_*, CUDA_*, GLOO_*, OMP_*, UCX_*, RONDE_*, "
        "LD_LIBRARY_PATH and LD_PRELOAD, as ronde run would give them to ranks",
        threshold="the same values everywhere",
        source=f"ronde's own; {_MAJORITY}",
        severity=Severity.WARN,
        fix="look for leftovers in ~/.bashrc and /etc/environment there",
        needs="several hosts",
        why="Ranks choose different networks, algorithms or libraries, or hang.",
        facts=("versions.environment",),
        judge=_alike_by_name("environment", "versions.environment", "=", "(not set)"),
    ),
    Check(
        id="threads",
        family=Family.VERSIONS,
        title="ranks have no more threads than CPUs",
        reads="OMP_NUM_THREADS, ranks a host, the affinity mask and the CPU quota",
        threshold="threads * ranks <= CPUs that may be used",
        source="ronde's own: threads beyond the CPUs only wait for each other",
        severity=Severity.WARN,
        fix="unset OMP_NUM_THREADS: ronde run divides the cores among the ranks",
        needs="OMP_NUM_THREADS",
        why="Threads wait for each other's turn, and every step takes longer.",
        facts=("versions.environment", "versions.num_cpus"),
        judge=_judge_threads,
    ),
    Check(
        id="gpu-driver",
        family=Family.VERSIONS,
        title="all hosts have the same GPU driver",
        reads="/proc/driver/nvidia/version, else /sys/module/amdgpu/version",
        threshold="the same version everywhere",
        source=f"ronde's own; {_MAJORITY}",
        severity=Severity.WARN,
        fix="install the driver of the other hosts there, and reboot",
        needs="several hosts",
        why="Features differ: peer access, NVLink and CUDA's limits on the driver.",
        facts=("versions.driver",),
        judge=alike("gpu-driver", Severity.WARN, "versions.driver", "GPU driver"),
    ),
)
