"""Layouts that could silently train another model are correct or refused."""

import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from tests.parity.sessions import message_of
from tests.process_group.groups import Setting, run_all
from torch import Tensor, distributed as dist, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel

from ronde.errors import UsageError
from ronde.torch import parallel
from ronde.torch.parallel import Layout

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, of its own functions
WIDTH, NUM_WORDS = 8, 20
SETTINGS = [Setting("auto", 2), Setting("gloo", 3), Setting("auto", 4)]


@cache
def results_of(setting: Setting) -> dict[str, list]:
    return run_all(setting, CALLS[setting.size])


class Found:
    """The results of each call by name and setting; run at first access."""

    def __iter__(self) -> Iterator[str]:
        for setting in SETTINGS:
            yield from (f"{name}-{setting}" for name in CALLS[setting.size])

    def __getitem__(self, key: str) -> list:
        setting = next(each for each in SETTINGS if key.endswith(f"-{each}"))
        return results_of(setting)[key.removesuffix(f"-{setting}")]


@pytest.fixture
def found() -> Found:
    return Found()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# Weights of several stages


def language_model() -> nn.Sequential:
    """The first and last layer share a weight, as in GPT-2."""
    torch.manual_seed(0)
    inner = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    head = nn.Linear(WIDTH, NUM_WORDS, bias=False)
    model = nn.Sequential(nn.Embedding(NUM_WORDS, WIDTH), *inner, head).double()
    head.weight = model[0].weight
    return model


def with_one_layer_thrice() -> nn.Sequential:
    model = language_model()
    model[5].weight = nn.Parameter(model[5].weight.detach().clone())
    model[2] = model[3] = model[1]
    return model


def next_word(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def words() -> Tensor:
    return torch.arange(2 * NUM_WORDS).remainder(NUM_WORDS).reshape(8, 5)


def off_by(build: Callable[[], nn.Sequential], layout: str, **options: object) -> float:
    """Return the largest difference to one process's weights after three steps."""
    parsed = Layout.parse(layout)
    model = parallel.pipeline(
        build(), parallel.init_mesh(parsed), next_word, 4, **options
    )
    alone, inputs = build(), words()
    optimizers = [
        torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1)
        for each in (alone, model.stages)
    ]
    place = parsed.coordinates(dist.get_rank())
    own = inputs.chunk(parsed.dp_shard)[place["dp_shard"]]
    own_targets = inputs.flip(0).chunk(parsed.dp_shard)[place["dp_shard"]]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for _ in range(1 + step % 2):  # gradients add up
            next_word(alone(inputs), inputs.flip(0)).backward()
            loss = model.step(own, own_targets)
            assert (loss is not None) == model.is_last
            assert model.is_first == (place["pp"] == 0)
        for optimizer in optimizers:
            optimizer.step()
    expected = dict(alone.named_parameters(remove_duplicate=False))
    return max(
        float((whole(parameter) - expected[name]).detach().abs().max())
        for name, parameter in model.stages.named_parameters(remove_duplicate=False)
    )


INTERLEAVED = {"schedule": "Interleaved1F1B", "num_chunks": 2}


def tied(*layouts: str, **options: object) -> list[float]:
    builds = (language_model, with_one_layer_thrice)
    return [off_by(each, layout, **options) for layout in layouts for each in builds]


def interleaved(layout: str) -> list[float]:
    return tied(layout, **INTERLEAVED)


def gpipe(layout: str) -> list[float]:
    return tied(layout, schedule="GPipe")


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_stages_that_share_a_weight_follow_one_process(found, setting):
    names = [n for n in found if n.endswith(str(setting)) and n.startswith("tied")]
    assert names
    for errors in (each for name in names for each in found[name]):
        assert all(error < 1e-13 for error in errors)


def sharded_in_two_ways() -> str:
    def call() -> None:
        mesh = parallel.init_mesh(Layout(pp=2, tp=2))
        plan = {"5": ColwiseParallel(), "1": ColwiseParallel()}
        parallel.pipeline(language_model(), mesh, next_word, 4, plan=plan)

    return message_of(UsageError, call)


def test_a_shared_weight_that_stages_shard_in_two_ways_is_refused(found):
    for message in found["sharded in two ways-auto-4"]:
        assert message.startswith(
            "all stages must shard a shared weight in the same way, got 0.weight whole "
            "in stage 0, 5.weight (Shard(dim=0),) in stage 1."
        )


def normalised() -> list[str]:
    mesh = parallel.init_mesh(Layout(pp=2))
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallel.pipeline(model, mesh, nn.functional.mse_loss, 2)
    return [str(each.message) for each in caught if "BatchNorm" in str(each.message)]


def test_batch_norm_in_a_pipeline_is_reported_once(found):
    first, *others = found["batch norm-auto-2"]
    [message] = first
    assert message.startswith("BatchNorm computes its statistics per microbatch in a ")
    assert "(first layer: 1)" in message
    assert others == [[]]


