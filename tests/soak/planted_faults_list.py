"""The faults that ``planted_faults.py`` plants: two in each of ten packages.

They were chosen by reading the product, not its tests: mistakes that a change could
make, each of which a user would notice. Do not choose others because a test misses one.
"""

from typing import NamedTuple


class Fault(NamedTuple):
    """One mistake in one file of ``src/ronde``."""

    file: str
    old: str  # must be there exactly once
    new: str
    harm: str  # what goes wrong for a user


FAULTS = (
    Fault(
        "collectives/adasum.py",
        "products[index] += torch.stack",
        "products[index] = torch.stack",
        "Adasum of long tensors (2 ranks: above 131072 elements) weights them wrongly",
    ),
    Fault(
        "collectives/communicator.py",
        "            values = values.clone()\n            scale_(values, prescale)\n",
        "            scale_(values, prescale)\n",
        "reduce_scatter with a prescale changes its input, on MPI and several hosts",
    ),
    Fault(
        "coordination/coordinator.py",
        'call ``progress`` after it."""\n        self._report_losses()\n',
        'call ``progress`` after it."""\n',
        "a rank that dies while others wait in a named operation goes unnoticed",
    ),
    Fault(
        "coordination/execution.py",
        "how = request.kind, request.device, *request.scaling",
        "how = request.kind, request.device",
        "sums, averages and scaled sums that are fused are all reduced as the first",
    ),
    Fault(
        "data_parallel/buckets.py",
        "                self.control[slot] = 0\n",
        "",
        "a gradient that no rank has becomes zeros, not None: optimizers change it",
    ),
    Fault(
        "launch/host.py",
        "host._replace(slots=num_each) if host.slots else host for host in hosts",
        "host._replace(slots=num_each) for host in hosts",
        "--nproc-per-node starts ranks on a host that 0 slots keep out",
    ),
    Fault(
        "launch/job/generation.py",
        "        if not self._generation.is_stopping:\n"
        "            self._generation.stop(signal.SIGTERM)\n",
        "        pass\n",
        "after a host is lost the ranks on the others run on, for ever if they wait",
    ),
    Fault(
        "membership/policy.py",
        "if 0 <= host.slots <= record.worker.slot:",
        "if 0 <= host.slots < record.worker.slot:",
        "an elastic job keeps one rank too many on a host that has fewer slots now",
    ),
    Fault(
        "world/launcher_env.py",
        "enumerate(sorted(own))",
        "enumerate(own)",
        "after a change, ranks of a host swap local ranks, and so GPUs",
    ),
    Fault(
        "store/authentication.py",
        "not found.st_mode & 0o077",
        "not found.st_mode & 0o007",
        "a secret that the user's group can read is accepted",
    ),
    Fault(
        "store/protocol.py",
        "self._num_bytes -= _size(key, values.pop(key, None))",
        "values.pop(key, None)",
        "keys that were deleted count for ever: a long job's store is full in the end",
    ),
    Fault(
        "torch/optimizer.py",
        "            is_passes_average=average_aggregated_gradients,\n",
        "",
        "average_aggregated_gradients is ignored: gradients are too large",
    ),
    Fault(
        "torch/sync_batch_norm.py",
        "unbiased = variance * (count / (count - 1).clamp(min=1))",
        "unbiased = variance",
        "SyncBatchNorm's running variance is not that of BatchNorm",
    ),
    Fault(
        "check/limits.py",
        "if left < _GOOD_RANK_BYTES * wanted:",
        "if left < _GOOD_RANK_BYTES:",
        "ronde check passes a host with memory for one rank, for any number of ranks",
    ),
    Fault(
        "check/network/bandwidth.py",
        "(a, b): min(rates[a][b], rates[b][a])",
        "(a, b): max(rates[a][b], rates[b][a])",
        "ronde check passes a link that is slow in one direction",
    ),
    Fault(
        "topology/paths/speeds.py",
        "(6 if rate <= 5 else 7.5)",
        "(6 if rate < 5 else 7.5)",
        "the bandwidth of PCIe 2 links is a quarter too high",
    ),
    Fault(
        "topology/placement/placing.py",
        "        self._num_given[best] += 1\n",
        "",
        "of adapters equally near, all ranks get the same one",
    ),
    Fault(
        "bench/sweeps.py",
        "count = self.loop.iterations * self.loop.aggregated\n        return combine(",
        "count = self.loop.iterations\n        return combine(",
        "ronde bench -m N shows N times the time and a fraction of the bandwidth",
    ),
    Fault(
        "bench/training/outcome.py",
        "num_ranks = 1 if variant is Variant.ONE_RANK else self.setting.num_ranks",
        "num_ranks = self.setting.num_ranks",
        "ronde bench train shows one rank's samples a second times the number of ranks",
    ),
)
