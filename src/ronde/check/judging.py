"""Run all checks on the collected facts, and decide which hosts are ready."""

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from typing import NamedTuple

from ronde.check.check import Check, Family, Finding, Severity
from ronde.check.fleet import Fleet, HostFacts, HostPair

# If this check cannot be made on a host, the host's GPUs are unknown.
GPU_COUNT = "gpu-count"
# A host with a GPU, or signs of one, has at least one of these facts.
_SIGNS_OF_GPU = ("gpu.count", "gpu.cards", "gpu.kernel_module", "gpu.files")


class Unread(NamedTuple):
    """A check that could not run on a host, and the reason."""

    check: str
    host: str
    reason: str


class Judgement(NamedTuple):
    """The results of all checks."""

    # The worst first; differences between hosts before broken thresholds.
    findings: tuple[Finding, ...]
    unread: tuple[Unread, ...]
    made: dict[tuple[str, Family], int]  # number of checks made


def judge(fleet: Fleet, checks: Sequence[Check]) -> Judgement:
    findings: list[Finding] = []
    unread: list[Unread] = []
    made: Counter[tuple[str, Family]] = Counter()
    for check in checks:
        reasons = {each.host: _why_unread(each, check.facts) for each in fleet.hosts}
        able = [host for host, reason in reasons.items() if reason is None]
        unread += [Unread(check.id, host, why) for host, why in reasons.items() if why]
        try:
            findings += tuple(check.find(fleet))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            # A host with another version of ronde may format facts differently.
            reason = f"the format of the facts is unknown: {error!r}"
            unread += [Unread(check.id, host, reason) for host in able]
            continue
        made.update((host, check.family) for host in able)
    for facts in fleet.hosts:
        if not any(facts.values.get(name) for name in _SIGNS_OF_GPU):
            del made[facts.host, Family.GPU]
    order = list(Severity)
    indices = {facts.host: n for n, facts in enumerate(fleet.hosts)}

    def badness(finding: Finding) -> tuple[int, bool, str, int]:
        index = indices.get(finding.host, len(indices))
        return order.index(finding.severity), not finding.usual, finding.check, index

    return Judgement(tuple(sorted(findings, key=badness)), tuple(unread), dict(made))


def _why_unread(facts: HostFacts, names: tuple[str, ...]) -> str | None:
    """Return the reason for the first missing fact, or None if no fact is missing.

    The reason is empty if it is unknown.
    """
    for name in names:
        if name not in facts.values:
            # The failure of a whole probe is stored under the prefix of its facts.
            of_probe = f"{name.partition('.')[0]}."
            return facts.unreadable.get(name) or facts.unreadable.get(of_probe, "")
    return None


class Readiness(NamedTuple):
    """All hosts in four groups by readiness, each group in the user's order."""

    ready: tuple[str, ...]
    warned: tuple[str, ...]  # ready, but not with --strict
    faulty: tuple[str, ...]
    unknown: tuple[str, ...]  # their GPUs could not be queried, or nothing was read
    num_asked: int  # hosts that answered
    faulty_pairs: tuple[HostPair, ...] = ()  # not ready together
    warned_pairs: tuple[HostPair, ...] = ()  # ready together, but not with --strict
    is_unread: bool = False  # nothing was read on any of the unknown hosts

    @property
    def num_hosts(self) -> int:
        return sum(map(len, (self.ready, self.warned, self.faulty, self.unknown)))

    @property
    def is_faulty(self) -> bool:
        return bool(self.faulty or self.faulty_pairs)

    @property
    def is_warned(self) -> bool:
        return bool(self.warned or self.warned_pairs)


def decide(
    hosts: Sequence[str],
    judgement: Judgement,
    num_asked: int,
    families: Collection[Family] = (),
) -> Readiness:
    """Group all hosts, and pairs of hosts, by their worst finding.

    If ``families`` are given, a host for which none of their checks ran is unknown.
    """
    found: dict[tuple[str, ...], set[Severity]] = defaultdict(set)
    for each in judgement.findings:
        found[each.hosts].add(each.severity)
    failed = [where for where, all_of in found.items() if Severity.FAIL in all_of]
    warned = [w for w in found if Severity.WARN in found[w] and w not in failed]
    faulty = [name for name in hosts if (name,) in failed]
    without_gpus = {each.host for each in judgement.unread if each.check == GPU_COUNT}
    made = {host for host, family in judgement.made if family in families}
    unread = {*hosts} - made if families else set[str]()
    unknown = [n for n in hosts if n in without_gpus | unread and n not in faulty]
    excluded = {*faulty, *unknown}
    return Readiness(
        tuple(n for n in hosts if n not in excluded and (n,) not in warned),
        tuple(n for n in hosts if n not in excluded and (n,) in warned),
        tuple(faulty),
        tuple(unknown),
        num_asked,
        *(tuple((w[0], w[1]) for w in ws if len(w) > 1) for ws in (failed, warned)),
        is_unread=bool(unknown) and unread >= {*unknown},
    )


def fit_together(
    hosts: Sequence[str], readiness: Readiness, *, is_strict: bool
) -> tuple[str, ...]:
    """Return ready hosts of which no two are a bad pair.

    As long as there are bad pairs, the host in the most of them is left out.
    """
    left_out = {*readiness.faulty, *readiness.unknown}
    left_out |= {*(readiness.warned if is_strict else ())}
    pairs = {*readiness.faulty_pairs, *(readiness.warned_pairs if is_strict else ())}
    left = [name for name in hosts if name not in left_out]
    while pairs := {pair for pair in pairs if {*pair} <= {*left}}:
        counts = Counter(name for pair in pairs for name in pair)
        left.pop(max(range(len(left)), key=lambda n: (counts[left[n]], n)))
    return tuple(left)
