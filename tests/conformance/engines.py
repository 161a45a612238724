"""The engines under test, and how a rank connects to each at any size."""

from dataclasses import dataclass, replace

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
    is_whole: bool = True  # all cases, else few: another setting runs the same code
    timeout_s: float = 60.0

    def __str__(self) -> str:
        words = [self.engine, self.algorithm, self.hosts, str(self.size)]
        words.append("" if self.is_whole else "few")
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


SETTINGS = [
    Setting("solo", 1),
    *(Setting("gloo", size, is_whole=size == 3) for size in (1, 2, 3, 4)),
    *(Setting("shared_memory", size, is_whole=size == 3) for size in (2, 3, 4)),
    *(Setting("scheduled", size, "ring", is_whole=size == 3) for size in (1, 2, 3, 4)),
    Setting("scheduled", 3, "tree", is_whole=False),
    Setting("scheduled", 3, "halving_doubling", is_whole=False),
    Setting("hierarchical", 4, hosts="abab", is_whole=False),
    Setting("hierarchical", 3, hosts="aab"),
]
LONG = [
    Setting("auto", 2),  # on one host it is shared memory once more
    *(replace(setting, is_whole=True) for setting in SETTINGS if not setting.is_whole),
]
