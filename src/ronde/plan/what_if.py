"""Changes of a program or cluster, and the speed that each would bring."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from ronde.errors import UsageError
from ronde.plan.answer import Between
from ronde.plan.facts import ALGORITHMS, FACTS, number_from, require_known, with_fact
from ronde.plan.posterior import Posterior
from ronde.plan.setup import Exchange, LinkFacts, Overlap, Setup, Size

_FARTHEST_BATCH = 8
_LEAST_GAIN = 1.03
_ALIASES = {"alpha": "alpha_us", "sharding": "exchange"}
_OF_SIZES = ("batch", "accumulation")


class Change(NamedTuple):
    """A changed setup, with changes of its sizes."""

    name: str  # as asked for
    setup: Setup
    batch: float | None = None
    accumulation: float | None = None
    kind: str = ""  # free, software or purchase

    def size(self, size: Size) -> Size:
        """Return a size of as many ranks."""
        nodes = math.ceil(size.num_ranks / self.setup.cluster.ranks_per_node)
        batch, parts = self.batch or size.batch, self.accumulation
        if parts and batch is not None:
            return Size(size.num_ranks, nodes, batch * parts / size.accumulation, parts)
        return size._replace(num_nodes=nodes, batch=batch)


class Outcome(NamedTuple):
    """The speeds with a change, and their ratios to those without it."""

    change: Change
    sizes: tuple[Size, ...]
    speeds: tuple[Between, ...]
    ratios: tuple[Between, ...]


def read_changes(texts: Sequence[str], setup: Setup) -> list[Change]:
    """Return the changes of ``KEY=VALUE,...``; ``KEY=A/B`` gives one for each value.

    Raises:
        UsageError: A key is unknown, or its value is wrong or has nothing to change.
    """
    return [change for text in texts for change in _read_grid(text, setup)]


def _read_grid(text: str, setup: Setup) -> Iterable[Change]:
    axes: list[list[tuple[str, str]]] = []
    for part in text.split(","):
        key, _, values = part.strip().partition("=")
        require_known(key, [*FACTS, *_ALIASES, *_OF_SIZES], "--what-if")
        # The slash of a unit, as in Gbit/s, separates no values.
        axes.append([(key, value) for value in re.split(r"/(?!s\b)", values)])
    for pairs in product(*axes):
        change = Change(",".join(f"{k}={v}" for k, v in pairs), setup)
        for key, value in pairs:
            change = _with(change, _ALIASES.get(key, key), value)
        yield change


def _with(change: Change, key: str, text: str) -> Change:
    if key in _OF_SIZES:
        return _with_size(change, key, text)
    try:
        value = FACTS[key].read(text)
    except UsageError as error:
        raise UsageError(f"--what-if {key} {error}") from None
    setup, (_, kind, name, measured) = change.setup, FACTS[key]
    link: LinkFacts | None = getattr(setup.cluster, measured) if measured else None
    old: Any = getattr(
        setup.program if kind is type(setup.program) else setup.cluster, name
    )
    if measured and key != "alpha_us" and old is None:
        option = f"--{key.replace('_', '-')}"
        raise UsageError(f"--what-if {key} needs today's rate. Give {option}.")
    setup = with_fact(setup, key, value)
    if link is not None:
        link = (
            link._replace(alpha_s=value * 1e-6)
            if key == "alpha_us"
            else link._replace(beta_s_per_byte=link.beta_s_per_byte * old / value)
        )
        setup = replace(setup, cluster=replace(setup.cluster, **{measured: link}))
    return change._replace(setup=setup)


def _with_size(change: Change, key: str, text: str) -> Change:
    known = [p.size.batch for p in change.setup.points if p.size.batch is not None]
    if not known:
        raise UsageError(f"--what-if {key} needs today's batch. Give --batch.")
    try:
        value = number_from(0)(text)
    except UsageError as error:
        raise UsageError(f"--what-if {key} {error}") from None
    if key == "accumulation":
        program = replace(change.setup.program, is_accumulating=True)
        setup = replace(change.setup, program=program)
        return change._replace(setup=setup, accumulation=value)
    least, most = min(known) / _FARTHEST_BATCH, max(known) * _FARTHEST_BATCH
    if not least <= value <= most:
        raise UsageError(
            f"--what-if batch must be from {least:g} to {most:g}, 8 times around the "
            f"measured one, got {value:g}. Measure one nearer to it."
        )
    return change._replace(batch=value)


def advised_changes(setup: Setup) -> list[Change]:
    """Return the changes that are worth a try for a setup."""
    program, cluster, batch = setup.program, setup.cluster, setup.points[0].size.batch
    tried = {"compression=powersgd": "software"}
    if cluster.node_gbit_per_s:
        tried[f"link={2 * cluster.node_gbit_per_s:g}Gbit/s"] = "purchase"
    if cluster.alpha_us:
        tried[f"alpha={cluster.alpha_us / 2:g}"] = "purchase"
    if program.itemsize == 4 and program.compression == 1:
        tried["compression=bf16"] = "free"
    if program.overlap is Overlap.NONE:
        tried["overlap=bucket"] = "software"
    if program.exchange is Exchange.ALL_REDUCE:
        others = [name for name in ALGORITHMS[:4] if name != program.algorithm]
        tried |= {f"algorithm={name}": "free" for name in others}
        tried |= {f"bucket={size}MiB": "free" for size in (5, 100)}
    if batch is not None:
        tried |= {f"batch={2 * batch:g}": "free", "accumulation=2": "free"}
    g = cluster.ranks_per_node
    tried |= {f"per_node={n}": "purchase" for n in {max(1, g // 2), 2 * g} - {g}}
    return [
        change._replace(kind=kind)
        for text, kind in tried.items()
        for change in _read_grid(text, setup)
    ]


def try_changes(
    posterior: Posterior, sizes: Sequence[Size], changes: Sequence[Change]
) -> list[Outcome]:
    """Predict the speeds with each change, and their ratios to those without."""
    outcomes: list[Outcome] = []
    base = [posterior.predict(size) for size in sizes]
    for change in changes:
        changed = tuple(map(change.size, sizes))
        new = [posterior.predict(size, change.setup) for size in changed]
        speeds = tuple(Between(f.low, f.middle, f.high) for f in new)
        pairs = zip(new, base, strict=True)
        ratios = tuple(Between(*posterior.ratio(f, b)) for f, b in pairs)
        outcomes.append(Outcome(change, changed, speeds, ratios))
    return outcomes


def best_first(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return the outcomes that gain over 3 % at the largest size, the best first."""
    gains = [(outcome.ratios[-1].middle or 0.0, outcome) for outcome in outcomes]
    gains = [pair for pair in gains if pair[0] > _LEAST_GAIN]
    return [outcome for _, outcome in sorted(gains, key=lambda pair: -pair[0])]
