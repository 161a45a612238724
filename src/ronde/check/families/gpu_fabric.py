"""Whether NVSwitches' fabric has taken the GPUs in, on this host and between hosts."""

from collections import Counter
from collections.abc import Iterator

from ronde.check.check import Check, Family, Finding, Severity
from ronde.check.facts import Value
from ronde.check.families.gpu_troubles import FINE, Trouble, each_gpu
from ronde.check.fleet import Fleet

_COMPLETED = 3
_UNFINISHED = {1: "has not begun", 2: "goes on"}
_SUMMARIES = {
    2: (Severity.FAIL, "the fabric is unhealthy"),
    3: (Severity.WARN, "the fabric has limited capacity"),
}
_HEALTH = (
    (4, 3, 1, Severity.FAIL, "a route of the fabric is unhealthy"),
    (2, 3, 1, Severity.WARN, "a route of the fabric is being recovered"),
    (6, 3, 1, Severity.WARN, "the fabric recovers from a time-out"),
    (0, 3, 1, Severity.WARN, "the fabric has less bandwidth than it should"),
)
"""First bit, mask and bad value of each part of the health, the worst first."""
_CONFIGURATION_BIT, _CONFIGURATION_MASK, _CONFIGURATION_FINE = 8, 0xF, (0, 1)


def _judge_fabric(fabric: Value) -> Trouble:
    state, status = fabric["state"], fabric["status"]
    if state == _COMPLETED:
        what = f"ended in error {status}" if status else ""
    else:
        what = _UNFINISHED.get(state, "")
    if what:
        return Trouble(Severity.FAIL, f"its registration with the fabric {what}")
    # What it says otherwise counts once it is registered.
    return next(_health_troubles(fabric), FINE) if state == _COMPLETED else FINE


def _health_troubles(fabric: Value) -> Iterator[Trouble]:
    """Yield what is unwell, the worst first."""
    health = fabric["health"]
    configuration = health >> _CONFIGURATION_BIT & _CONFIGURATION_MASK
    if configuration not in _CONFIGURATION_FINE:
        what = f"the fabric is configured wrongly (NVML's number {configuration})"
        yield Trouble(Severity.FAIL, what)
    for first_bit, mask, bad, severity, what in _HEALTH:
        if health >> first_bit & mask == bad:
            yield Trouble(severity, what)
    if fabric["summary"] in _SUMMARIES:
        yield Trouble(*_SUMMARIES[fabric["summary"]])


def _judge_imex(fleet: Fleet) -> Iterator[Finding]:
    hosts = list(fleet.having("gpu.fabric", "gpu.imex_channels"))
    parts = {facts.host: _parts(facts.values["gpu.fabric"]) for facts in hosts}
    # A fabric may have a name of its own and still be that of one host alone.
    counts = Counter(part for own in parts.values() for part in own)
    for facts in hosts:
        is_shared = any(counts[part] > 1 for part in parts[facts.host])
        if is_shared and not facts.values["gpu.imex_channels"]:
            what = "its NVLinks lead to other hosts, and there is no IMEX channel"
            yield Finding("gpu-imex", Severity.WARN, facts.host, what)


def _parts(fabrics: Value) -> set[tuple[str, int]]:
    """Return the parts of named fabrics that a host's GPUs are linked in."""
    told = [each for each in fabrics if each and each["cluster"]]
    return {(each["cluster"], each.get("clique", 0)) for each in told}


CHECKS = (
    Check(
        id="gpu-fabric",
        family=Family.GPU,
        title="GPUs behind NVSwitches are registered with the fabric",
        reads="NVML's fabric state, status and health",
        threshold="completed without an error, and healthy",
        source="NVIDIA's Fabric Manager guide and NVML manual: fabric health",
        severity=Severity.FAIL,
        fix="While nothing uses the GPUs: sudo systemctl restart nvidia-fabricmanager "
        "(of the driver's version); on GB200: look at the switch trays",
        needs="NVIDIA GPUs behind NVSwitches",
        why="CUDA does not start (error 802), or NVLinks are slow.",
        facts=("gpu.fabric",),
        judge=each_gpu("gpu-fabric", "gpu.fabric", _judge_fabric),
    ),
    Check(
        id="gpu-imex",
        family=Family.GPU,
        title="hosts whose NVLinks lead to other hosts have IMEX channels",
        reads="/dev/nvidia-caps-imex-channels, and NVML's fabric cluster and clique",
        threshold="at least one channel where another host is in the same clique",
        source="NVIDIA's IMEX guide",
        severity=Severity.WARN,
        fix="sudo systemctl start nvidia-imex; then sudo mkdir -p "
        "/dev/nvidia-caps-imex-channels, and sudo mknod "
        "/dev/nvidia-caps-imex-channels/channel0 c NUMBER 0, with the NUMBER of "
        "nvidia-caps-imex-channels in /proc/devices",
        needs="several hosts with NVLinks between them",
        why="NCCL uses the network between hosts instead of NVLink.",
        facts=("gpu.fabric", "gpu.imex_channels"),
        judge=_judge_imex,
    ),
)
