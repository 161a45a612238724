"""Limits of busbw: what is found here."""

from itertools import permutations
from pathlib import Path

import pytest
import torch

from ronde.bench import (
    buffer_bytes,
    cache_bytes,
    copy_gb_per_s,
    measure_memory,
    search_limit,
    with_gpus_at,
)
from ronde.collectives import Communicator
from ronde.topology import (
    Bound,
    Detected,
    GpuDevice,
    HostTopology,
    KnownRates,
    Limit,
    LimitWorld,
    Link,
    LinkKind,
    RankLayout,
)

CPU = torch.device("cpu")


def test_the_last_level_cache(tmp_path: Path) -> None:
    for cpu in range(4):
        for index, (level, size, shared) in enumerate(
            [("1", "48K", cpu), ("2", "2048K", cpu), ("3", "32M", cpu // 2)]
        ):
            folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
            folder.mkdir(parents=True)
            (folder / "level").write_text(f"{level}\n")
            (folder / "size").write_text(f"{size}\n")
            (folder / "shared_cpu_list").write_text(f"{shared}\n")
    assert cache_bytes(tmp_path) == 2 * 32 << 20
    assert cache_bytes(tmp_path / "nowhere") == 0


def test_buffers_are_beyond_the_cache_within_an_eighth_of_memory() -> None:
    gib = 1 << 30
    assert 2 * 2 * buffer_bytes(64 << 20, 100 * gib, 2) == 128 << 20
    assert 2 * 8 * buffer_bytes(480 << 20, 100 * gib, 8) == 960 << 20
    assert 2 * 2 * buffer_bytes(480 << 20, gib, 2) == gib // 8
    assert 2 * 2 * buffer_bytes(100 * gib, 100 * gib, 2) == gib
    assert buffer_bytes(0, 0, 64) == 4096


def test_a_copy_reads_and_writes() -> None:
    source, target = torch.ones(1000, dtype=torch.uint8), torch.zeros(1000).byte()
    times_ns = iter([0, 50_000_000, 100_000_000])
    rate = copy_gb_per_s(source, target, lambda: next(times_ns))
    assert rate == 2 * 2 * 1000 / 100_000_000
    assert torch.equal(source, target)


def _search(
    communicator: Communicator, hosts: list[str], given: KnownRates, test: str
) -> Bound:
    return search_limit(test, communicator, hosts, CPU, given)


def test_memory_limits_the_ranks_of_one_host(run_ranks) -> None:
    found = run_ranks(2, _search, ["a", "a"], KnownRates(), "all_reduce")
    assert found[0] == found[1]
    limit = found[0].limit
    assert limit.link.startswith("memory, ")
    assert "the cache may exceed it" in limit.note
    measured = float(limit.link.split()[1])
    assert limit.bus_bandwidth_gb_per_s == pytest.approx(measured / 4, rel=1e-3)
    assert 0.05 < measured < 2000


def test_the_network_limits_several_hosts(run_ranks) -> None:
    given = KnownRates(network_gb_per_s=0.125)
    found = run_ranks(3, _search, ["a", "b", "a"], given, "all_reduce")
    assert found == found[:1] * 3
    # 0.125 * 2/1 * 2/3
    assert found[0].limit == Limit(pytest.approx(1 / 6), "as given, 0.125 GB/s", "")


def test_a_link_that_does_not_report_is_no_limit(run_ranks) -> None:
    found = run_ranks(2, _search, ["a", "b"], KnownRates(interface="lo"), "all_reduce")
    assert found[0].limit is None
    assert found[0].reason == (
        "the link rate is not known: lo is virtual, or its speed is unknown; "
        "--link-rate gives it"
    )


def test_gpus_that_have_a_rank_count_and_no_others() -> None:
    names = [f"0000:{n}0:00.0" for n in range(1, 5)]
    host = HostTopology(
        sources=("sysfs of this machine", "NVML"),
        gpus=tuple(GpuDevice(name, n, sm=80) for n, name in enumerate(names)),
        # Each is joined to each by 4 links, as in machines of four A100.
        links=tuple(
            Link(LinkKind.NVLINK, one, other, 4)
            for one, other in permutations(names, 2)
        ),
    )
    world = LimitWorld(RankLayout(2, 1, 2), has_gpus=True)
    found = with_gpus_at({names[1], names[3]}, world, Detected(host, ()))
    assert found.gpu == ("4 NVLinks, 100 GB/s a GPU", 100, 80, "")
    found = with_gpus_at({*names}, world, Detected(host, ()))
    assert found.gpu == ("12 NVLinks, 300 GB/s a GPU", 300, 240, "")
    assert with_gpus_at({names[0]}, world, Detected(host, ())) == world
    lost = with_gpus_at({names[0], "0000:ff:00.0"}, world, Detected(host, ()))
    assert lost.unknown == ("the kernel does not show the GPUs of all ranks",)


def test_without_nvml_nobody_knows_of_nvlinks() -> None:
    gpus = tuple(GpuDevice(f"0000:{n}0:00.0", n, sm=90) for n in (1, 2))
    host = HostTopology(sources=("sysfs of this machine",), gpus=gpus)
    world = LimitWorld(RankLayout(2, 1, 2), has_gpus=True)
    silent = Detected(host, ("NVML does not answer: it is old. More.",))
    found = with_gpus_at({gpu.bus_id for gpu in gpus}, world, silent)
    assert found.gpu is None
    assert found.unknown == ("NVML does not answer: it is old. More",)


def test_memory_is_measured_by_host(run_ranks) -> None:
    def measure(communicator: Communicator) -> dict[str, float]:
        host = "ab"[communicator.rank % 2]
        return measure_memory(communicator, host)[0]

    found = run_ranks(3, measure)
    assert found == found[:1] * 3
    assert set(found[0]) == {"a", "b"}
