"""Models that torch's own wrappers average or shard are refused."""

import pytest
import torch
from tests.parity.sessions import run_sessions
from tests.ranks import hosted_store
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ronde.torch as hvd
from ronde.errors import UsageError


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def distribute(model, **options):
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(sgd, model.named_parameters(), **options)


def backward(model):
    model(torch.full((2, 4), 1.0 + hvd.rank())).sum().backward()


def shard(model):
    return fully_shard(model, mesh=init_device_mesh("cpu", (hvd.size(),)))


def shard_flat(model):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def shard_original(model):
    return FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=True
    )


def shard_tensors(model):
    mesh = init_device_mesh("cpu", (hvd.size(),))
    return parallelize_module(model, mesh, {"0": ColwiseParallel()})


def on_ranks(size, fn, *args):
    """Call ``fn`` on ranks that have torch's own process group as well."""
    store = hosted_store()
    return run_sessions(size, call, store.port, fn, *args)


def call(port, fn, *args):
    store = distributed.TCPStore("127.0.0.1", port, wait_for_workers=False)
    place = {"rank": hvd.rank(), "world_size": hvd.size()}
    distributed.init_process_group("gloo", store=store, **place)
    result = fn(*args)
    # Whatever was refused has hurt nobody.
    assert float(hvd.allreduce(torch.ones(1), op=hvd.Sum)) == hvd.size()
    distributed.barrier()
    distributed.destroy_process_group()
    return result


def test_two_that_average_gradients_are_refused():
    def work():
        model = DistributedDataParallel(build(), gradient_as_bucket_view=True)
        with pytest.raises(UsageError, match=r"DistributedDataParallel.*bare model"):
            distribute(model)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            backward(model)
            plain.step()

    on_ranks(3, work)


def test_two_that_average_are_refused_at_the_first_step_at_the_latest():
    def work():
        model = build()
        optimizer = distribute(model)
        model = DistributedDataParallel(model)
        backward(model)
        with pytest.raises(UsageError, match=r"DistributedDataParallel.*bare model"):
            optimizer.step()

    on_ranks(2, work)


def test_another_model_may_be_wrapped():
    def work():
        models = [DistributedDataParallel(build()), build()]
        optimizers = [
            torch.optim.SGD(models[0].parameters(), lr=0.1, momentum=0.9),
            distribute(models[1]),
        ]
        for _ in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                backward(model)
                optimizer.step()
        for one, other in zip(*[m.parameters() for m in models], strict=True):
            torch.testing.assert_close(one, other)

    on_ranks(2, work)


def test_one_rank_has_nothing_to_average_twice():
    def work():
        model = DistributedDataParallel(build())
        optimizer = distribute(model)
        before = model.module[0].weight.detach().clone()
        for _ in range(3):
            backward(model)
            optimizer.step()
        assert not torch.equal(before, model.module[0].weight)

    on_ranks(1, work)


def test_sharded_parameters_are_refused():
    def work():
        for wrap in (shard, shard_flat, shard_original, shard_tensors):
            model = wrap(build())
            refused = r"not support sharded parameters.*(\.weight|_flat_param)"
            with pytest.raises(UsageError, match=refused):
                distribute(model)

    on_ranks(3, work)


def test_sharded_tensors_are_refused():
    def work():
        model = shard(build())
        optimizer = torch.optim.Adam(model.parameters())
        backward(model)
        optimizer.step()
        with pytest.raises(UsageError, match="not support sharded parameters"):
            distribute(model, op=hvd.Adasum)
        tensor = next(model.parameters())
        for fn, args in (
            (hvd.broadcast_parameters, (model.state_dict(), 0)),
            (hvd.broadcast_optimizer_state, (optimizer, 0)),
            (hvd.allreduce, (tensor,)),
            (hvd.allreduce_, (tensor.detach(),)),
            (hvd.grouped_allreduce, ([torch.ones(2), tensor],)),
            (hvd.allgather, (tensor,)),
            (hvd.broadcast, (tensor, 0)),
            (hvd.alltoall, (tensor,)),
            (hvd.reducescatter, (tensor,)),
        ):
            with pytest.raises(UsageError, match="not support sharded tensors, got"):
                fn(*args)
        (one_row,) = model[1].weight.to_local().detach().split(1)
        hvd.broadcast_parameters({"mine": one_row}, 0)

    on_ranks(2, work)
