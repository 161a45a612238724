"""Which network adapter is nearest to each rank's GPU."""

from collections import Counter
from collections.abc import Sequence

from ronde.topology.machine import UNKNOWN_NODE, Gpu, Nic


def nearest_nics(
    gpus: Sequence[Gpu | None], nics: Sequence[Nic]
) -> tuple[Nic | None, ...]:
    """Return each GPU's nearest adapter, None where nothing is known of it.

    Nearest is what shares most bridges with it, then what is near the same memory. Of
    equals each is given out as often, so that every GPU has a rail of its own.

    Args:
        gpus: Each rank's own, or None.
        nics: Those that are up. Where RDMA adapters are, only those count, and of them
            only those of the rate that most have: the others serve storage or logins.
    """
    candidates = _candidates(nics)
    given: Counter[str] = Counter()
    nearest: list[Nic | None] = []
    for gpu in gpus:
        near = [] if gpu is None else [n for n in candidates if _is_known(gpu, n)]
        if gpu is None or not near:
            nearest.append(None)
            continue
        keys = {
            nic.name: (-_shared(gpu, nic), gpu.node != nic.node, given[nic.name], n)
            for n, nic in enumerate(near)
        }
        best = min(near, key=lambda nic: keys[nic.name])
        given[best.name] += 1
        nearest.append(best)
    return tuple(nearest)


def _candidates(nics: Sequence[Nic]) -> list[Nic]:
    placed = [nic for nic in nics if nic.path]
    adapters = [nic for nic in placed if nic.kind == "infiniband"] or placed
    rates = Counter(nic.mbit_per_s for nic in adapters)
    usual = max(rates, key=lambda rate: (rates[rate], rate), default=0)
    return [nic for nic in adapters if nic.mbit_per_s == usual]


def _is_known(gpu: Gpu, nic: Nic) -> bool:
    return _shared(gpu, nic) > 0 or UNKNOWN_NODE not in {gpu.node, nic.node}


def _shared(gpu: Gpu, nic: Nic) -> int:
    """Return how many bridges, the host's first, lie above both."""
    pairs = zip(gpu.path.split("/"), nic.path.split("/"), strict=False)
    count = 0
    for ours, theirs in pairs:
        if ours != theirs or not ours:
            break
        count += 1
    return count
