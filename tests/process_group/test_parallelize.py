"""Layouts by ``ronde.torch.parallel``: parity, plans, checkpoints and estimates."""

import gc
from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from itertools import chain, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from tests.limits import HANG_S
from tests.parity.sessions import message_of
from tests.process_group.groups import Setting, run_all, run_in_group
from tests.ranks import run_ranks_bare
from torch import Tensor, distributed as dist, nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.optim import Optimizer

from ronde.errors import UsageError
from ronde.parallel import Sharding
from ronde.torch import parallel
from ronde.torch.parallel import Layout

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, of its own functions
WIDTH = 12
PAIR = Setting("auto", 2)


@pytest.fixture(scope="module")
def found():
    return run_all(PAIR, CALLS)


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.drop(self.down(torch.tanh(self.up(self.norm(inputs)))))


class Model(nn.Module):
    def __init__(self, width: int = WIDTH, num_blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(inputs), targets)


def sum_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(inputs), targets, reduction="sum")


def batches(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [
        (
            torch.randn(12, WIDTH, generator=generator),
            torch.randint(0, 5, (12,), generator=generator),
        )
        for _ in range(count)
    ]


class MixedBlock(Block):
    """Normalises in double precision, and has a scale of its own in single."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        self.scale = nn.Parameter(torch.ones(width))
        self.norm.double()
        self.last = nn.LayerNorm(width).double()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(inputs.double()).float()))
        return inputs + self.last((self.scale * self.down(hidden)).double()).float()


def build_mixed() -> Model:
    model = Model()
    model.blocks = nn.ModuleList(MixedBlock() for _ in range(2))
    return model


def train_mixed(layout: str) -> tuple[float, list[str]]:
    """Return the largest difference to one process, and the names of FSDP units."""
    torch.manual_seed(0)
    alone = build_mixed()
    shared = deepcopy(alone)
    parallel.parallelize(shared, parallel.init_mesh(Layout.parse(layout)))
    rows = slice(6 * dist.get_rank(), 6 * dist.get_rank() + 6)
    for model, own in ((alone, slice(None)), (shared, rows)):
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for inputs, targets in batches():
            optimizer.zero_grad()
            loss_of(model, inputs[own], targets[own]).backward()
            optimizer.step()
    pairs = zip(alone.parameters(), shared.parameters(), strict=True)
    worst = max(float((p - q.full_tensor()).abs().max()) for p, q in pairs)
    names = [n for n, m in shared.named_modules() if isinstance(m, FSDPModule)]
    return worst, names


def test_parameters_of_several_dtypes_are_gathered_apart(found):
    for worst, names in found["mixed"]:
        assert worst < 1e-5
        ends = ("", ".norm", ".last")
        assert names == ["", *(f"blocks.{n}{end}" for n in (0, 1) for end in ends)]


def wrong_parities() -> list[str]:
    found = [parallel.check_parity(Model, Layout(dp_shard=2), batches(), sum_of)]

    class Scaled(Model):
        """Computes another output when it is sharded."""

        def forward(self, inputs: Tensor) -> Tensor:
            factor = 1.01 if isinstance(self, FSDPModule) else 1.0
            return super().forward(inputs) * factor

    found.append(parallel.check_parity(Scaled, Layout(dp_shard=2), batches(), loss_of))
    assert not any(each.is_equal for each in found)
    return [str(each) for each in found]


def test_parity_names_the_difference(found):
    for summed, scaled in found["wrong"]:
        assert "The first above 1.5e-08: step 0: loss is off by 0.5" in summed
        assert "step 0: loss is off by " in scaled


def refusals() -> list[str]:
    mesh = parallel.init_mesh(Layout(dp_shard=1, tp=2))
    whole = parallel.init_mesh(Layout(pp=2))
    mixed = Model()
    mixed.blocks[1].norm.bias.data = mixed.blocks[1].norm.bias.data.double()
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    shard = parallel.init_mesh(Layout(dp_shard=2))

    def call(model: nn.Module, mesh: object, **options: object) -> str:
        return message_of(UsageError, parallel.parallelize, model, mesh, **options)

    def cut(mesh: object, **options: object) -> str:
        loss = nn.functional.cross_entropy
        return message_of(
            UsageError, parallel.pipeline, few_layers(), mesh, loss, 4, **options
        )

    return [
        call(nn.Linear(3, 4), mesh),
        call(Block(3), mesh),
        call(Model(), whole),
        call(Model(), shard, zero=1),
        call(Model(), shard, plan=plan),
        call(Model(), shard, units=[nn.Conv2d]),
        call(mixed, shard),
        message_of(UsageError, parallel.init_mesh, Layout(dp_shard=3)),
        message_of(
            UsageError, parallel.check_parity, Model, Layout(dp_shard=2),
            [(torch.ones(3, WIDTH), torch.zeros(3, dtype=torch.int64))], loss_of,
        ),
        message_of(UsageError, parallel.estimate, Model, Layout(), [], loss_of),
        cut(shard),
        cut(whole, schedule="ZBV"),
        cut(whole, costs=[1.0]),
        cut(whole, num_chunks=2),
        cut(whole, schedule="Interleaved1F1B", num_chunks=4),
    ]  # fmt: skip


def test_bad_arguments_are_refused(found):
    starts = [
        "Linear has no linear layers with known names for tp=2, such as",
        "out_features of up must be a multiple of tp=2, got 9.",
        "parallelize() does not support pp=2. Use pipeline().",
        "zero must be 2 or 3, got 1.",
        "plan cannot be used without tp.",
        "Model has no module of the classes in units: Conv2d.",
        "parameters of a module must have one dtype, got torch.float32, torch.float64",
        "pp*dp_replicate*dp_shard*cp*tp must be the number of ranks, 2, got 1*1*3",
        "the rows of a batch must be a multiple of dp_replicate * dp_shard = 2, got 3.",
        "estimate() cannot run in a process with a process group.",
        "pipeline() needs a mesh with at least 2 ranks along pp.",
        "schedule must be one of GPipe, 1F1B, Interleaved1F1B, got 'ZBV'.",
        "costs must have one value per layer, 6, got 1.",
        "num_chunks must be 1 with schedule 1F1B, got 2.",
        "each stage needs at least one layer, got 6 layers for 8 stages.",
    ]
    for messages in found["refused"]:
        for message, start in zip(messages, starts, strict=True):
            assert message.startswith(start)


def test_tp_stays_on_a_host(monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        refused = message_of(UsageError, parallel.init_mesh, Layout(tp=4), "cpu")
        assert refused.startswith(
            "tp must divide the number of ranks per host, 2, got tp=4"
        )
        mesh = parallel.init_mesh(Layout(tp=4), "cpu", allow_tp_over_hosts=True)
        assert mesh.mesh_dim_names == ("dp_shard", "tp")
        assert parallel.init_mesh(Layout(dp_shard=2, tp=2), "cpu")["tp"].size() == 2
    finally:
        dist.destroy_process_group()


def test_units_are_the_blocks_that_repeat():
    model = Model()
    assert parallel.find_units(model) == list(model.blocks)
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    outer = nn.Sequential(inner, nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.ReLU())
    assert parallel.find_units(outer) == [inner, outer[1]]
    assert parallel.find_units(nn.Linear(2, 2)) == []
    assert parallel.find_units(model, [nn.Linear, Model])[0] is model.head


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(8, 8))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.gate_proj, self.up_proj = nn.Linear(8, 16), nn.Linear(8, 16)
        self.down_proj = nn.Linear(16, 8)
        self.dense = nn.Linear(8, 8)


def test_a_plan_by_the_names_of_layers():
    plan = parallel.tensor_parallel_plan(nn.Sequential(Gated()), 4)
    rows = {name for name, style in plan.items() if isinstance(style, RowwiseParallel)}
    assert rows == {"0.attention.o_proj", "0.down_proj"}
    columns = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    assert {name.rpartition(".")[2] for name in plan.keys() - rows} == columns
    encoder = nn.TransformerEncoderLayer(8, 2, 16)
    assert parallel.tensor_parallel_plan(encoder, 2).keys() == {"linear1", "linear2"}


# Checkpoints


Step = Callable[[Tensor, Tensor], object]


def few_layers() -> nn.Sequential:
    """As many layers as stages; one of them has a tp plan."""
    torch.manual_seed(4)
    named = OrderedDict[str, nn.Module](block=Block())
    widths = {"wide": WIDTH, "narrow": 7, "odd": 9, "bare": 7, "head": 5}
    for before, (name, width) in pairwise([("", WIDTH), *widths.items()]):
        named[name] = nn.Linear(before[1], width, bias=name != "bare")
    return nn.Sequential(named).double()


def make(layout: str, chunks: int = 1) -> tuple[nn.Module, Optimizer, Step]:
    parsed = Layout.parse(layout)
    mesh = parallel.init_mesh(parsed)
    if parsed.pp > 1:
        interleaved = {"schedule": "Interleaved1F1B", "num_chunks": chunks}
        options = interleaved if chunks > 1 else {}
        loss_fn = nn.functional.cross_entropy
        staged = parallel.pipeline(few_layers(), mesh, loss_fn, parsed.pp, **options)
        return staged.stages, adamw(staged.stages.parameters()), staged.step
    model = parallel.parallelize(few_layers(), mesh)

    def step(inputs: Tensor, targets: Tensor) -> None:
        loss_of(model, inputs, targets).backward()

    return model, adamw(model.parameters()), step


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    tensors = dict(model.named_parameters())
    state = {f"{n}.{k}": v for n, p in model.named_parameters()
             for k, v in optimizer.state[p].items()}  # fmt: skip
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for name, t in {**tensors, **state}.items()
    }


def train_and_save(path: Path, layouts: list[str]) -> list[dict[str, Tensor]]:
    found = []
    for layout in layouts:
        model, optimizer, train = make(layout)
        model.eval()  # without dropout
        for inputs, targets in batches(2):
            optimizer.zero_grad()
            train(inputs.double(), targets)
            optimizer.step()
        for step in (1, 2):  # the second takes the place of the first
            parallel.save(
                path / layout, model, optimizer,
                layout=Layout.parse(layout), notes={"step": step},
            )  # fmt: skip
        found.append(state_of(model, optimizer))
    return found


def load_all(
    path: Path, saved: list[str], layouts: list[str]
) -> list[dict[str, Tensor]]:
    found = []
    for layout in layouts:
        model, optimizer, _ = make(layout, chunks=2)
        for name in saved:
            states = optimizer.state.values()
            with torch.no_grad():
                for tensor in chain(model.parameters(), *(s.values() for s in states)):
                    tensor.zero_()
            assert parallel.load(path / name, model, optimizer) == {"step": 2}
            found.append(state_of(model, optimizer))
    return found


LAYOUTS = {
    1: ["dp_shard=1"],
    3: ["dp_shard=3", "tp=3", "pp=3"],
    4: ["pp=2,dp_shard=2", "dp_shard=2,tp=2"],
}


def in_layouts(
    layouts: list[str], size: int, function: Callable, *args: object
) -> list[dict[str, Tensor]]:
    """Return the merged results of all ranks, for each layout."""
    of_ranks = run_in_group(Setting("auto", size), function, *args, layouts)
    return [
        dict(chain(*(part.items() for part in parts)))
        for parts in zip(*of_ranks, strict=True)
    ]


@pytest.mark.parametrize(
    "layouts_of",
    [
        {size: layouts[-1:] for size, layouts in LAYOUTS.items()},
        pytest.param(LAYOUTS, marks=pytest.mark.long),
    ],
    ids=["few", "all"],
)
def test_loads_under_every_other_layout_bit_for_bit(tmp_path, layouts_of):
    """Interleaved pipelines also load checkpoints of other layouts."""
    saved: dict[str, dict[str, Tensor]] = {}
    for size, layouts in layouts_of.items():
        states = in_layouts(layouts, size, train_and_save, tmp_path)
        saved |= zip(layouts, states, strict=True)
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(saved)
    for size, layouts in layouts_of.items():
        expected = list(saved.values()) * len(layouts)
        states = in_layouts(layouts, size, load_all, tmp_path, list(saved))
        for state, whole in zip(states, expected, strict=True):
            assert state.keys() == whole.keys()
            assert all(torch.equal(state[name], whole[name]) for name in whole)


def load_missing() -> str:
    with TemporaryDirectory() as folder:
        (Path(folder) / "model.previous").mkdir()
        (Path(folder) / "model.previous" / "ronde.json").touch()
        own = make("dp_shard=2")[:2]
        return message_of(UsageError, parallel.load, Path(folder) / "model", *own)


def test_missing_checkpoint(found):
    for message in found["missing"]:
        assert message.startswith("path must be a folder that save() wrote, got ")
        assert message.endswith("model.previous.")


# Memory


def wide() -> nn.Module:
    return Model(width=64, num_blocks=6)


def adamw(parameters) -> Optimizer:
    return torch.optim.AdamW(parameters, foreach=False)


def real_peaks(_: object, layout: str) -> list[int]:
    """Return the peaks that torch's tracker counts on a training rank.

    On Gloo: of ronde's buffers it counts all of the memory that they are part of.
    """
    dist.init_process_group("gloo")
    found = [real_peak(layout, zero) for zero in (2, 3)]
    dist.destroy_process_group()
    return found


def real_peak(layout: str, zero: int) -> int:
    mesh = parallel.init_mesh(Layout.parse(layout))
    model = parallel.parallelize(wide(), mesh, zero=zero)
    optimizer = adamw(model.parameters())
    inputs, targets = torch.ones(4, 64), torch.zeros(4, dtype=torch.int64)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, inputs, targets).backward()
        optimizer.step()

    step()
    gc.collect()
    tracker = FSDPMemTracker(model, optimizer)
    tracker.track_inputs((inputs, targets))
    with tracker:
        step()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


@pytest.mark.parametrize("layout", ["dp_shard=3", "dp_shard=2,tp=2"])
def test_estimate_matches_measured_memory(layout):
    parsed = Layout.parse(layout)
    real = run_ranks_bare(
        parsed.num_ranks, real_peaks, layout, launcher="torchrun", timeout_s=HANG_S
    )
    batch = [torch.ones(4, 64), torch.zeros(4, dtype=torch.int64)]
    for zero, held in zip((2, 3), real[0], strict=True):
        estimate = parallel.estimate(
            wide, parsed, batch, loss_of, zero=zero, device_type="cuda"
        )
        assert estimate.total_bytes == pytest.approx(held, rel=0.03)
        shortage = estimate.shortage(1 << 16)
        assert shortage.startswith("a rank has 64KiB of memory, but needs ")
        assert not estimate.shortage(1 << 30)
        if parsed.tp == 1:
            units = [sum(p.numel() for p in b.parameters()) for b in wide().blocks]
            theory = Sharding(parsed.dp_shard, zero).peak([*units, 64 * 5 + 5])
            assert estimate.total_bytes == pytest.approx(theory.total_bytes, rel=0.1)


CALLS = {
    "mixed": (train_mixed, "dp_shard=2"),
    "wrong": (wrong_parities,),
    "refused": (refusals,),
    "missing": (load_missing,),
}
