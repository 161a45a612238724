"""Time the cost of statuses: a training step, and the controller of many ranks.

    ronde run -n 2 python benchmarks/status_cost.py mnist_cnn mlp
    python benchmarks/status_cost.py table --ranks 512

The first trains with the reporter on and off in turn, some seconds each: the median
over these pairs of the ratios of their median and of their mean steps. The second
feeds the controller's table, once a second, the frames of agents with 8 ranks each,
while a reader takes every version, and shows its processor time; each host's observer
also answers a question every second. What one report takes of a rank, in microseconds a
second, is shown with the first.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, cast

from ronde.launch import (
    FROM_AGENT,
    MessageDecoder,
    Statuses,
    StatusService,
    StatusText,
    encode,
    find_sockets,
    wait_for,
)
from ronde.launch.wire.messages import Observed
from ronde.monitor import GpuUsage, HostUsage, NetworkCounters, ProcessUsage
from ronde.plain_values import to_plain
from ronde.status import (
    Part,
    PendingCollective,
    RankStatus,
    StatusReporter,
    StepTime,
    WorkerInfo,
    encode_status,
)
from ronde.world import own_or
from ronde.world.environment import send_to_agent

_PHASE_S = 3.0
_WARM_S = 5.0
_RANKS_EACH, _REFRESHES = 8, 20
_CHANNEL = "RONDE_CHANNEL"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("subjects", nargs="+", metavar="MODEL|table")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=1000, help="of the table")
    options = parser.parse_args()
    for subject in options.subjects:
        is_table = subject == "table"
        record = (
            measure_table(options.ranks)
            if is_table
            else measure(subject, options.pairs)
        )
        if record:
            print(json.dumps({"subject": subject, **record}), flush=True)


def measure(model_name: str, num_pairs: int) -> dict[str, float]:
    import torch
    from training_step import Mlp, MnistNet

    import ronde.torch as hvd
    from ronde.session import current_session

    hvd.init()
    torch.manual_seed(hvd.rank())
    torch.set_num_threads(1)
    is_cnn = model_name == "mnist_cnn"
    model = MnistNet() if is_cnn else Mlp()
    inputs = torch.rand(100, 1, 28, 28) if is_cnn else torch.rand(32, 784)
    targets = torch.randint(0, 10, (len(inputs),))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters()
    )

    def step() -> float:
        begun_s = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        return time.perf_counter() - begun_s

    ends_at_s, warm = time.monotonic() + _WARM_S, [step()]
    while hvd.allreduce(torch.tensor([time.monotonic() < ends_at_s]), op=hvd.Max)[0]:
        warm.append(step())
    number = torch.tensor([int(_PHASE_S / statistics.median(warm))])
    num_steps = int(hvd.broadcast(number, root_rank=0))
    sources = optimizer.report, current_session().waits.report
    ratios: list[tuple[float, float]] = []
    for pair in range(num_pairs):
        took: dict[bool, list[float]] = {}
        for is_on in (True, False) if pair % 2 else (False, True):
            switch(is_on=False)  # what reports ends within a second
            for _ in range(num_steps // 2):
                step()
            if is_on:
                switch(is_on=True)
                start_reporter(sources)
            took[is_on] = [step() for _ in range(num_steps)]
        means = statistics.mean(took[True]) / statistics.mean(took[False])
        medians = statistics.median(took[True]) / statistics.median(took[False])
        ratios.append((medians, means))
    switch(is_on=True)
    reporter, begun_s = start_reporter(sources), time.thread_time()
    for _ in range(100):
        send_to_agent(f"status {encode_status(reporter.sample())}")
    report_us = (time.thread_time() - begun_s) * 1e4
    if hvd.rank():
        return {}
    return {
        "median_step_ms": statistics.median(took[False]) * 1e3,
        "ratio_of_medians": statistics.median(each for each, _ in ratios),
        "ratio_of_means": statistics.median(each for _, each in ratios),
        "quartiles_of_medians": statistics.quantiles([each for each, _ in ratios])[::2],
        "num_pairs": num_pairs,
        "report_us": report_us,
    }


_channel = own_or(None).get(_CHANNEL, "")


def switch(*, is_on: bool) -> None:
    """Give this process its channel, or take it away."""
    os.environ[_CHANNEL] = _channel if is_on else ""  # noqa: TID251  as an agent does


def start_reporter(sources: Sequence[Callable[[], Part]]) -> StatusReporter:
    reporter = StatusReporter()
    for source in sources:
        reporter.add(source)
    return reporter


_READER = """
import socket, sys
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
sock.sendall(b'{"ask": "usage"}\\n')
while sock.recv(1 << 20):
    pass
