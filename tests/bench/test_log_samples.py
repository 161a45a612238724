"""Real logs of other people's clusters."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from ronde.bench import Run, Side, read_log

LOGS = Path(__file__).parent / "logs"


def read(name: str) -> Run:
    (run,) = read_log((LOGS / name).read_text(), name).runs
    return run


@dataclass(frozen=True)
class Expected:
    """Counted and read off by hand."""

    name: str
    test: str
    num_rows: int
    ranks: tuple[int, str]
    last: tuple[int, float]  # size and in-place busbw
    average: float
    is_complete: bool = True


SAMPLES = [
    Expected(
        "aws_adt_README_3.log",
        *("all_reduce", 7, (16, "ratio"), (2147483648, 437.89), 52.9753),
        is_complete=False,
    ),
    Expected(
        "aws_adt_aws-batch_README_1.log",
        *("all_reduce", 32, (8, "ratio"), (17179869184, 483.35), 156.742),
    ),
    Expected(
        "aws_adt_slurm_topology-aware-nccl-tests_README_1.log",
        *("all_reduce", 3, (128, "ratio"), (17179869184, 369.42), 84.0569),
        is_complete=False,
    ),
    Expected(
        "oci_troubleshooting_1.log",
        *("all_reduce", 5, (16, "devices"), (17179869184, 470.75), 464.075),
    ),
    Expected(
        "superbench_nccl_alltoall.log",
        *("alltoall", 34, (8, "devices"), (8589934592, 226.16), 58.6481),
    ),
    Expected(
        "superbench_nccl_reduce.log",
        *("reduce", 34, (8, "devices"), (8589934592, 228.83), 65.018),
    ),
    Expected(
        "superbench_nccl_reducescatter.log",
        *("reduce_scatter", 34, (8, "devices"), (8589934592, 231.25), 60.168),
    ),
]


@pytest.mark.parametrize("expected", SAMPLES, ids=lambda each: each.name)
def test_every_sample_is_read(expected: Expected) -> None:
    run = read(expected.name)
    assert run.test == expected.test
    assert len(run.rows) == expected.num_rows
    assert (run.ranks.value, run.ranks.source) == expected.ranks
    row = run.rows[-1]
    assert row.in_place is not None
    assert (row.size_bytes, row.in_place.busbw_gb_per_s) == expected.last
    assert run.average_busbw_gb_per_s == expected.average
    is_checked = "superbench" not in expected.name
    assert run.num_out_of_bounds == (0 if is_checked else None)
    assert run.is_complete is expected.is_complete


def test_devices_and_hosts_are_kept() -> None:
    facts = read("oci_troubleshooting_1.log").facts
    assert facts["hosts"] == ["h100-ord01-03-14", "h100-ord01-03-294"]
    assert facts["devices"] == ["NVIDIA H100 80GB HBM3"]


def test_old_tables_lack_columns() -> None:
    alltoall = read("superbench_nccl_alltoall.log")
    assert all(row.redop == "" and row.root is None for row in alltoall.rows)
    # Five sizes were rounded down to 0.
    assert [row.size_bytes for row in alltoall.rows[:6]] == [0, 0, 0, 0, 0, 32]
    scattered = read("superbench_nccl_reducescatter.log")
    assert all(row.redop == "sum" and row.root is None for row in scattered.rows)
    assert scattered.rows[-1].out_of_place == Side(32464, 264.60, 231.52, None)
    assert scattered.num_wrong() is None
