"""The verdict on a slow job: the ranks and hosts that cost time, and the reasons.

A rank is at fault if others wait for it, and its own work takes longer than that of the
median of the others. The difference is divided: input, garbage collector, and its own
code, for which there may be a reason such as more tokens or less CPU.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean, median
from typing import NamedTuple

from ronde.monitor.asking import ObservedJob
from ronde.monitor.verdict import Fault, is_in_call, locate
from ronde.monitor.view import WatchedHost, WatchedRank
from ronde.units import format_duration, format_size

_BLAMED = 0.05  # of the step
_ALL_WAIT = 0.1  # of the step, for input or for another rank each time
_ALL_GC = 0.05
_COMMUNICATING = 0.2
_PART = 0.3  # of a rank's extra time, for it to be a reason
_MORE_TOKENS = 1.1
_CPU_WAIT = 0.1  # of the time, more than the others
_SLOW_CLOCK = 0.9
_MORE_OFTEN = 0.05  # of the samples, at its line than the others
_SENDING, _UNREAD = 0.5, 0.3  # of the time
_FULL = 0.8  # of an interface's rate
_MOST_HOSTS = 4
_GC_ADVICE = (
    "type gc.freeze() after the start, or gc.disable(), and gc.collect() in the same "
    "steps of all ranks."
)


class _Work(NamedTuple):
    """The seconds of a step in a rank's own work, and in two parts of it."""

    own_s: float
    input_s: float
    gc_s: float


def explain_slow(seen: ObservedJob) -> tuple[Fault, ...]:
    """Find the ranks and hosts that slow a running job down, the costliest first."""
    ranks = [rank for rank in seen.view.ranks if rank.shares and rank.own_s]
    if not ranks:
        return ()
    faults: list[Fault] = []
    for rank in sorted(ranks, key=lambda rank: -rank.blame):
        own, others = _work(rank), [_work(each) for each in ranks if each is not rank]
        usual = _Work(*map(_median, zip(*others, strict=True))) if others else own
        is_late = own.own_s - usual.own_s >= _BLAMED / 2 * (rank.step_s or 0.0)
        if rank.blame >= _BLAMED and is_late:
            faults.append(_describe(seen, rank, own, usual))
    shares = [rank.shares for rank in ranks if rank.shares]
    waiting = fmean(share.waiting for share in shares)
    if not faults and waiting >= _ALL_WAIT:
        text = f"Ranks wait {waiting:.0%} of each step for the last one, which is "
        faults += [Fault("varying", (), f"{text}another rank each time.")]
    numbers = tuple(sorted(rank.rank for rank in ranks if rank.rank is not None))
    if (least := min(share.input for share in shares)) >= _ALL_WAIT:
        text = f"All ranks wait at least {least:.0%} of each step for their DataLoaders"
        faults += [Fault("input", numbers, f"{text}: give them more workers.")]
    if (least := min(share.other for share in shares)) >= _ALL_GC:
        text = f"Python's garbage collector takes {least:.0%} of each step on all ranks"
        faults += [Fault("gc", numbers, f"{text}: {_GC_ADVICE}")]
    return (*faults, *_judge_network(seen, fmean(s.communication for s in shares)))


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return median(found) if found else 0.0


def _work(rank: WatchedRank) -> _Work:
    step_s, shares = rank.step_s or 0.0, rank.shares
    if shares is None:
        return _Work(0.0, 0.0, 0.0)
    return _Work(rank.own_s or 0.0, shares.input * step_s, shares.other * step_s)