"""


def measure_table(size: int) -> dict[str, float]:
    """Return the share of one core that a table of so many ranks takes."""
    agents = range(size // _RANKS_EACH)
    rows = [
        WorkerInfo(n, n, f"node{n // 8:03}", 1000 + n, "running", None, 0.0, None)
        for n in range(size)
    ]
    decoders = [MessageDecoder(FROM_AGENT) for _ in agents]
    questions: list[Any] = []
    with closing(StatusService("table", ("train.py",))) as service:
        service.begin(0, lambda: rows, questions.append)
        (path,) = [p for p in find_sockets() if p.parent == service.directory]
        with subprocess.Popen([sys.executable, "-c", _READER, str(path)]):
            frames = [
                [_frame(agent, refresh) for agent in agents]
                for refresh in range(_REFRESHES)
            ]
            answers = [_answer(agent) for agent in agents]
            _serve(service, time.monotonic() + 1.0)
            begun_s, cpu_s = time.monotonic(), time.process_time()
            for refresh, sent in enumerate(frames):
                reader = str(json.loads(questions[-1].line)["reader"])
                for agent, decoder in zip(agents, decoders, strict=True):
                    answer = encode(Observed(answers[agent].replace("READER", reader)))
                    for message in decoder.feed(sent[agent] + answer):
                        if isinstance(message, Observed):
                            service.on_observed(f"node{agent:03}", message.line)
                        else:
                            service.on_statuses(message)
                _serve(service, begun_s + refresh + 1.0)
            cpu_s = time.process_time() - cpu_s
            wall_s = time.monotonic() - begun_s
            service.close()
    sizes = [len(frame) for frame in frames[0]]
    if not questions:
        raise RuntimeError("the reader has not asked")
    return {
        "ranks": size,
        "share_of_a_core": cpu_s / wall_s,
        "refreshes": _REFRESHES,
        "bytes_a_second": sum(sizes),
    }


def _answer(agent: int) -> str:
    gpu = GpuUsage(
        *(0, "NVIDIA H100 80GB HBM3", 0.97, 60 << 30, 80 << 30),
        *(650.5, 61.0, 1755, 1980, (), (1000,)),
    )
    port = NetworkCounters("mlx5_0:1", 10**15, 10**15, 0, 4 * 10**11)
    usage = HostUsage(
        *(1e5, 1e6, 128, 10**12, 2 * 10**12, 10**9, 10**12, 0),
        interfaces=(port,) * 9,
        gpus=(gpu,) * 8,
        gpu_problem="",
        workers={str(8 * agent + n): ProcessUsage(1e5, 10**10) for n in range(8)},
    )
    plain = cast("dict[str, object]", to_plain(usage))
    return json.dumps({"reader": "READER", **plain}).replace('"READER"', "READER")


def _frame(agent: int, refresh: int) -> bytes:
    found: list[StatusText] = []
    for worker in range(agent * _RANKS_EACH, (agent + 1) * _RANKS_EACH):
        collectives = tuple(
            PendingCollective(
                f"gradients.layers.{n}.weight",
                "all",
                "allreduce",
                refresh,
                1 << 22,
                0.013 * n,
            )
            for n in range(2)
        )
        status = RankStatus(
            pid=1000 + worker,
            step=refresh,
            collectives=collectives,
            num_collectives=2,
            rss_bytes=3 << 30,
            device_bytes=40 << 30,
            progress={"loss": 2.123456789, "tokens": 1e6 * refresh},
            steps=tuple(
                StepTime(refresh * 16 + n, 0.5123456, 0.1123456, 0.0123456, 0.0012345)
                for n in range(16)
            ),
        )
        found.append(StatusText(worker, encode_status(status), 0.4))
    return encode(Statuses(tuple(found)))


def _serve(service: StatusService, until_s: float) -> None:
    while (now_s := time.monotonic()) < until_s:
        service.advance()
        watched = list(service.watched())
        writable = [fd for fd, events, _ in watched if events & 4]
        due_s = min(service.due_s, until_s) - now_s
        ready: Sequence[int] = wait_for(
            [fd for fd, *_ in watched], writable, max(0.0, due_s)
        )
        calls = {fd: call for fd, _, call in watched}
        for fd in ready:
            calls[fd]()


if __name__ == "__main__":
    main()
