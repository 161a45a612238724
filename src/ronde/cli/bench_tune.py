"""``ronde bench --tune`` and ``--explain``: the table that ``auto`` chooses by."""

import sys
from collections import Counter
from dataclasses import replace

from ronde.bench.options import Options
from ronde.bench.ranks import Ranks, meet_ranks
from ronde.bench.tuning import tune
from ronde.bench.variables import Variables
from ronde.collectives.choice import TableKey, explain, find_table, save
from ronde.world import RankInfo
from ronde.world.environment import read_cache_directory

_ONE_HOST = ("shared_memory", "gloo")
_SEVERAL_HOSTS = (
    "gloo",
    "scheduled/ring",
    "scheduled/tree",
    "scheduled/halving_doubling",
)


def candidates(options: Options, claim: RankInfo) -> tuple[str, ...]:
    """Return the engines to measure: those of ``--compare``, else the likely ones."""
    if options.is_compared:
        return options.engines.names
    is_one_host = claim.local_size == claim.size
    return _ONE_HOST if is_one_host else _SEVERAL_HOSTS


def run_tuning(options: Options, variables: Variables, claim: RankInfo) -> None:
    """Measure, keep the table and say what is in it; collective."""
    names = candidates(options, claim)
    engines = replace(options.engines, names=names, device="cpu")
    ranks = meet_ranks(claim, replace(options, engines=engines), variables)
    is_shown = ranks.is_speaker and options.has_terminal
    table = tune(ranks.engines, on_progress=_show if is_shown else None)
    if ranks.is_speaker:
        key = TableKey.here(Counter(ranks.hosts))
        path = save(table, key, read_cache_directory())
        print(f"{explain(table)}\nkept in {path}", flush=True)
    ranks.control.barrier().wait()
    ranks.close()


def run_explaining(options: Options, variables: Variables, claim: RankInfo) -> None:
    """Say what ``auto`` takes; collective."""
    ranks = meet_ranks(claim, options, variables)
    if ranks.is_speaker:
        print("\n".join(explained(ranks)), flush=True)
    ranks.control.barrier().wait()
    ranks.close()


def explained(ranks: Ranks) -> list[str]:
    """Return, in lines, what ``auto`` takes for these ranks, and why."""
    table, note = find_table(ranks.hosts, read_cache_directory())
    return [*([note] if note else []), *explain(table).splitlines()]


def _show(num_done: int, num_sizes: int) -> None:
    is_over = num_done == num_sizes
    bar = "\r \r" if is_over else f"\rtuning: {num_done}/{num_sizes} sizes"
    sys.stderr.write(bar)
    sys.stderr.flush()
