"""Connections, groups and devices of a benchmark's ranks."""

import os
import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ronde.bench.limits import pci_address
from ronde.bench.options import Options, UnsupportedError
from ronde.bench.results import Device
from ronde.bench.variables import Variables
from ronde.collectives import Communicator, all_gather_json, connect, exchange_hosts
from ronde.collectives.connections import DEFAULT_TIMEOUT_S
from ronde.errors import UsageError
from ronde.plain_values import from_plain, to_plain
from ronde.records import MachineRecord
from ronde.world import RankInfo

_AFTER_WATCHDOG_S = 5.0
_CUDA_ENGINES = frozenset({"auto", "nccl"})


class Ranks(NamedTuple):
    """The connections and devices of a benchmark's ranks, as seen by this rank."""

    control: Communicator
    engines: Mapping[str, Communicator]
    device: torch.device  # for this rank's tensors
    devices: tuple[Device, ...]  # one for each rank of the world
    hosts: tuple[str, ...]  # the host of each rank in this rank's group
    num_sharing: int  # ranks on this host

    @property
    def group(self) -> Communicator:
        return next(iter(self.engines.values()))

    @property
    def is_rank_0(self) -> bool:
        return self.control.rank == 0

    def exchange(self, values: Sequence[float]) -> list[list[float]]:
        own = torch.tensor([list(values)], dtype=torch.float64)
        gathered: list[list[float]] = self.control.all_gather(own).wait().tolist()  # pyright: ignore[reportUnknownVariableType]
        return gathered

    def close(self) -> None:
        for communicator in (*self.engines.values(), self.control):
            communicator.close()


def connect_ranks(info: RankInfo, options: Options, variables: Variables) -> Ranks:
    """Connect the ranks with every engine of the command line; collective.

    Raises:
        UsageError: An engine or a device is missing.
        CollectiveError: A rank is missing.
    """
    device, names = _device(info, options, variables), options.engines.names
    if variables.split is not None and "mpi" in names:
        raise UnsupportedError(
            "NCCL_TESTS_SPLIT cannot be used with the mpi engine, which always "
            "connects all ranks. Start each group by itself, or choose another engine."
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    first = _connect(info, names[0], options)
    control = first.duplicate()
    hosts = exchange_hosts(control, socket.gethostname())
    colours, group, engines = [0] * info.size, info, {names[0]: first}
    if variables.split is not None:
        # Groups are numbered from 0 in order of colour.
        colours = [variables.split.colour_of(rank) for rank in range(info.size)]
        order = sorted(set(colours))
        colours = [order.index(colour) for colour in colours]
        group = _group_info(info, colours, hosts)
        first.close()
        engines = {}
    for name in names:
        if name not in engines:
            engines[name] = _connect(group, name, options)
    mine = colours[info.rank]
    own = _describe(control.rank, mine, device)
    everyone = all_gather_json(control, to_plain(own))
    return Ranks(
        control=control,
        engines=engines,
        device=device,
        devices=tuple(from_plain(Device, each) for each in everyone),
        hosts=tuple(h for h, c in zip(hosts, colours, strict=True) if c == mine),
        num_sharing=hosts.count(hosts[info.rank]),
    )


def _connect(info: RankInfo, name: str, options: Options) -> Communicator:
    engine, _, algorithm = name.partition("/")
    limit_s = options.loop.timeout_s
    return connect(
        info,
        engine=engine,
        algorithm=algorithm or options.engines.algorithm,
        # Longer than the watchdog's timeout, as the watchdog's message is better.
        timeout_s=limit_s + _AFTER_WATCHDOG_S if limit_s else DEFAULT_TIMEOUT_S,
    )


def _group_info(
    info: RankInfo, colours: Sequence[int], hosts: Sequence[str]
) -> RankInfo:
    """Return the ``RankInfo`` of this rank within its group."""
    mine = colours[info.rank]
    members = [rank for rank, colour in enumerate(colours) if colour == mine]
    local = [rank for rank in members if hosts[rank] == hosts[info.rank]]
    meeting = info.meeting
    return info._replace(
        rank=members.index(info.rank),
        size=len(members),
        local_rank=local.index(info.rank),
        local_size=len(local),
        cross_rank=None,
        cross_size=None,
        # World rank 0 has already opened the store, so here every rank is a client.
        meeting=None if meeting is None else meeting._replace(is_hosted=True),
        job_id=f"{info.job_id}/group{mine}",
    )


def _device(info: RankInfo, options: Options, variables: Variables) -> torch.device:
    asked = options.engines.device
    is_cuda_engine = _CUDA_ENGINES.issuperset(options.engines.names)
    if asked == "auto":
        is_needed = options.engines.names == ("nccl",)
        is_there = torch.cuda.is_available()
        asked = "cuda" if is_needed or (is_cuda_engine and is_there) else "cpu"
    if asked == "cpu":
        return torch.device("cpu")
    if not is_cuda_engine:
        raise UsageError(
            "--device cuda needs the auto or nccl engine, got "
            f"{', '.join(options.engines.names)}. Give --device cpu."
        )
    index = variables.first_device or 0
    index += 0 if options.is_gpu_shared else info.local_rank
    return cuda_device(index, info.local_rank, "start fewer ranks, or give --share-gpu")


def cuda_device(index: int, local_rank: int, cure: str) -> torch.device:
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not num_devices:
        raise UsageError(
            "--device cuda and --engine nccl need a GPU, but torch finds none. "
            "Give --device cpu, or install a torch that was built for CUDA."
        )
    if index >= num_devices:
        raise UsageError(
            f"local rank {local_rank} needs CUDA device {index}, but the number of "
            f"devices on its host is {num_devices}. Give --device cpu, or {cure}."
        )
    return torch.device("cuda", index)


def _describe(rank: int, group: int, device: torch.device) -> Device:
    name = MachineRecord.here().cpu or "CPU"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    index, host = device.index or 0, socket.gethostname()
    address = pci_address(device)
    return Device(rank, group, os.getpid(), host, index, address, name)
