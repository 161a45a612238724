"""SyncBatchNorm over ranks is BatchNorm over the whole batch."""

import torch
from tests.parity.sessions import message_of, run_cases, run_sessions
from torch import Tensor, nn

import ronde.torch as hvd

# Rounding of sums of at most a few hundred elements, and of the division by n.
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12}


def _parity() -> None:
    for dtype in (torch.float32, torch.float64):
        for momentum in (0.1, None):
            for shape in ((3,), (3, 5), (3, 4, 5), (3, 2, 2, 2)):
                for is_affine in (True, False):
                    _compare(dtype, momentum, shape, is_affine=is_affine)


def _compare(
    dtype: torch.dtype,
    momentum: float | None,
    shape: tuple[int, ...],
    *,
    is_affine: bool,
) -> None:
    torch.manual_seed(1)
    # Batches of 2, 3, 4 rows; a mean a hundred times the deviation.
    lengths = [2 + r for r in range(hvd.size())]
    rows = slice(sum(lengths[: hvd.rank()]), sum(lengths[: hvd.rank() + 1]))
    ours = hvd.SyncBatchNorm(3, momentum=momentum, affine=is_affine).to(dtype)
    whole = _PLAIN[len(shape)](3, momentum=momentum, affine=is_affine).to(dtype)
    for step in range(3):
        batch = torch.rand(sum(lengths), *shape, dtype=dtype) + 30 * (step == 1)
        seed = torch.rand_like(batch)
        own, every = batch[rows].requires_grad_(), batch.clone().requires_grad_()
        result, expected = ours(own), whole(every)
        result.backward(seed[rows])
        expected.backward(seed)
        tolerance = TOLERANCE[dtype] * (30 if step == 1 else 1)

        def close(actual: Tensor, wanted: Tensor, tolerance: float = tolerance) -> None:
            torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=tolerance)

        close(result, expected[rows])
        assert own.grad is not None
        assert every.grad is not None
        close(own.grad, every.grad[rows])
        for mine, theirs in zip(ours.parameters(), whole.parameters(), strict=True):
            assert mine.grad is not None
            close(hvd.allreduce(mine.grad, op=hvd.Sum), theirs.grad)
            mine.grad = theirs.grad = None
        for name, value in whole.named_buffers():
            close(ours.get_buffer(name).double(), value.double())
    ours.eval()
    whole.eval()
    torch.testing.assert_close(ours(batch), whole(batch), rtol=1e-4, atol=1e-4)


_PLAIN = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d, 4: nn.BatchNorm3d}


def test_a_rank_without_rows():
    run_sessions(2, _without_rows)


def _without_rows() -> None:
    layer, plain = hvd.SyncBatchNorm(3), nn.BatchNorm1d(3)
    torch.manual_seed(2)
    batch = torch.rand(4, 3)
    own = (batch if hvd.rank() else batch[:0]).requires_grad_()
    result = layer(own)
    result.sum().backward()
    expected = plain(batch)
    if hvd.rank():
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    else:
        assert result.shape == (0, 3)
    torch.testing.assert_close(layer.running_var, plain.running_var)


def _halves_and_sets() -> None:
    pair = hvd.add_process_set([0, 2])
    torch.manual_seed(3)
    batch = torch.rand(4, 3, 6).to(torch.bfloat16)
    if pair.included():
        layer = hvd.SyncBatchNorm(3, process_set=pair)
        rows = slice(0, 1) if hvd.rank() == 0 else slice(1, 4)
        own = batch[rows].requires_grad_()
        result = layer(own)
        result.float().pow(2).sum().backward()
        assert result.dtype == own.grad.dtype == torch.bfloat16
        expected = nn.BatchNorm1d(3)(batch.float())[rows]
        # Half a unit in the last place of 8 bits, of values below 4.
        torch.testing.assert_close(result.float(), expected, rtol=0, atol=4 * 2**-8)
    frozen = hvd.SyncBatchNorm(3, track_running_stats=False).eval()
    expected = nn.BatchNorm1d(3)(batch.float())
    torch.testing.assert_close(frozen(batch.float()), expected, rtol=1e-5, atol=1e-5)
    message = message_of(ValueError, frozen, torch.ones(3))
    assert message == "expected at least 2D input (got 1D input)"
    assert "3 channels" in message_of(ValueError, frozen, torch.ones(2, 4))


def test_parity():
    run_cases(3, {"parity": _parity, "halves": _halves_and_sets})