def _describe(seen: ObservedJob, rank: WatchedRank, own: _Work, usual: _Work) -> Fault:
    """Describe a rank that others wait for: its cost, the parts and the reasons.

    ``usual`` is the median of the other ranks.
    """
    more = _Work(*(mine - theirs for mine, theirs in zip(own, usual, strict=True)))
    code_s = more.own_s - more.input_s - more.gc_s
    reasons: list[tuple[float, str, str]] = []
    if more.input_s >= _PART * more.own_s:
        text = f"It waits {_ms(own.input_s)} of each step for its DataLoader"
        text += f", the others {_ms(usual.input_s)}."
        reasons.append((more.input_s, "input", text))
    if more.gc_s >= _PART * more.own_s:
        text = f"Python's garbage collector takes {_ms(own.gc_s)} of each step"
        reasons.append((more.gc_s, "gc", f"{text}: {_GC_ADVICE}"))
    if code_s >= _PART * more.own_s:
        found = _explain_code(seen, rank) or {"compute": ""}
        reasons += [(code_s, kind, text) for kind, text in found.items()]
    reasons.sort(key=lambda reason: -reason[0])
    slower = own.own_s / max(1e-9, usual.own_s) - 1.0
    cost = (
        f"On the other ranks {rank.blame:.0%} of each step is waiting for rank "
        f"{rank.rank} ({rank.host}, pid {rank.pid}). Its own work takes "
        f"{_ms(own.own_s)}, {slower:.0%} more than the median of the others."
    )
    gain = f"{1.0 / (1.0 - min(0.99, rank.blame)):.2g} times as fast"
    gain = f"If it were as fast as the others, steps would be at most {gain}."
    texts = [cost, *(text for *_, text in reasons), _find_line(seen, rank), gain]
    kind = reasons[0][1] if reasons else "compute"
    number = () if rank.rank is None else (rank.rank,)
    return Fault(kind, number, " ".join(filter(None, texts)))


def _ms(duration_s: float) -> str:
    return format_duration(max(0.0, round(duration_s, 4)))


def _explain_code(seen: ObservedJob, rank: WatchedRank) -> dict[str, str]:
    """Return the reasons for a rank's own code to take longer, by kind."""
    found: dict[str, str] = {}
    own, others = _compare(seen, rank, lambda each: _tokens_per_step(seen, each))
    if others > 0.0 and own >= _MORE_TOKENS * others:
        found["tokens"] = f"It has {own / others:.2g} times as many tokens per step."
    own, others = _compare(seen, rank, lambda each: _cpu_wait(seen, each))
    if own - others >= _CPU_WAIT:
        nice = max(each.nice for each in seen.inspections[rank.worker])
        has = f" and it has nice {nice}" if nice > 0 else ""
        text = f"It waits for a CPU {own:.0%} of the time, the others {others:.0%}"
        found["cpu"] = f"{text}: other processes use its cores{has}."
    own, others = _compare(seen, rank, lambda each: _clock(seen, each)[0])
    if 0.0 < own < _SLOW_CLOCK * others:
        why = f" ({', '.join(reasons)})" if (reasons := _clock(seen, rank)[1]) else ""
        text = f"Its GPU runs at {own:.0f} MHz, the others at {others:.0f}{why}."
        found["gpu"] = text
    return found


def _compare(
    seen: ObservedJob, rank: WatchedRank, value: Callable[[WatchedRank], float | None]
) -> tuple[float, float]:
    """Return a figure of a rank, and the median of the others; 0 if unknown."""
    others = [value(each) for each in seen.view.ranks if each is not rank]
    return value(rank) or 0.0, _median(each for each in others if each is not None)


def _tokens_per_step(seen: ObservedJob, rank: WatchedRank) -> float | None:
    for before in seen.before.ranks:
        tokens, had = rank.progress.get("tokens"), before.progress.get("tokens")
        if before.worker != rank.worker or tokens is None or had is None:
            continue
        num_steps = (rank.step or 0) - (before.step or 0)
        return (tokens - had) / num_steps if num_steps > 0 else None
    return None


def _cpu_wait(seen: ObservedJob, rank: WatchedRank) -> float | None:
    found = seen.inspections.get(rank.worker)
    return fmean(each.cpu_wait for each in found) if found else None


def _clock(
    seen: ObservedJob, rank: WatchedRank
) -> tuple[float | None, tuple[str, ...]]:
    """Return the clock of a rank's GPU in MHz, and the reasons for throttling."""
    pids = {each.pid for each in seen.inspections.get(rank.worker, ())}
    for host in seen.view.hosts:
        if host.host == rank.host and host.usage is not None:
            for gpu in host.usage.gpus:
                if pids.intersection(gpu.pids):
                    return gpu.clock_mhz, gpu.throttled_by
    return None, ()


