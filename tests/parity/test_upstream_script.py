"""``scripts/upstream_tests``, on stand-ins of the checkouts that it is for."""

import subprocess
from pathlib import Path
from textwrap import dedent

import pytest
from tests.cli.conftest import clean_environment

SCRIPT = Path(__file__).parents[2] / "scripts" / "upstream_tests"
ONE_RANK = """
    def test_one_rank():
        import horovod.torch as hvd

        hvd.init()
        assert hvd.size() == 1
"""
HOROVOD = {
    "setup.cfg": "",
    "test/parallel/test_torch.py": """
        import unittest

        import torch

        import horovod.torch as hvd


        class TorchTests(unittest.TestCase):
            def test_sum(self):
                hvd.init()
                mine = torch.full((3,), hvd.rank() + 1.0)
                assert hvd.allreduce(mine, op=hvd.Sum).tolist() == [3.0] * 3

            @unittest.skip("as some are")
            def test_skipped(self):
                raise AssertionError
    """,
    "test/single/test_torch_elastic.py": ONE_RANK,
}
LAST_RANK_FAILS = """
    import horovod.torch as hvd

    def test_last_rank():
        hvd.init()
        assert hvd.rank() != hvd.size() - 1
"""
IGNITE = {"pyproject.toml": "", "tests/ignite/conftest.py": ""}
TORCH = {
    "test/distributed/test_c10d_common.py": "",
    "test/distributed/tensor/test_dtensor.py": "",
    "test/distributed/test_device_mesh.py": """
        import torch
        from torch import distributed
        from torch.testing._internal.common_distributed import MultiProcessTestCase

        class TestGroup(MultiProcessTestCase):
            world_size = 2

            def setUp(self):
                super().setUp()
                self._spawn_processes()

            def make(self):
                store = distributed.FileStore(self.file_name, 2)
                place = {"rank": self.rank, "world_size": 2}
                distributed.init_process_group("gloo", store=store, **place)
                distributed.barrier()
                return type(distributed.group.WORLD).__name__

            def test_sum(self):
                self.make()
                mine = torch.full((3,), self.rank + 1.0)
                distributed.all_reduce(mine)
                assert mine.tolist() == [3.0] * 3

            def test_on_gloo_alone(self):
                assert self.make() == "ProcessGroup"
    """,
}


def write(checkout, files):
    for name, text in files.items():
        file = checkout / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(text))
    return checkout


@pytest.fixture(scope="module")
def upstream_tests(tmp_path_factory):
    """Return a function that runs the script, whose environment is made once."""
    own = {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}

    def run(*words):
        done = subprocess.run(
            [SCRIPT, *words],
            env=clean_environment() | own,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        rows = [" ".join(line.split()) for line in done.stdout.splitlines()]
        return done.returncode, rows, done.stderr

    return run


@pytest.mark.soak
def test_tests_of_horovod_that_pass(upstream_tests, tmp_path):
    checkout = write(tmp_path, HOROVOD)
    files = ("--file", "test_torch.py", "--file", "test_torch_elastic.py")
    code, rows, errors = upstream_tests(checkout, *files)
    assert (code, rows) == (
        0,
        [
            "tests rank passed failed skipped",
            "parallel/test_torch.py 0 1 0 1",
            "parallel/test_torch.py 1 1 0 1",
            "single/test_torch_elastic.py 0 1 0 0",
        ],
    ), errors


@pytest.mark.soak
def test_a_test_of_horovod_that_fails_on_one_rank(upstream_tests, tmp_path):
    test = "parallel/test_torch.py"
    checkout = write(tmp_path, HOROVOD | {f"test/{test}": LAST_RANK_FAILS})
    code, rows, errors = upstream_tests(checkout, "--file", "test_torch.py")
    assert (code, rows[1:4]) == (
        1,
        [
            f"{test} 0 1 0 0",
            f"{test} 1 0 1 0",
            f"failed: test/{test}::test_last_rank",
        ],
    ), errors
    assert rows[4].startswith("exit code 1; all output is in ")


@pytest.mark.soak
def test_tests_of_pytorch_on_gloo_and_on_ronde(upstream_tests, tmp_path):
    checkout, name = write(tmp_path, TORCH), "test_device_mesh.py"
    code, rows, errors = upstream_tests(checkout, "--file", name)
    test = f"test/distributed/{name}::TestGroup::test_on_gloo_alone"
    assert (code, rows[1:]) == (
        1,
        [
            f"{name} gloo 2 0 0",
            f"{name} ronde 1 1 0",
            f"passes on Gloo alone: {test}",
        ],
    ), errors


def test_what_is_no_checkout_is_refused(upstream_tests, tmp_path):
    code, rows, errors = upstream_tests(tmp_path)
    assert (code, rows) == (64, [])
    assert (
        f"must be a checkout of Horovod, ignite or PyTorch, got {tmp_path}." in errors
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--mpi",),
            "--tensorflow and --examples are for Horovod's tests",
        ),
        (("--file", "metrics/none"), "--file must be a path below"),
    ],
)
def test_options_that_are_not_for_ignite_are_refused(
    upstream_tests, tmp_path, words, message
):
    code, rows, errors = upstream_tests(write(tmp_path, IGNITE), *words)
    assert (code, rows) == (64, [])
    assert message in errors
