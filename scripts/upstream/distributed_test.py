"""Torch's own ``DistributedTest``, which comes in its package, as tests of pytest."""

from pathlib import Path

from torch.testing._internal import common_distributed

from ronde.launch.environments import own_environment

for feature in ("ddp", "subgroup", "plugin"):  # which tests ask for as they are defined
    common_distributed.DistTestCases.backend_feature[feature].add("ronde")

from torch.testing._internal.distributed import distributed_test  # noqa: E402
from torch.testing._internal.distributed.distributed_test import (  # noqa: E402
    DistributedTest,
    TestDistBackend,
)

(Path(own_environment()["TEMP_DIR"]) / "barrier").mkdir(exist_ok=True)
# They look for the names that Gloo's collectives have in a profile.
distributed_test.PROFILING_SUPPORTED_BACKENDS[:] = []
distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS[:] = []


class TestOnRanks(TestDistBackend, DistributedTest._DistTestBase):  # noqa: SLF001
    """The tests that need no GPU; torch skips the others."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()


del DistributedTest, TestDistBackend
