"""Each host against each other: who meets whom when, and who is slow.

Hosts meet in pairs, as in a tournament; the pairs of a round are disjoint, so that all
of them can be measured at the same time.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple

Rates = Mapping[str, Mapping[str, float]]
"""By receiver, then by sender: what came through, in gigabytes (1e9) per second."""

SLOW_SHARE = 0.7
"""Below this share of the median a host or a link is slow."""


class SlowHost(NamedTuple):
    """A host that is slow with most others.

    Attributes:
        host: Its name.
        rate: Median over its partners of the lower of both directions, GB/s.
        sent: Median over its partners of what it sends, GB/s.
        received: Median over its partners of what it receives, GB/s.
        usual: What pairs without a slow host have, GB/s.
        partners: With whom it is slow, the slowest first.
    """

    host: str
    rate: float
    sent: float
    received: float
    usual: float
    partners: tuple[str, ...]


class SlowLink(NamedTuple):
    """Two hosts that are slow with each other alone.

    Attributes:
        host: The one.
        other: The other.
        rate: The lower of both directions, GB/s.
        usual: What pairs without a slow host have, GB/s.
    """

    host: str
    other: str
    rate: float
    usual: float


class Verdict(NamedTuple):
    """What a tournament has shown.

    Attributes:
        hosts: Slow ones.
        links: Slow ones between hosts that are not slow.
    """

    hosts: tuple[SlowHost, ...]
    links: tuple[SlowLink, ...]


def rounds(hosts: Sequence[str]) -> Iterator[tuple[tuple[str, str], ...]]:
    """Yield rounds of disjoint pairs, in which each host meets each other once.

    There is one round less than hosts, and as many as hosts where their number is odd:
    each sits one out.

    Source: the circle method of round-robin tournaments: one place stays, and the
        others move on by one from round to round.
    """
    places: list[str | None] = [*hosts]
    if len(places) % 2:
        places.append(None)
    half = len(places) // 2
    for _ in range(len(places) - 1):
        facing = zip(places[:half], reversed(places[half:]), strict=True)
        yield tuple((a, b) for a, b in facing if a is not None and b is not None)
        places.insert(1, places.pop())


def judge_pairs(rates: Rates, share: float = SLOW_SHARE) -> Verdict:
    """Return who is slow.

    A pair is as fast as the slower of its directions. A host is slow where the median
    over its partners is below ``share`` of the median of all hosts' medians: one slow
    link does not make it that, as long as it has three partners. The links of slow
    hosts are not told again; each other link is compared with what is usual then.

    Of two hosts neither is slow: there is nothing to compare them with.

    Args:
        rates: What was measured; pairs of which one direction is missing do not count.
        share: Above zero, at most one.
    """
    pairs = _pairs_of(rates)
    met: dict[str, dict[str, float]] = {}
    for (a, b), rate in pairs.items():
        met.setdefault(a, {})[b] = rate
        met.setdefault(b, {})[a] = rate
    if not met:
        return Verdict((), ())
    medians = {host: median(partners.values()) for host, partners in met.items()}
    middle = median(medians.values())
    slow = {host for host, rate in medians.items() if rate < share * middle}
    others = {pair: rate for pair, rate in pairs.items() if not slow & {*pair}}
    # Slow hosts draw down the medians of the others, all the more the fewer they are.
    usual = max(middle, median(others.values())) if others else middle
    limit = share * usual
    told = (_describe(h, rates, met[h], usual, limit) for h in met if h in slow)
    links = (
        SlowLink(*pair, rate, usual) for pair, rate in others.items() if rate < limit
    )
    return Verdict(tuple(told), tuple(links))


def _pairs_of(rates: Rates) -> dict[tuple[str, str], float]:
    return {
        (a, b): min(rates[a][b], rates[b][a])
        for a, b in combinations(rates, 2)
        if b in rates[a] and a in rates[b]
    }


def _describe(
    host: str, rates: Rates, met: Mapping[str, float], usual: float, limit: float
) -> SlowHost:
    sent = median(rates[other][host] for other in met)
    received = median(rates[host][other] for other in met)
    partners = sorted((o for o in met if met[o] < limit), key=met.__getitem__)
    rate = median(met.values())
    return SlowHost(host, rate, sent, received, usual, tuple(partners))
