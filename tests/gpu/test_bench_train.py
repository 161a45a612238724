"""Training steps are timed on a CUDA device, and their split is of that device."""

from dataclasses import replace
from itertools import chain

import pytest
import torch
from tests.gpu.devices import LIMIT_S, NEEDS_CUDA, NUM_DEVICES

import ronde.torch as hvd
from ronde.bench import (
    MODELS,
    Phase,
    TrainOptions,
    Variant,
    measure,
)
from ronde.errors import UsageError

pytestmark = NEEDS_CUDA
SHORT = TrainOptions(MODELS["resnet20"], batch=16, rounds=2, steps=3, device="cuda")
KINDS = [
    SHORT,
    replace(SHORT, dtype="bfloat16", is_channels_last=True),
    replace(SHORT, model=MODELS["transformer"], optimizer="adam"),
    replace(SHORT, model=MODELS["mnist_cnn"], input="gathered"),
]


def measure_all(claim, kinds):
    hvd.init()
    outcomes = [measure(options, lambda *_: None) for options in kinds]
    hvd.shutdown()
    return outcomes


@pytest.mark.parametrize("size", range(1, min(2, max(1, NUM_DEVICES)) + 1))
def test_every_model_steps_on_the_device(run_ranks_bare, size):
    results = run_ranks_bare(size, measure_all, KINDS, timeout_s=LIMIT_S)
    assert all(result == results[0] for result in results)
    num_variants = 1 if size == 1 else len(Variant)
    for outcome in results[0]:
        assert outcome.setting.device == "cuda"
        assert outcome.setting.device_name == torch.cuda.get_device_name(0)
        assert outcome.is_in_step
        blocks = [block for a_round in outcome.rounds for block in a_round.values()]
        assert len(blocks) == 2 * num_variants
        for block in blocks:
            assert block.step_s > 0
            # Batches are on the host: to carry them over takes time.
            assert all(block.phases_s[phase] > 0 for phase in Phase)
            assert all(step > 0 for step in chain(*block.steps_s))
        ready_ms = [each.ready_ms for each in outcome.gradients]
        assert 0 < ready_ms[0] < ready_ms[-1]
        sent = sum(each.numel for each in outcome.gradients)
        assert sent == outcome.options.model.num_parameters


def refuse(claim, batch):
    hvd.init()
    with pytest.raises(UsageError) as raised:
        measure(replace(SHORT, batch=batch), lambda *_: None)
    allocated = torch.cuda.memory_allocated()
    hvd.shutdown()
    return str(raised.value), allocated


def test_what_does_not_fit_the_device_is_refused_before_it_is_allocated(run_ranks_bare):
    ((said, allocated),) = run_ranks_bare(1, refuse, 10**7, timeout_s=LIMIT_S)
    assert "does not fit into a rank's memory" in said
    assert allocated == 0


def test_more_ranks_than_devices_are_refused_by_all(run_ranks_bare):
    results = run_ranks_bare(NUM_DEVICES + 1, refuse, 16, timeout_s=LIMIT_S)
    assert all(f"with {NUM_DEVICES} devices" in said for said, _ in results)
