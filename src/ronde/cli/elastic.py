"""Read options of elastic jobs, as ronde, horovodrun or torchrun spell them."""

import argparse
from collections.abc import Mapping

from ronde.arguments import attribute_of, read_nodes, read_number
from ronde.cli.hosts import (
    DISCOVERIES,
    ELASTIC_OPTIONS,
    HorovodOptions,
    read_slots,
)
from ronde.errors import UsageError
from ronde.launch.elastic_options import (
    NO_LIMIT,
    DiscoverySpec,
    ElasticOptions,
    FailureDomain,
)
from ronde.topology.sysfs import read_machine
from ronde.units import parse_duration_s

_OF_HOROVOD = frozenset(("min-num-proc", "max-num-proc", "blacklist-cooldown-range"))
_NOTICES = ("signal", "aws", "gcp", "azure", "slurm")
_TYPE = "Type for example: ronde run --min-ranks 2 --max-ranks 4 ..."
_USUAL = ElasticOptions(1, NO_LIMIT)
_Limit = tuple[str, int]  # the option, as typed, and a number of ranks


def read_elastic(
    options: argparse.Namespace,
    horovod: HorovodOptions,
    environ: Mapping[str, str],
    num_ranks: int | None,
    num_each: int | None,
) -> ElasticOptions | None:
    """Return the options of an elastic job; None for a job of fixed size."""
    given, script = horovod.elastic, options.host_discovery_script
    few, many = _read_nodes_range(options, environ, num_each)
    least = _limit(
        {"--min-ranks": options.min_ranks, "--min-np": given.get("min-num-proc")}, few
    )
    most = _limit(
        {"--max-ranks": options.max_ranks, "--max-np": given.get("max-num-proc")}, many
    )
    discovery = _read_discovery(options, horovod.ssh_port, num_each)
    if not (least or most or discovery):
        _refuse_alone(options)
        return None
    _require_order(least, most, num_ranks)
    if options.discover_every is not None and discovery is None:
        raise UsageError(
            "--discover-every needs --host-discovery. Add it, or drop --discover-every."
        )
    # In Horovod only --max-np limits an elastic job.
    is_horovods = script is not None or "min-num-proc" in given
    open_ended = NO_LIMIT if num_ranks is None or is_horovods else num_ranks
    is_by_host = bool(many or script is not None or _OF_HOROVOD & given.keys())
    domain = FailureDomain.HOST if is_by_host else FailureDomain.SLOT
    text = given.get("elastic-timeout") or environ.get("HOROVOD_ELASTIC_TIMEOUT")
    return ElasticOptions(
        min_ranks=least[1] if least else num_ranks or 1,
        max_ranks=most[1] if most else open_ended,
        spares=options.spares or 0,
        discovery=discovery,
        discover_every_s=options.discover_every or _USUAL.discover_every_s,
        failure_domain=FailureDomain(options.failure_domain or domain),
        awaits_joining=is_horovods,
        cooldown_s=_read_cooldown(
            options.cooldown, given.get("blacklist-cooldown-range")
        ),
        elastic_timeout_s=_read_elastic_timeout(text),
        reform_timeout_s=options.reform_timeout or _USUAL.reform_timeout_s,
        reset_limit=None
        if (limit := given.get("reset-limit")) is None
        else read_number("--reset-limit", limit, "Leave it out for no limit."),
        notice=_USUAL.notice
        if options.notice is None
        else _read_notice(options.notice),
    )


def _read_nodes_range(
    options: argparse.Namespace, environ: Mapping[str, str], num_each: int | None
) -> tuple[_Limit | None, _Limit | None]:
    if not options.nodes or ":" not in options.nodes:
        return None, None
    name = f"--nodes {options.nodes}"
    least, most = read_nodes(options.nodes)
    if least == most:
        return None, None
    if options.listen and num_each is None and options.num_proc is None:
        # Each node is as large as the head.
        num_gpus = len(read_machine(environ=environ).gpus)
        num_each = options.slots = options.slots or num_gpus or 1
    if num_each is None or num_each < 0:
        raise UsageError(
            f"{name} needs a number of ranks for each host. "
            f"Type: {name} --nproc-per-node 8"
        )
    return (name, least * num_each), (name, most * num_each)


def _limit(
    typed: Mapping[str, int | str | None], nodes: _Limit | None
) -> _Limit | None:
    # A configuration file holds texts.
    limits = [
        (name, read_number(name, str(given), "Correct it.", least=1))
        for name, given in typed.items()
        if given is not None
    ]
    limits += [nodes] if nodes else []
    if len(limits) > 1:
        raise UsageError(
            f"{limits[0][0]} and {limits[1][0]} cannot be used together. Drop one."
        )
    return limits[0] if limits else None


def _require_order(
    least: _Limit | None, most: _Limit | None, num_ranks: int | None
) -> None:
    size = None if num_ranks is None else ("-np", num_ranks)
    for low, high in ((least, size), (least, most), (size, most)):
        if low and high and high[1] < low[1]:
            raise UsageError(
                f"{low[0]} must be at most {high[0]}, got {low[1]} and {high[0]} "
                f"{high[1]}. Correct one of them."
            )


def _refuse_alone(options: argparse.Namespace) -> None:
    for name in ELASTIC_OPTIONS:
        if getattr(options, attribute_of(name)) is not None:
            raise UsageError(
                f"{name} needs --min-ranks, --max-ranks or --host-discovery. {_TYPE}"
            )


def _read_discovery(
    options: argparse.Namespace, ssh_port: int, num_each: int | None
) -> DiscoverySpec | None:
    for option in DISCOVERIES:
        text = getattr(options, attribute_of(option))
        if text is None:
            continue
        if options.nodes and ":" not in options.nodes:
            raise UsageError(
                f"--nodes must be a range such as 2:4 with {option}, got "
                f"{options.nodes}. Type a range, or --max-ranks N in its place."
            )
        # Imported here: most jobs start without it.
        from ronde.launch.hosts.sources import is_hostfile

        is_file = is_hostfile(text, option)
        slots, is_local = read_slots(options), bool(options.standalone)
        return DiscoverySpec(option, text, is_file, slots, num_each, ssh_port, is_local)
    return None


def _read_elastic_timeout(text: str | None) -> float:
    if text is None:
        return _USUAL.elastic_timeout_s
    duration_s = parse_duration_s(text, "--elastic-timeout")
    if not duration_s:
        raise UsageError(
            f"--elastic-timeout must be longer than 0, got {text!r}. Correct it."
        )
    return duration_s


def _read_cooldown(text: str | None, horovods: list[str] | None) -> tuple[float, float]:
    option = "--cooldown"
    if horovods is not None:
        option = "--blacklist-cooldown-range"
        if text is not None:
            raise UsageError(
                f"--cooldown and {option} cannot be used together. Drop one."
            )
    elif text is None:
        return _USUAL.cooldown_s
    words = horovods or (text or "").split(",")
    if len(words) == 2:
        low_s, high_s = (parse_duration_s(word, option) for word in words)
        if 0 < low_s <= high_s:
            return low_s, high_s
    raise UsageError(
        f"{option} must be two durations above 0, the shorter first, got "
        f"{' '.join(words)!r}. Type: --cooldown 30s,1h"
    )


def _read_notice(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        kind, _, path = name.partition(":")
        if name not in _NOTICES and not (kind == "file" and path):
            raise UsageError(
                f"--notice must be a list of {', '.join(_NOTICES)} or file:PATH, got "
                f"{name!r}. Type: --notice signal,aws"
            )
    return names
