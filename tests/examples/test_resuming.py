"""A training that is cut off goes on from its checkpoint as if nothing had happened."""

import hashlib
import resource

import checkpoint
import cloudpickle
import pytest
import torch
import training
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import ronde.torch as hvd
from ronde.errors import UsageError

# The ranks cannot import the examples; the functions travel with what they use.
for module in (checkpoint, training):
    cloudpickle.register_pickle_by_value(module)

STEPS_AN_EPOCH = 11
EPOCHS = 3
BATCH_SIZE = 4


class CutOffError(Exception):
    """The training ends here, whatever it is doing."""


def options(path, every=None, **changed):
    values = {"epochs": EPOCHS, "batch_size": BATCH_SIZE, "lr": 0.05, "seed": 1}
    return training.Options(
        **values | changed,
        is_communicating=True,
        json=None,
        checkpoint=path,
        checkpoint_every=every,
    )


def images():
    """Return as many random images as make so many steps of all ranks, and one more."""
    random = torch.Generator().manual_seed(0)
    num = STEPS_AN_EPOCH * BATCH_SIZE * hvd.size() + 1
    pixels = torch.rand(num, 1, 8, 8, generator=random)
    labels = torch.randint(10, (num,), generator=random)
    return training.Images(pixels, labels, pixels[:9], labels[:9])


def make_model():
    torch.manual_seed(hvd.rank())
    layers = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 10)
    return nn.Sequential(*layers)


def train(_info, path, every, cut_off_after=None):
    """Train; return the steps taken, the loss and a digest of all parameters."""
    steps = []

    def count(*_):
        steps.append(None)
        if len(steps) == cut_off_after:
            raise CutOffError

    hook = register_optimizer_step_post_hook(count)
    hvd.init()
    try:
        model = make_model()
        outcome = training.train(model, images(), options(path, every))
    except CutOffError:
        return len(steps), None, None
    finally:
        hook.remove()
        hvd.shutdown()
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return len(steps), outcome.loss, hashlib.sha256(weights).hexdigest()


@pytest.fixture(scope="module", params=[3])
def uninterrupted(request, run_ranks_bare):
    """Return what a training of some size comes to, rank by rank."""
    return run_ranks_bare(request.param, train, None, None)


@pytest.mark.parametrize(
    ("every", "cut_off_after", "kept"),
    [(None, 30, 22), (4, 31, 28), (11, 12, 11), (5, 4, 0)],
)
def test_what_is_resumed_ends_as_what_was_not_cut_off(
    run_ranks_bare, uninterrupted, tmp_path, every, cut_off_after, kept
):
    size, all_steps = len(uninterrupted), EPOCHS * STEPS_AN_EPOCH
    path = tmp_path / "folder" / "checkpoint"
    run_ranks_bare(size, train, path, every, cut_off_after)
    resumed = run_ranks_bare(size, train, path, every)
    assert [steps for steps, *_ in uninterrupted] == [all_steps] * size
    assert [steps for steps, *_ in resumed] == [all_steps - kept] * size
    assert [end for _, *end in resumed] == [end for _, *end in uninterrupted]
    assert [found.name for found in path.parent.iterdir()] == ["checkpoint"]


def train_on_a_full_disk(info, path):
    register_optimizer_step_post_hook(lambda *_: fill_disk() if path.exists() else None)
    with pytest.raises((OSError, RuntimeError)):
        train(info, path, 4)


def fill_disk():
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))


def test_a_checkpoint_that_is_not_written_whole_leaves_the_last_one(
    run_ranks_bare, tmp_path
):
    path = tmp_path / "checkpoint"
    run_ranks_bare(1, train_on_a_full_disk, path)
    [(steps, *_)] = run_ranks_bare(1, train, path, 4)
    assert steps == EPOCHS * STEPS_AN_EPOCH - 4
    assert [found.name for found in tmp_path.iterdir()] == ["checkpoint"]


def resume(_info, path, wanted):
    hvd.init()
    try:
        training.train(make_model(), images(), wanted)
    except UsageError as error:
        return str(error)
    finally:
        hvd.shutdown()
    return ""


@pytest.mark.parametrize(
    ("size", "changed", "message"),
    [
        (2, {}, "ranks must be that of the checkpoint {}, 1, got 2."),
        (1, {"seed": 2}, "seed must be that of the checkpoint {}, 1, got 2."),
        (1, {"epochs": 4}, "epochs must be that of the checkpoint {}, 3, got 4."),
    ],
)
def test_a_checkpoint_of_another_training_is_refused_on_all_ranks(
    run_ranks_bare, tmp_path, size, changed, message
):
    path = tmp_path / "checkpoint"
    run_ranks_bare(1, train, path, 4, 5)
    before = path.read_bytes()
    said = run_ranks_bare(size, resume, path, options(path, 4, **changed))
    assert all(text.startswith(message.format(path)) for text in said), said
    assert path.read_bytes() == before
