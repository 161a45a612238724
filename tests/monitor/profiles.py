"""Simulated profiles with a known truth."""

from itertools import chain

from tests.monitor.jobs import make_table

from ronde.monitor import Profile, SampleWindow, StackFrame

BEGUN_AT = 1000.0
TRAIN = "/home/me/train.py"
MODEL = "/home/me/model.py"
TORCH = "/venv/lib/python3.11/site-packages/torch"
RONDE = "/venv/lib/python3.11/site-packages/ronde"


def user(line, file=TRAIN, function="main"):
    return StackFrame(function, file, line, is_user=True)


def called(function, file, line=1):
    return StackFrame(function, file, line, is_user=False)


LOOP = (
    called("_BaseDataLoaderIter.__next__", f"{TORCH}/utils/data/dataloader.py"),
    called("_measure_input.<locals>.measured", f"{RONDE}/torch_entry.py"),
    user(88),
)
BACKWARD = (
    called("_engine_run_backward", f"{TORCH}/autograd/graph.py"),
    called("Tensor.backward", f"{TORCH}/_tensor.py"),
    user(44),
)
STACKS = {
    "compute": (called("Linear.forward", f"{TORCH}/nn/modules/linear.py"), user(40)),
    "model": (user(212, MODEL, "forward"), user(40)),
    "backward": BACKWARD,
    "hook": (called("sleep_while", f"{RONDE}/data_parallel/hooks.py"), *BACKWARD),
    "step": (
        called("sgd", f"{TORCH}/optim/sgd.py"),
        called("DistributedOptimizer.step", f"{RONDE}/torch/optimizer.py"),
        user(45),
    ),
    "reduce": (
        called("wait", f"{RONDE}/collectives/engines/shared_memory/waiting.py"),
        called("Communicator.all_reduce", f"{RONDE}/collectives/communicator.py"),
        called("DistributedOptimizer.step", f"{RONDE}/torch/optimizer.py"),
        user(45),
    ),
    "barrier": (
        called("barrier", f"{TORCH}/distributed/distributed_c10d.py"),
        called("wrapper", f"{TORCH}/distributed/c10d_logger.py"),
        user(46),
    ),
    "loader": LOOP,
    "own loader": (
        user(7, function="__getitem__"),
        called("_MapDatasetFetcher.fetch", f"{TORCH}/utils/data/_utils/fetch.py"),
        *LOOP,
    ),
    "save": (
        called("save", f"{TORCH}/serialization.py"),
        user(52, function="checkpoint"),
    ),
    "synchronize": (called("synchronize", f"{TORCH}/cuda/__init__.py"), user(47)),
    "ddp": (called("DDP.forward", f"{TORCH}/nn/parallel/distributed.py"), user(40)),
    "import": (
        called("<module>", f"{TORCH}/utils/data/dataloader.py"),
        called("_find_and_load", "<frozen importlib._bootstrap>"),
        user(1),
    ),
    "lost": (called("f", "/venv/lib/python3.11/queue.py"),),
}
NAMES = [*STACKS]
FRAMES = [*dict.fromkeys(chain.from_iterable(STACKS.values()))]


def make_window(worker, runs, *, begun_s=0.0, length_s=5.0, rss_bytes=1 << 30):
    """Return a window of runs of named stacks: ``[("compute", 300), ...]``."""
    names = [*dict.fromkeys(name for name, _ in runs)]
    return SampleWindow(
        worker=worker,
        pid=1000 + worker,
        begun_at=BEGUN_AT + begun_s,
        ended_at=BEGUN_AT + begun_s + length_s,
        frames=tuple(FRAMES),
        stacks=tuple(
            tuple(map(FRAMES.index, stack)) for stack in map(STACKS.get, names)
        ),
        runs=tuple((names.index(name), count) for name, count in runs),
        rss_bytes=rss_bytes,
        problem="",
    )


def make_profile(*ranks, num_windows=2, status=None, rate_hz=100):
    """Return a profile whose ranks repeat a step of named stacks, ``{name: count}``."""
    windows = []
    for worker, step in enumerate(ranks):
        length_s = sum(step.values()) / rate_hz
        windows += [
            make_window(
                worker,
                [*step.items()],
                begun_s=number * length_s,
                length_s=length_s,
                rss_bytes=(number + 1) << 30,
            )
            for number in range(num_windows)
        ]
    ended_at = max((window.ended_at for window in windows), default=BEGUN_AT)
    status = status or without_steps(make_table(len(ranks)))
    return Profile(status, BEGUN_AT, ended_at, rate_hz, tuple(windows))


def without_steps(table, **fields):
    """Return a table whose ranks use no GPU and report no steps."""
    fields = {"steps": (), "device_bytes": 0, **fields}
    rows = [row._replace(status=row.status._replace(**fields)) for row in table.workers]
    return table._replace(workers=tuple(rows))
