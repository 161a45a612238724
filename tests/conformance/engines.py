"""The engines under test, and how a rank connects to each at any size."""

from dataclasses import dataclass

from torch.distributed import HashStore

from ronde.collectives import Communicator, connect
from ronde.collectives.engines.solo import SoloCommunicator
from ronde.collectives.engines.torch_distributed import TorchDistributedCommunicator
from ronde.world import Claim


@dataclass(frozen=True, slots=True)
class Setting:
    """One engine at one size."""

    engine: str
    size: int

    def __str__(self) -> str:
        return f"{self.engine}-{self.size}"

    def __call__(self, claim: Claim) -> Communicator:
        """Connect a rank."""
        if self.engine == "solo":
            return SoloCommunicator()
        if self.size == 1:
            return TorchDistributedCommunicator(
                HashStore(), 0, 1, timeout_s=60.0, is_one_host=True
            )
        return connect(claim, timeout_s=60.0)


SETTINGS = [
    Setting("solo", 1),
    *(Setting("torch_distributed", size) for size in (1, 2, 3, 4)),
]