# Blocks divided by tp


HEADS, HEAD_WIDTH = 6, 6
HIDDEN = HEADS * HEAD_WIDTH


class Attention(nn.Module):
    """Correct when it is sharded."""

    shape = (-1, HEAD_WIDTH)

    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            self.add_module(name, nn.Linear(HIDDEN, HIDDEN))
        self.norm: nn.Module = nn.Identity()

    def forward(self, inputs: Tensor, mask: object = None) -> Tensor:
        q, k, v = (
            getattr(self, name)(inputs)
            .view(*inputs.shape[:2], *self.shape)
            .transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        hidden = nn.functional.scaled_dot_product_attention(self.norm(q), k, v)
        hidden = nn.functional.dropout(hidden, 0.1, self.training)
        return self.out_proj(hidden.transpose(1, 2).flatten(2))


class FixedHeads(Attention):
    shape = (HEADS, -1)


class FixedShape(Attention):
    shape = (HEADS, HEAD_WIDTH)


class Masked(FixedHeads):
    def forward(self, inputs: Tensor, mask: object) -> Tensor:
        return super().forward(inputs)


class Rotary(FixedHeads):
    """Cannot be run alone, as another module makes its second argument."""

    def forward(self, inputs: Tensor, rotary: dict[str, Tensor]) -> Tensor:
        return super().forward(inputs * rotary["scale"])


class NormedHeads(Attention):
    """Each rank computes a part of the gradient of a replicated weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HEAD_WIDTH)


class Rotating(NormedHeads):
    """With the signature of transformers' blocks."""

    head_dim = HEAD_WIDTH

    def forward(
        self, inputs: Tensor, position_embeddings: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        assert position_embeddings is not None
        cosines, sines = position_embeddings
        return super().forward(inputs * (cosines + sines).sum(-1, keepdim=True))


class FusedGate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, inputs: Tensor) -> Tensor:
        values, gates = self.fc1(inputs).chunk(2, -1)
        return self.fc2(values * gates.sigmoid())


class Normed(nn.Module):
    """Correct, although a forward changes its state and a projection is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.drop, self.num_calls = nn.Dropout(0.5), 0
        nn.init.zeros_(self.down.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        self.num_calls += 1
        shape = inputs.shape
        hidden = self.batch_norm(inputs.reshape(-1, HIDDEN)).reshape(shape)
        return inputs + self.drop(self.down(self.up(hidden).relu()))


def zeroed() -> nn.Module:
    block = FixedHeads()
    nn.init.zeros_(block.out_proj.weight)
    return block


WRONG: dict[str, Callable[[], nn.Module]] = {
    "fixed heads": FixedHeads,
    "with a mask": Masked,
    "zeros": zeroed,
    "bf16": lambda: FixedHeads().bfloat16(),
    "meta": lambda: FixedHeads().to("meta"),
    "fixed shape": FixedShape,
    "norm": NormedHeads,
    "rotating norm": Rotating,
    "fused gate": FusedGate,
}
RIGHT: dict[str, Callable[[], nn.Module]] = {
    "attention": Attention,
    "bf16": lambda: Attention().bfloat16(),
    "meta": lambda: Attention().to("meta"),
    "state": Normed,
    "torch's": lambda: nn.TransformerEncoderLayer(HIDDEN, HEADS, 24, batch_first=True),
    "cannot be tried": Rotary,
}


def tried(layout: str) -> tuple[dict[str, str], list[bool]]:
    """Return the errors of wrong blocks, and True for each unchanged right block."""
    mesh = parallel.init_mesh(Layout.parse(layout))
    messages = {
        name: message_of(
            UsageError, parallel.parallelize, nn.Sequential(Attention(), build()), mesh
        )
        for name, build in WRONG.items()
    }
    kept: list[bool] = []
    for build in RIGHT.values():
        torch.manual_seed(0)
        block, random = build(), torch.get_rng_state()
        state = {name: t.clone() for name, t in block.state_dict().items()}
        parallel.parallelize(block, mesh)
        kept.append(torch.equal(random, torch.get_rng_state()))
        kept.append(block.training and getattr(block, "num_calls", 0) == 0)
        for name, tensor in block.state_dict().items():
            kept.append(tensor.is_meta or torch.equal(whole(tensor), state[name]))
    return messages, kept


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_blocks_that_change_when_they_are_divided_are_refused(found, setting):
    tp = 3 if setting.size == 3 else 2
    starts = dict.fromkeys(WRONG, "output is off by 0.")
    starts["fixed shape"] = "RuntimeError: shape"
    starts["norm"] = starts["rotating norm"] = "gradient of norm.weight is off by"
    for messages, kept in found[f"tried-{setting}"]:
        for name, start in starts.items():
            assert messages[name].startswith(
                f"1 gives other results when divided over tp={tp}: {start}"
            ), name
        assert all(kept)


# Ranks that start with other weights


class Various(nn.Module):
    """Weights of several dtypes and sizes, some on the meta device, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 18), nn.Linear(18, 6, bias=False)
        self.half = nn.Linear(3, 3).bfloat16()
        self.large, self.batch_norm = nn.Linear(70, 70), nn.BatchNorm1d(3)
        self.batch_norm.running_mean.normal_()
        self.absent = nn.Linear(3, 3, device="meta")
        self.register_buffer("mask", torch.rand(5) < 0.5)


def seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return build()


def equal_weights(layouts: list[str]) -> list[bool]:
    found: list[bool] = []
    expected = seeded(Various, 0).state_dict()
    for layout in layouts:
        mesh = parallel.init_mesh(Layout.parse(layout))
        model = parallel.parallelize(seeded(Various, dist.get_rank()), mesh)
        for name, tensor in model.state_dict().items():
            if not tensor.is_meta:
                found.append(torch.equal(whole(tensor), expected[name]))
    return found


def equal_ties(layout: str, device: str) -> list[Tensor]:
    """Return the shared weight of each of this rank's stages, before a step."""
    model = language_model().to(device)
    model[5].weight = model[0].weight
    mesh = parallel.init_mesh(Layout.parse(layout))
    torch.manual_seed(dist.get_rank())
    if device != "meta":
        nn.init.normal_(model[0].weight)
    staged = parallel.pipeline(model, mesh, next_word, 4)
    if device == "meta":
        for weight in staged.stages.to_empty(device="cpu").parameters():
            nn.init.normal_(weight)
        staged.step(words(), words())
    named = staged.stages.named_parameters(remove_duplicate=False)
    return [whole(p).detach() for name, p in named if name in ("0.weight", "5.weight")]


def other_model() -> str:
    mesh = parallel.init_mesh(Layout(dp_shard=-1))
    model = nn.Linear(3, 3 + dist.get_rank())
    return message_of(UsageError, parallel.parallelize, model, mesh)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_all_ranks_get_the_weights_of_the_first(found, setting):
    for equal in found[f"weights-{setting}"]:
        assert equal
        assert all(equal)


@pytest.mark.parametrize("setting", [SETTINGS[0], SETTINGS[2]], ids=str)
def test_stages_start_with_equal_copies_of_a_weight(found, setting):
    copies = [copy for own in found[f"ties-{setting}"] for copy in own]
    assert len(copies) == setting.size
    for copy in copies:
        assert torch.equal(copy, copies[0])


def test_ranks_with_other_models_are_refused(found):
    for message in found["other model-gloo-3"]:
        assert message.startswith(
            "ranks have different models: weight is (3, 3) torch.float32, "
            "requires_grad on rank 0, but (4, 3) torch.float32, requires_grad on rank 1"
        )


# Parity


class Attentive(nn.Module):
    """Key biases without a gradient, a frozen block, an unused layer, two dtypes."""

    def __init__(self, attention: type[Attention] = Attention) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, HIDDEN)
        self.blocks = nn.ModuleList(attention() for _ in range(3))
        self.blocks[0].requires_grad_(requires_grad=False)
        self.unused, self.head = nn.Linear(3, 3), nn.Linear(HIDDEN, NUM_WORDS)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embedding(inputs)
        scale = torch.arange(HIDDEN) / HIDDEN
        for block in self.blocks:
            block.eval()  # without dropout
            is_rotary = isinstance(block, Rotary)
            hidden = hidden + block(hidden, {"scale": scale} if is_rotary else None)
        return self.head(hidden).float()


