"""Changes of a program or cluster, and the speed that each would bring."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from ronde.arguments import whole_number
from ronde.collectives.algorithms import ALGORITHMS
from ronde.errors import UsageError
from ronde.parallel.layout import AXES
from ronde.plan import facts
from ronde.plan.answer import Between
from ronde.plan.posterior import Posterior
from ronde.plan.setup import Exchange, LinkFacts, Overlap, Setup, Size

_OTHER_NAMES = {"alpha": "alpha_us", "sharding": "exchange"}
_OF_SIZES = ("batch", "accumulation")
_MEASURED = {"link": "between", "gpu_link": "inside", "alpha_us": "between"}
_OF_BYTES = (  # without effect where bytes are unknown
    *("parameters", "dtype", "compression", "bucket"),
    *("link", "gpu_link", "alpha_us", "transport"),
)
_COMMA = re.compile(rf",(?!\s*(?:{'|'.join(AXES)})=)")  # not one in a mesh
KEYS = (*facts.FACTS, *_OTHER_NAMES, *_OF_SIZES)


class WhatIf(NamedTuple):
    """A changed setup, with changes of its sizes."""

    name: str  # as asked for
    setup: Setup
    kind: str = ""  # free, software or purchase
    batch: float | None = None
    accumulation: float | None = None

    def size(self, size: Size) -> Size:
        """Return a size of as many ranks."""
        nodes = math.ceil(size.num_ranks / self.setup.cluster.ranks_per_node)
        parts = self.accumulation or size.accumulation
        batch = self.batch or size.batch
        batch = None if batch is None else batch * parts / size.accumulation
        return Size(size.num_ranks, nodes, batch, parts)


class WhatIfSpeeds(NamedTuple):
    """Speeds at sizes with a change, and their ratios to those without it."""

    change: WhatIf
    sizes: tuple[Size, ...]
    speeds: tuple[Between, ...]
    ratios: tuple[Between, ...]

    @property
    def gain(self) -> float:
        return self.ratios[-1].middle or 0.0


def read_changes(text: str, setup: Setup, kind: str = "") -> Iterable[WhatIf]:
    """Yield the changes of ``KEY=VALUE,...``; ``KEY=A/B`` gives one for each value."""
    axes: list[list[tuple[str, str]]] = []
    for part in _COMMA.split(text):
        key, _, values = part.strip().partition("=")
        facts.require_known([key], KEYS, "--what-if")
        if key in (pairs[0][0] for pairs in axes):
            raise UsageError(f"--what-if {text} must have {key} once. Write {key}=A/B.")
        # The slash of a unit, as in Gbit/s, separates no values.
        axes.append([(key, value) for value in re.split(r"/(?!s\b)", values)])
    for pairs in product(*axes):
        change = WhatIf(",".join(f"{k}={v}" for k, v in pairs), setup, kind)
        for key, value in pairs:
            change = (_with_size if key in _OF_SIZES else _with)(change, key, value)
        yield change


def _with(change: WhatIf, key: str, text: str) -> WhatIf:
    value = facts.read_fact(_OTHER_NAMES.get(key, key), text, "--what-if")
    key, setup = _OTHER_NAMES.get(key, key), change.setup
    old = facts.fact_of(setup, key)
    if key in _OF_BYTES and not setup.is_sized:
        raise UsageError(f"--what-if {key} needs --parameters and --batch. Give both.")
    if key in ("link", "gpu_link") and old is None:
        option = f"--{key.replace('_', '-')}"
        raise UsageError(f"--what-if {key} needs today's rate. Give {option}.")
    setup = facts.with_fact(setup, key, value)
    name = _MEASURED.get(key, "")
    link: LinkFacts | None = getattr(setup.cluster, name) if name else None
    if link is not None and isinstance(value, float):
        changed = link._replace(alpha_s=value * 1e-6)
        if isinstance(old, float) and key != "alpha_us":
            beta = link.beta_s_per_byte * old / value
            changed = link._replace(beta_s_per_byte=beta)
        setup = replace(setup, cluster=replace(setup.cluster, **{name: changed}))
    return change._replace(setup=setup)


def _with_size(change: WhatIf, key: str, text: str) -> WhatIf:
    read = facts.number_from() if key == "batch" else whole_number(1)
    try:
        value = read(text)
    except UsageError as error:
        raise UsageError(f"--what-if {key} {error}") from None
    setup, batch = change.setup, change.setup.points[0].size.batch or 0.0
    facts.require_near(setup, value if key == "batch" else batch, f"--what-if {key}")
    if key == "batch":
        return change._replace(batch=value)
    program = replace(setup.program, is_accumulating=True)
    return change._replace(setup=replace(setup, program=program), accumulation=value)


def advised_changes(setup: Setup, batch: float | None) -> Iterable[WhatIf]:
    """Yield the changes that are worth a try for a setup and the batch of a rank."""
    program, cluster = setup.program, setup.cluster
    tried: dict[str, str] = {}
    if setup.is_sized:
        tried = {"compression=powersgd": "software"}
        tried |= {f"bucket={size}MiB": "free" for size in (5, 100)}
        if program.itemsize == 4 and program.compression == 1:
            tried["compression=bf16"] = "free"
        if cluster.node_gbit_per_s:
            tried[f"link={2 * cluster.node_gbit_per_s:g}Gbit/s"] = "purchase"
        if cluster.alpha_us:
            tried[f"alpha={cluster.alpha_us / 2:g}"] = "purchase"
    if program.overlap is Overlap.NONE:
        tried["overlap=bucket"] = "software"
    if program.exchange is Exchange.ALL_REDUCE:
        others = {*ALGORITHMS, "two_levels"} - {program.algorithm}
        tried |= {f"algorithm={name}": "free" for name in sorted(others)}
    if batch is not None:
        tried |= {f"batch={2 * batch:g}": "free", "accumulation=2": "free"}
    g = cluster.ranks_per_node
    tried |= {f"per_node={n}": "purchase" for n in {max(1, g // 2), 2 * g} - {g}}
    for text, kind in tried.items():
        yield from read_changes(text, setup, kind)


def try_changes(
    posterior: Posterior, sizes: Sequence[Size], changes: Iterable[WhatIf]
) -> list[WhatIfSpeeds]:
    """Predict the speeds with each change, and their ratios to those without."""
    base, outcomes = [posterior.predict(size) for size in sizes], list[WhatIfSpeeds]()
    for change in changes:
        changed = tuple(map(change.size, sizes))
        new = [posterior.predict(size, change.setup) for size in changed]
        speeds = tuple(Between(f.low, f.middle, f.high) for f in new)
        pairs = zip(new, base, strict=True)
        ratios = tuple(Between(*posterior.ratio(*pair)) for pair in pairs)
        outcomes.append(WhatIfSpeeds(change, changed, speeds, ratios))
    return outcomes
