"""What of its host each rank gets: the options for that."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ronde.errors import UsageError

if TYPE_CHECKING:
    from ronde.launch.placement.rank_placement import PlacementRequest

_RELAXED = "best-effort"


def add_binding_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--bind``, ``--bind-policy`` and ``--gpu-view``."""
    add = parser.add_argument_group("binding").add_argument
    add(
        "--bind",
        metavar="HOW",
        default="none",
        help="bind each rank to: core (own cores near its GPU, else an even part "
        "of all), numa (the memory node near its GPU), auto (what helps "
        "there) or none (default: none)",
    )
    add(
        "--bind-policy",
        metavar="POLICY",
        default=_RELAXED,
        help="when a rank's cores and GPU are not near the same memory: "
        "best-effort starts it anyway, restricted starts nothing unless its "
        "cores need several memory nodes, single-numa-node starts nothing "
        "(default: best-effort)",
    )
    add(
        "--gpu-view",
        metavar="WHICH",
        default="all",
        help="GPUs that a rank sees: all, its own being number LOCAL_RANK, or "
        "one, its own (default: all)",
    )


def read_placement(options: argparse.Namespace) -> "PlacementRequest | None":
    """Return what the options ask for; None where that is nothing.

    Args:
        options: From a parser that ``add_binding_options`` was called with. A dry run
            asks for a placement in any case: it shows what there is.

    Raises:
        UsageError: A word is none that there is.
    """
    asked = (options.bind, options.gpu_view, options.bind_policy, options.dry_run)
    if asked == ("none", "all", _RELAXED, False):
        return None
    # Imported where they are needed: a job that is not bound must start at once.
    from ronde.launch.placement.binding import BindMode
    from ronde.launch.placement.devices import GpuView
    from ronde.launch.placement.rank_placement import PlacementRequest
    from ronde.topology.placement.policies import Policy

    policies = [policy for policy in Policy if policy is not Policy.NONE]
    policy = _one_of("--bind-policy", options.bind_policy, policies)
    if options.bind == "none" and policy != _RELAXED:
        raise UsageError(
            f"--bind-policy {policy} must come with --bind core, numa or auto, got "
            f"--bind none. Type: --bind numa --bind-policy {policy}"
        )
    mode = _one_of("--bind", options.bind, list(BindMode))
    view = _one_of("--gpu-view", options.gpu_view, list(GpuView))
    return PlacementRequest(BindMode(mode), GpuView(view), Policy(policy))


def _one_of(option: str, word: str, words: Sequence[str]) -> str:
    if word not in words:
        raise UsageError(
            f"{option} must be {', '.join(words[:-1])} or {words[-1]}, got {word!r}. "
            f"Type: {option} {words[0]}"
        )
    return word
