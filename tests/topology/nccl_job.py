"""Writes the debug log of a job, in NCCL's forms, and breaks its lines."""

import random
from dataclasses import dataclass, replace

BUS_IDS = ("1b000", "43000", "52000", "61000", "9d000", "c3000", "d1000", "df000")


@dataclass(frozen=True)
class JobLog:
    """The log of a healthy job with NCCL 2.27; each field can be made faulty."""

    num_hosts: int = 2  # Each has eight ranks.
    host: str = "node{}"
    version: str = "2.27.3+cuda12.9"
    bootstrap: str = "eno1"
    candidates: str = (
        "Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eno1:10.0.0.{host}<0>"
    )
    network: str = "IB"
    gdr: str = "Enabled"
    intra: str = "P2P/CUMEM"
    inter: str = "NET/IB/{nic}/GDRDMA"
    channels: str = (
        "16 coll channels, 16 collnet channels, 0 nvls channels, 16 p2p channels, "
        "2 p2p channels per peer"
    )
    num_nodes: int = 0  # As NCCL counts them; 0 for the number of hosts.
    extra: tuple[str, ...] = ()  # Further messages of every rank.

    def lines(self) -> list[str]:
        return [
            line for rank in range(self.num_hosts * 8) for line in self.lines_of(rank)
        ]

    def lines_of(self, rank: int) -> list[str]:
        host, local = divmod(rank, 8)
        prefix = f"{self.host.format(host)}:{1000 + rank}:{2000 + rank} [{local}] "
        return [f"{prefix}NCCL INFO {text}" for text in self.texts(rank, host, local)]

    def texts(self, rank: int, host: int, local: int) -> list[str]:
        num_ranks = self.num_hosts * 8
        start = (
            f"ncclCommInitRankConfig comm 0x55{rank:04x} rank {rank} nranks "
            f"{num_ranks} cudaDev {local} nvmlDev {local} busId {BUS_IDS[local]} "
            "commId 0x4f6aa0f2d3c1b2a9 - Init "
        )
        following = (rank + 1) % num_ranks
        is_near = following // 8 == host
        transport = self.intra if is_near else self.inter.format(nic=local // 4)
        way = "" if is_near else "[send] "
        return [
            "cudaDriverVersion 12090",
            f"NCCL version {self.version}",
            f"Bootstrap: Using {self.bootstrap}:10.0.0.{host}<0>",
            f"NET/IB : {self.candidates.format(host=host)}",
            f"Using network {self.network}",
            f"{start}START",
            f"NET/{self.network} : GPU Direct RDMA {self.gdr} for HCA 0 'mlx5_0'",
            *TOPOLOGY,
            (
                "Pattern 4, crossNic 0, nChannels 16, bw 40.000000/25.000000, type "
                "NVL/PIX, sameChannels 1"
            ),
            (
                f"comm 0x55{rank:04x} rank {rank} nRanks {num_ranks} nNodes "
                f"{self.num_nodes or self.num_hosts} localRanks 8 localRank {local} "
                "MNNVL 0"
            ),
            *(
                [f"Channel 00/16 : {' '.join(map(str, range(num_ranks)))}"]
                if rank == 0
                else []
            ),
            f"Trees [0] {rank + 1}/-1/-1->{rank}->{rank - 1}",
            self.channels,
            (
                f"Channel 00/0 : {rank}[{local}] -> {following}[{following % 8}] "
                f"{way}via {transport}"
            ),
            "Connected all rings, use ring PXN 0 GDR 1",
            *self.extra,
            f"{start}COMPLETE",
            (
                f"Init timings - ncclCommInitRank: rank {rank} nranks {num_ranks} "
                "total 3.25 (kernels 0.25, alloc 0.50, bootstrap 1.25, "
                "allgathers 0.25, topo 0.25, graphs 0.25, connections 0.25, rest 0.25)"
            ),
        ]


TOPOLOGY = (
    "=== System : maxBw 370.8 totalBw 370.8 ===",
    "CPU/0-0 (1/2/-1)",
    "+ PCI[48.0] - PCI/0-1a000 (100010100)",
    "              + PCI[48.0] - GPU/0-1b000 (0)",
    "                            + NVL[370.8] - NVS/0-0",
    "              + PCI[48.0] - NIC/0-1c000",
    "                            + NET[25.0] - NET/0-0 (0/0/1/25.000000)",
    "+ SYS[22.0] - CPU/0-1",
    "==========================================",
    (
        "GPU/0-1b000 :GPU/0-1b000 (0/5000.0/LOC) GPU/0-43000 (2/370.8/NVL) "
        "NET/0-0 (3/24.0/PIX) "
    ),
)


def text_of(log: JobLog, **changes: object) -> bytes:
    """Return a log as a file has it, with fields changed."""
    changed = replace(log, **changes)  # pyright: ignore[reportArgumentType]
    return "".join(f"{line}\n" for line in changed.lines()).encode()


def interleave(streams: list[list[str]], seed: int, share: float) -> tuple[str, int]:
    """Return streams of lines as one text, and the number of lines that were cut.

    After the first part of a cut line, a whole line of another stream follows at once.
    The first line of the first stream is never cut.
    """
    dice = random.Random(seed)
    waiting = [list(stream) for stream in streams]
    text = waiting[0].pop(0) + "\n"
    num_cut = 0
    while alive := [stream for stream in waiting if stream]:
        line = dice.choice(alive).pop(0)
        others = [stream for stream in waiting if stream]
        if others and len(line) > 1 and dice.random() < share:
            at = dice.randrange(1, len(line))
            text += f"{line[:at]}{dice.choice(others).pop(0)}\n{line[at:]}\n"
            num_cut += 1
        else:
            text += line + "\n"
    return text, num_cut
