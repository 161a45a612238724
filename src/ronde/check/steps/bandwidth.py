"""How much goes through between each two hosts, where the user asks for it."""

from collections.abc import Sequence

from ronde.check.bandwidth import judge_pairs, rounds
from ronde.check.facts import Value
from ronde.check.hosts import HostSet, Step
from ronde.check.steps.pair_ways import Benches, Pair, Streams, Way

RATES = "network.bandwidth"
"""Fact: by the name of each other host, what comes from it, in GB/s (1e9)."""

FAILURES = "network.bandwidth_failures"
"""Fact: by the name of each other host with which it could not be measured, why."""

WAY = "network.bandwidth_way"
"""Fact: what was measured: ``tcp``, ``gloo`` or ``nccl``."""

REMARKS = "network.nccl_remarks"
"""Fact: by rule of ``ronde topo log``, what looks wrong in what NCCL said."""

_GPUS = ("gpu.count", "versions.torch_build")


def run(panel: HostSet) -> None:
    """Have the hosts meet in pairs, where there are several.

    All pairs of a round are measured at the same time, as a job would load the network.
    Who is slow is measured once more: a busy moment is no slow link.
    """
    if len(panel.names) < 2:
        return
    engine = _choose_engine(panel)
    way = _way(panel, engine)
    for name in panel.names:
        panel.note(name, RATES, {})
        panel.note(name, FAILURES, {})
        panel.note(name, WAY, engine)
        if engine == "nccl":
            panel.note(name, REMARKS, {})
    ready = _open(panel, way)
    schedule = list(rounds(ready))
    # What is left out is spread over the schedule.
    stride = max(1, -(-len(schedule) // way.max_rounds))
    played = schedule[::stride]
    for pairs in played:
        _play(panel, way, pairs)
    suspected = _suspected(panel)
    for pairs in played:
        _play(panel, way, [pair for pair in pairs if {*pair} in suspected])
    _tell_unmet(panel)


def _choose_engine(panel: HostSet) -> str:
    """Return what the user asked for; ``auto`` is NCCL where all hosts have it."""
    asked = str(panel.settings["bandwidth"])
    if asked != "auto":
        return asked
    facts = [each.values for each in panel.facts.values()]
    is_nccl = all(
        int(values.get(_GPUS[0]) or 0) > 0
        and str(values.get(_GPUS[1])).startswith(("CUDA", "HIP"))
        for values in facts
    )
    return "nccl" if is_nccl else "tcp"


def _way(panel: HostSet, engine: str) -> Way:
    return Streams() if engine == "tcp" else Benches(engine, _num_ranks(panel, engine))


def _num_ranks(panel: HostSet, engine: str) -> int:
    """Return how many ranks a host has in a job of two: of NCCL one a GPU at most."""
    wanted = int(panel.settings.get("num_ranks") or 0)
    if engine == "gloo":
        return wanted or 1
    fewest = min(int(f.values.get(_GPUS[0]) or 0) for f in panel.facts.values())
    return max(1, min(wanted or fewest, fewest))


def _suspected(panel: HostSet) -> list[set[str]]:
    rates = {name: facts.values[RATES] for name, facts in panel.facts.items()}
    slow, links = judge_pairs(rates)
    return [
        *({each.host, partner} for each in slow for partner in each.partners),
        *({each.host, each.other} for each in links),
    ]


def _tell_unmet(panel: HostSet) -> None:
    for name, facts in panel.facts.items():
        if not facts.values[RATES]:
            del facts.values[RATES]
            reasons = [*facts.values[FAILURES].values(), "no other host was met"]
            panel.note_unread(name, RATES, facts.unreadable.get(RATES, reasons[0]))


def _open(panel: HostSet, way: Way) -> list[str]:
    """Return the hosts that can be measured, in the user's order."""
    failures = {
        **dict.fromkeys(panel.names, ""),
        **way.open(panel),
        **{
            name: "no other host has a route to it"
            for name, address in panel.addresses.items()
            if not address
        },
    }
    for name, failure in failures.items():
        if failure:
            panel.note_unread(name, RATES, failure)
    return [name for name, failure in failures.items() if not failure]


def _play(panel: HostSet, way: Way, pairs: Sequence[Pair]) -> None:
    """Measure disjoint pairs; the better of two measurements stays."""
    if not pairs:
        return
    for pair, measured in way.measure(panel, pairs).items():
        ends = zip(pair, pair[::-1], measured.rates, strict=True)
        for one, other, rate in ends:
            known: dict[str, Value] = panel.facts[one].values
            if measured.remarks:
                known[REMARKS] = {**measured.remarks, **known[REMARKS]}
            if measured.failure:
                known[FAILURES][other] = measured.failure
            else:
                known[RATES][other] = max(rate, known[RATES].get(other, 0.0))


STEP = Step(
    "bandwidth", run, (RATES, FAILURES, WAY, REMARKS), _GPUS, setting="bandwidth"
)