class HiddenTie(nn.Module):
    """An output head that uses another module's weight."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.hidden, self.scale = [embedding], nn.Parameter(torch.ones(NUM_WORDS))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.scale * (inputs @ self.hidden[0].weight.T)


def with_hidden_tie() -> nn.Sequential:
    model = language_model()
    model[5] = HiddenTie(model[0])
    return model


def losses_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return next_word(model(inputs), targets)


def parities(right: dict[str, dict], wrong: dict[str, dict]) -> list[str]:
    """Check the right layouts, and return the differences of the wrong ones."""
    batches = [(words().repeat(3, 1), words().flip(0).repeat(3, 1)) for _ in range(2)]

    def check(layout: str, build: Callable, **options: object) -> parallel.Parity:
        parsed = Layout.parse(layout)
        return parallel.check_parity(build, parsed, batches, losses_of, **options)

    for layout, options in right.items():
        parity = check(layout, **options)
        assert parity.is_equal, str(parity)
    found = [check(layout, **options) for layout, options in wrong.items()]
    assert not any(each.is_equal for each in found)
    return [str(each.first) for each in found]


def with_shared_layer() -> nn.Module:
    model = Attentive()
    model.blocks[2].q_proj = model.blocks[1].q_proj
    return model


def rotary() -> nn.Module:
    return Attentive(Rotary)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_parity_distinguishes_rounding_from_faults(found, setting):
    name = f"parity-{setting}"
    for differences in found[name]:
        assert differences == found[name][0]  # on every rank, also of a pipeline
        for what in differences:
            assert what.startswith("step 0: ")


# One sentence in place of errors of torch


class Own(nn.Sequential):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + super().forward(inputs)


def refusals() -> list[str]:
    mesh, staged = (parallel.init_mesh(Layout.parse(t)) for t in ("dp_shard=2", "pp=2"))

    def cut(model: nn.Module) -> parallel.StagedModel:
        return parallel.pipeline(model, staged, next_word, 3)

    layers = language_model()
    narrow, wide = nn.Linear(3, 3), nn.Linear(3, 4)
    models = [nn.Sequential(narrow), nn.Sequential(wide), nn.Sequential(narrow, narrow)]
    one, *others = (parallel.parallelize(deepcopy(each), mesh) for each in models)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (one, *others)]
    with TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        path = Path(folders[0]) / "model"
        parallel.save(path, one, optimizers[0])
        loads = [
            message_of(UsageError, parallel.load, path, *pair)
            for pair in zip(others, optimizers[1:], strict=True)
        ]
        dist.barrier()
    return [
        message_of(
            UsageError,
            lambda: parallel.parallelize(with_shared_layer(), mesh, units=[Attention]),
        ),
        message_of(UsageError, cut, Attentive()),
        message_of(UsageError, cut, Own(*layers)),
        message_of(UsageError, cut(layers).step, words(), words()),
        *(message.replace(repr(str(path)), "PATH") for message in loads),
    ]


def test_errors_in_one_sentence(found):
    plain = "model must be a plain Sequential of consecutive layers, "
    other = "the checkpoint PATH does not fit this model: "
    shared = "units must not share parameters, but blocks.1.q_proj.weight and "
    starts = [
        f"{shared}blocks.2.q_proj.weight are the same parameter.",
        f"{plain}got Attentive.",
        f"{plain}got Own.",
        "the rows of a batch must be a multiple of num_microbatches = 3, got 8.",
        f"{other}0.weight has shape (3, 3), not (4, 3).",
        f"{other}it has no 1.weight.",
    ]
    for messages in found["refused-auto-2"]:
        for message, start in zip(messages, starts, strict=True):
            assert message.startswith(start)


CALLS = {
    2: {
        "tied": (tied, "pp=2"),
        "tied, interleaved": (interleaved, "pp=2"),
        "tied, gpipe": (gpipe, "pp=2"),
        "batch norm": (normalised,),
        "refused": (refusals,),
        "ties": (equal_ties, "pp=2", "meta"),
        "weights": (equal_weights, ["dp_shard=2", "tp=2", "dp_replicate=2"]),
        "tried": (tried, "tp=2"),
        "parity": (
            parities,
            {
                "dp_shard=2": {"build": Attentive},
                "dp_replicate=2": {"build": Attentive, "dtype": torch.float32},
                "tp=2": {"build": Attentive},
                "dp_shard=-1": {"build": with_shared_layer},
                "pp=2": {"build": language_model, **INTERLEAVED},
            },
            {"tp=2": {"build": rotary}, "pp=2": {"build": with_hidden_tie}},
        ),
    },
    3: {
        "tied": (tied, "pp=3"),
        "tried": (tried, "tp=3"),
        "weights": (equal_weights, ["dp_shard=3", "tp=3"]),
        "other model": (other_model,),
        "parity": (
            parities,
            {
                "dp_shard=3": {"build": Attentive, "zero": 2},
                "pp=3": {"build": with_one_layer_thrice},
            },
            {"tp=3": {"build": rotary}, "pp=3": {"build": with_hidden_tie}},
        ),
    },
    4: {
        "tied": (tied, "pp=2,dp_shard=2", "pp=4"),
        "tied, interleaved": (interleaved, "pp=2,dp_shard=2"),
        "sharded in two ways": (sharded_in_two_ways,),
        "weights": (equal_weights, ["dp_shard=2,tp=2", "dp_replicate=2,tp=2"]),
        "ties": (equal_ties, "pp=2,dp_shard=2", "cpu"),
        "tried": (tried, "dp_shard=2,tp=2"),
        "parity": (
            parities,
            {
                "dp_shard=2,tp=2": {"build": Attentive, "zero": 2},
                "pp=2,dp_shard=2": {"build": language_model, "num_microbatches": 4},
            },
            {"pp=2,dp_shard=2": {"build": with_hidden_tie}},
        ),
    },
}
