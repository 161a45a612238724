import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ALIAS = str(Path(__file__).parents[2] / "src" / "ronde" / "horovod" / "alias")


@pytest.fixture
def python(ronde, tmp_path):
    """Return a function that runs Python on one rank, in a directory of its own."""

    def run(program, *words, env=None):
        done = ronde(
            *("run", "-n", "1", "--no-prefix", *words, sys.executable, "-c", program),
            env=env,
            cwd=tmp_path,
        )
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    return run


SAME = """
import sys
import horovod
assert "torch" not in sys.modules
import horovod.torch as hvd
import ronde.horovod, ronde.torch
assert horovod is ronde.horovod
assert hvd is ronde.torch
assert sys.modules["horovod.torch"] is sys.modules["ronde.torch"]
assert hvd.__spec__.name == hvd.__name__ == "ronde.torch"
from horovod.torch import elastic
assert hvd.elastic is elastic

import horovod.torch.elastic.sampler as sampler
assert sampler.ElasticSampler is hvd.elastic.ElasticSampler
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
assert HorovodInternalError is hvd.HorovodInternalError
import torch
try:
    hvd.allreduce(torch.zeros(1))
except HorovodInternalError as error:
    assert str(error) == "Horovod has not been initialized; use hvd.init()."

import importlib, pickle
assert pickle.loads(pickle.dumps(hvd.elastic.ElasticSampler)) is sampler.ElasticSampler
assert importlib.reload(sampler) is sys.modules["horovod.torch.elastic.sampler"]
assert importlib.import_module("horovod.torch") is hvd
print("same")
"""


def test_modules_and_classes_are_the_same_ones(python) -> None:
    assert python(SAME) == (0, "same\n", "")


ALL = """
import sys
import horovod
from horovod import run
from horovod.common import elastic, exceptions, process_sets
from horovod.common.util import (
    _cache, ccl_built, env, extension_available, gloo_built, mpi_built, nccl_built,
)
from horovod.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader
from horovod.runner import run as also_run
from horovod.runner.common.util.env import get_env_rank_and_size
from horovod.runner.elastic.worker import HostUpdateResult, WorkerNotificationManager
from horovod.runner.util.threads import in_thread
from horovod.torch.compression import Compression
from horovod.torch.elastic.state import TorchState, get_handler_registry
from horovod.torch.functions import broadcast_object
from horovod.torch.mpi_ops import rank, size, synchronize
from horovod.torch.optimizer import DistributedOptimizer
from horovod.torch.sync_batch_norm import SyncBatchNorm
assert run is also_run
import horovod.run.runner
from horovod.run import run as old_run
from horovod.run.common.util.env import get_env_rank_and_size as old_place
from horovod.runner.runner import run as inner_run
assert horovod.run is horovod.run.runner.run is run is old_run is inner_run
assert old_place is get_env_rank_and_size
assert get_env_rank_and_size() == (0, 1)
assert extension_available("torch") and not extension_available("mxnet")
from importlib.util import find_spec
assert extension_available("tensorflow") == bool(find_spec("tensorflow"))
from horovod.common.basics import HorovodBasics
assert not HorovodBasics("a file").is_initialized()
assert not {"tensorflow", "keras", "ronde.tensorflow"} & sys.modules.keys()
from horovod.torch.elastic import State
assert elastic.State is State
assert exceptions.HorovodInternalError and process_sets.ProcessSet
print(horovod.__version__)
"""


PRINTED = {
    "import horovod.foo": "horovod.foo No module named 'horovod.foo'",
    "import horovod.torch.foo": "No module named 'horovod.torch.foo'",
    "import horovod.spark": "ronde does not support horovod.spark, only",
    "import horovod._keras": "ronde does not support horovod._keras, only",
    "from horovod import torch as hvd": "ronde.torch",
    "from horovod.torch import mpi_ops as hvd": "ronde.torch.mpi_ops",
    "from horovod.common import exceptions as hvd": "ronde.horovod.compatibility",
    "from horovod import nothing": "cannot import name 'nothing'",
}
for statement, framework in {
    "import horovod.tensorflow": "tensorflow",
    "import horovod.tensorflow.keras": "tensorflow",
    "import horovod.tensorflow.keras.callbacks": "tensorflow",
    "from horovod import tensorflow": "tensorflow",
    "import horovod.keras": "keras",
    "from horovod.keras import callbacks": "keras",
}.items():
    if find_spec(framework) is None:
        PRINTED[statement] = (
            f"{framework} must be installed for this front end, got none"
        )
PRINT = """
import json
for statement in json.loads({statements!r}):
    try:
        exec(statement)
        print(hvd.__name__)
    except ImportError as error:
        print(error.name, error)
"""


PATCH = """
from unittest import mock
import ronde.torch.elastic.sampler as sampler
with mock.patch("horovod.torch.elastic.sampler.size", return_value=7):
    print(sampler.size())
"""


def test_what_scripts_import_is_there_and_else_is_an_import_error(python) -> None:
    """And what patches Horovod's names patches ours: one process imports torch once."""
    program = PRINT.format(statements=json.dumps(list(PRINTED)))
    status, out, err = python(program + ALL + PATCH)
    assert (status, err) == (0, "")
    *lines, version, patched = out.splitlines()
    assert (version, patched) == ("0.28.1", "7")
    for line, (statement, text) in zip(lines, PRINTED.items(), strict=True):
        assert text in line, statement
        if statement.endswith(" as hvd"):
            assert line == text, statement


def test_an_error_inside_a_module_is_its_own(python) -> None:
    code = "import sys; sys.modules['cloudpickle'] = None; import horovod.runner.runner"
    status, _, err = python(code)
    assert status == 1
    assert "import of cloudpickle halted" in err


# Without the start-up module of every rank.
SHOW_PATH = (
    "import os; paths = os.environ['PYTHONPATH'].split(':'); "
    "print(*paths[paths[0].endswith('/ronde/launch/startup'):], sep=':')"
)


def test_its_directory_comes_first_on_the_path_and_once(python) -> None:
    show = SHOW_PATH
    assert python(show)[1] == f"{ALIAS}\n"
    given = os.pathsep.join(["/a", ALIAS, "/b"])
    expected = os.pathsep.join([ALIAS, "/a", "/b"])
    assert python(show, env={"PYTHONPATH": given})[1] == f"{expected}\n"
    assert python(show, "-x", "PYTHONPATH=/c")[1] == f"{ALIAS}{os.pathsep}/c\n"


def test_it_can_be_turned_off(python) -> None:
    show = SHOW_PATH
    off = "--no-horovod-alias"
    assert python(show, off)[1] == "\n"
    given = os.pathsep.join([ALIAS, "/b"])
    assert python(show, off, env={"PYTHONPATH": given})[1] == "/b\n"
    status, _, err = python("import horovod", off)
    assert status == 1
    assert "No module named 'horovod'" in err


def test_a_python_without_ronde_is_told_so(python) -> None:
    code = "import sys; sys.modules['ronde'] = None; import horovod"
    status, _, err = python(code)
    assert status == 1
    assert "ronde is not installed for" in err