def _find_line(seen: ObservedJob, rank: WatchedRank) -> str:
    """Return the line at which a rank is more often than the others."""
    shares: dict[str, float] = defaultdict(float)
    for worker, found in seen.inspections.items():
        others = max(1, len(seen.inspections) - 1)
        weight = 1.0 if worker == rank.worker else -1.0 / others
        for each in found:
            if is_in_call(each) is False and (line := locate(each.user_frame)):
                shares[line] += weight / len(found)
    line = max(shares, key=shares.__getitem__, default="")
    if shares[line] < _MORE_OFTEN:
        return ""
    own = [locate(each.user_frame) for each in seen.inspections[rank.worker]]
    often = f"in {own.count(line)} of {len(own)} samples of its stack"
    return f"It is{line} more often than the others: {often}."


_Path = tuple[str, str]
"""The host that sends, and the host that receives."""


def _judge_network(seen: ObservedJob, share: float) -> list[Fault]:
    """Find the host with a slow link if communication takes much of the steps."""
    faults: list[Fault] = []
    for host in seen.view.hosts:
        if host.num_errors:
            text = f"{host.num_errors:,} packets were damaged within seconds on the "
            text += f"interfaces of {host.host}."
            faults.append(Fault("errors", _ranks_on(seen, {host.host}), text))
    if share < _COMMUNICATING:
        return faults
    kind, hosts = "communication", set[str]()
    texts = [f"{share:.0%} of each step is communication that no compute hides."]
    paths = _find_sending(seen)
    busy = [set(path) for path, sending in paths.items() if sending >= _SENDING]
    if 0 < len(busy) < len(paths):
        kind, hosts = "link", busy[0].intersection(*busy) or busy[0].union(*busy)
        waits = fmean(each for each in paths.values() if each >= _SENDING)
        rest = fmean(each for each in paths.values() if each < _SENDING)
        link = f"link {'of' if len(hosts) == 1 else 'between'} "
        text = f"The {link}{' and '.join(sorted(hosts))} is slow: data waits "
        text += f"{waits:.0%} of the time to be sent over it, and {rest:.0%} on others."
        texts.append(text)
    texts += [_describe_rate(host) for host in seen.view.hosts[:_MOST_HOSTS]]
    text = " ".join(filter(None, texts))
    return [*faults, Fault(kind, _ranks_on(seen, hosts), text)]


def _ranks_on(seen: ObservedJob, hosts: set[str]) -> tuple[int, ...]:
    ranks = [each.rank for each in seen.view.ranks if each.host in hosts]
    return tuple(sorted(rank for rank in ranks if rank is not None))


def _describe_rate(host: WatchedHost) -> str:
    if host.usage is None or host.sent_per_s is None or host.received_per_s is None:
        return ""
    rates = host.sent_per_s, host.received_per_s
    limit = max((each.bits_per_s for each in host.usage.interfaces), default=0)
    is_full = limit and 8 * max(rates) >= _FULL * limit
    full = f", the limit of its interface ({limit / 1e9:g} Gbit/s)" if is_full else ""
    sent, received = (format_size(int(rate)) for rate in rates)
    return f"{host.host} sends {sent}/s and receives {received}/s{full}."


def _find_sending(seen: ObservedJob) -> Mapping[_Path, float]:
    """Return the share of the time in which data waits on each path between hosts.

    Connections are left out if their receiver is late.
    """
    sending: dict[tuple[str, str], list[float]] = defaultdict(list)
    unread: dict[str, list[float]] = defaultdict(list)
    hosts: dict[str, str] = {}
    for host, queues in seen.queues.items():
        for each in queues:
            hosts[each.local] = host
            sending[each.local, each.remote].append(each.sending)
            unread[each.local].append(each.unread)
    paths: dict[_Path, float] = {}
    for (local, remote), shares in sending.items():
        if remote in hosts and fmean(unread[remote]) < _UNREAD:
            path = hosts[local], hosts[remote]
            paths[path] = max(fmean(shares), paths.get(path, 0.0))
    return paths
