"""The engines under test, and how a rank connects to each at any size."""

from dataclasses import dataclass, replace

from tests.conformance.samples import ALL_CASES, FEW, THIRD
from torch.distributed import HashStore

from ronde.collectives import (
    ENGINES,
    Communicator,
    Engine,
    EngineConfig,
    ScheduledEngine,
    SoloEngine,
    TorchDistributedEngine,
    connect,
    two_levels,
)
from ronde.world import RankInfo


@dataclass(frozen=True, slots=True)
class Setting:
    """One engine at one size."""

    engine: str
    size: int
    algorithm: str = ""
    hosts: str = ""  # a letter for the host of each rank
    share: str = ALL_CASES  # or less: another setting runs the same code
    timeout_s: float = 60.0

    def __str__(self) -> str:
        words = [self.engine, self.algorithm, self.hosts, str(self.size)]
        words.append("" if self.share == ALL_CASES else self.share)
        return "-".join(filter(None, words))

    def __call__(self, claim: RankInfo) -> Communicator:
        """Connect a rank."""
        if self.engine == "solo":
            return Communicator(SoloEngine())
        if self.engine == "scheduled":
            inner = gloo(claim, self.timeout_s)
            return Communicator(ScheduledEngine(inner, self.algorithm))
        if self.engine == "hierarchical":
            config = EngineConfig(claim, self.timeout_s, self.algorithm)
            return Communicator(two_levels(config, self.hosts[claim.rank]))
        if self.size == 1:
            return Communicator(gloo(claim, self.timeout_s))
        return connect(claim, timeout_s=self.timeout_s, engine=self.engine)


def gloo(claim: RankInfo, timeout_s: float) -> Engine:
    """Connect by torch_distributed at any size."""
    if claim.size == 1:
        return TorchDistributedEngine(
            HashStore(), 0, 1, timeout_s=timeout_s, is_one_host=True
        )
    return ENGINES["gloo"](EngineConfig(claim, timeout_s))


SHARES = {1: FEW, 2: FEW, 3: ALL_CASES, 4: FEW}
SETTINGS = [
    Setting("solo", 1),
    *(Setting("gloo", size, share=SHARES[size]) for size in (1, 2, 3, 4)),
    *(Setting("shared_memory", size, share=SHARES[size]) for size in (2, 3, 4)),
    *(Setting("scheduled", size, "ring", share=FEW) for size in (1, 2, 4)),
    Setting("scheduled", 3, "ring", share=THIRD),
    Setting("scheduled", 3, "tree", share=FEW),
    Setting("scheduled", 3, "halving_doubling", share=FEW),
    Setting("hierarchical", 4, hosts="abab", share=FEW),
    Setting("hierarchical", 3, hosts="aab", share=THIRD),
]
LONG = [
    Setting("auto", 2),  # on one host it is shared memory once more
    *(replace(each, share=ALL_CASES) for each in SETTINGS if each.share != ALL_CASES),
]
