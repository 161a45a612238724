"""Nothing is unpickled between the start and the program's own first object.

Whoever sends a pickle runs code where it is read; so ranks read none that the program
did not ask for.
"""

import pickle
import sys

import cloudpickle
import pytest
import torch

import ronde.torch as hvd
from ronde.errors import CollectiveError

forbidden = []


def forbid():
    """Make every way to read a pickle fail in this process, for good."""

    def refuse(*_args, **_kwargs):
        raise AssertionError("nothing must be unpickled here")

    def look(event, _args):
        if event == "pickle.find_class" and forbidden:
            raise AssertionError("nothing must be unpickled here")

    forbidden.append(True)
    sys.addaudithook(look)
    pickle.loads = pickle.load = refuse
    cloudpickle.loads = cloudpickle.load = refuse


def use_everything(_info, engine, folder):
    # What the first optimizer imports is torch's own.
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    before = pickle.loads, pickle.load, cloudpickle.loads, cloudpickle.load
    forbid()
    try:
        hvd.init(process_sets=[hvd.ProcessSet([0, 1])], engine=engine)
        hvd.start_timeline(str(folder / "timeline.json"))
        for name in "ab":
            hvd.allreduce(torch.ones(5), name=name)
        hvd.allgather(torch.ones(hvd.rank() + 1))
        hvd.broadcast(torch.ones(3), 1)
        hvd.alltoall(torch.ones(hvd.size()))
        hvd.reducescatter(torch.ones(hvd.size()))
        hvd.barrier()
        torch.manual_seed(hvd.rank())
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        named = list(model.named_parameters())
        wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=named)
        for _ in range(12):
            wrapped.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            wrapped.step()
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        small = hvd.add_process_set([0, 2])
        if hvd.rank() in (0, 2):
            hvd.allreduce(torch.ones(3), process_set=small)
        hvd.join()
        hvd.stop_timeline()
        with pytest.raises((AssertionError, CollectiveError)):
            hvd.allgather_object("a user's own")  # the guard does guard
        hvd.shutdown()
        return [parameter.tolist() for parameter in model.parameters()]
    finally:
        forbidden.clear()
        pickle.loads, pickle.load, cloudpickle.loads, cloudpickle.load = before


@pytest.mark.parametrize("engine", ["gloo", "hierarchical"])
def test_ranks_train_without_reading_a_pickle(run_ranks_bare, tmp_path, engine):
    knobs = {
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
        "HOROVOD_TIMELINE": "DYNAMIC",
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1",
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "2",
    }
    results = run_ranks_bare(3, use_everything, engine, tmp_path, environment=knobs)
    assert results[0] == results[1] == results[2]
    assert (tmp_path / "timeline.json").exists()
