"""Device meshes and sharded models from a layout, as torch's own objects."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import distributed as dist, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from ronde.errors import UsageError
from ronde.parallel.layout import Layout
from ronde.torch.parallel.equal_weights import make_equal
from ronde.torch.parallel.tensor_plans import tensor_parallel_plan
from ronde.torch.parallel.trials import require_same_results
from ronde.world import read_rank_info

_DATA = ("dp_replicate", "dp_shard")


def init_mesh(
    layout: Layout,
    device_type: str | None = None,
    *,
    allow_tp_over_hosts: bool = False,
) -> DeviceMesh:
    """Return the mesh of a layout; collective.

    Its axes are ``dp_shard`` and the other axes of the layout with more than one rank.
    If there is no process group, one with backend "ronde" is made.

    Args:
        layout: The layout; a size of -1 means all remaining ranks.
        device_type: "cuda" or "cpu", by default "cuda" if it is available.
        allow_tp_over_hosts: Allow tp groups that span hosts, which costs four messages
            over the network per layer.

    Raises:
        UsageError: The layout does not fit the number of ranks, or of ranks per host.
    """
    if not dist.is_initialized():
        dist.init_process_group("ronde")
    layout = layout.resolve(dist.get_world_size())
    ranks = read_rank_info()
    is_known = ranks.size == layout.num_ranks
    if is_known and ranks.local_size % layout.tp and not allow_tp_over_hosts:
        raise UsageError(
            f"tp must divide the number of ranks per host, {ranks.local_size}, got "
            f"tp={layout.tp}. Choose another tp, or pass allow_tp_over_hosts=True to "
            "let tp's groups span hosts."
        )
    sizes = {a: n for a, n in layout.sizes.items() if n > 1 or a == "dp_shard"}
    return init_device_mesh(
        device_type or find_device_type(),
        tuple(sizes.values()),
        mesh_dim_names=tuple(sizes),
    )


def find_device_type() -> str:
    """Return "cuda" if it is available, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    zero: int = 3,
    units: Sequence[type[nn.Module]] | None = None,
    plan: Mapping[str, ParallelStyle] | None = None,
    precision: MixedPrecisionPolicy | None = None,
) -> nn.Module:
    """Shard a model in place, over tp and then over dp; return it. Collective.

    All ranks get the weights and buffers of the mesh's first rank, as with DDP. With
    tp, one block of each kind is run both whole and divided, on a tiny input, and the
    results are compared. Make a plain torch optimizer from ``model.parameters()``
    afterwards.

    Args:
        model: A model on the mesh's device.
        mesh: A mesh from ``init_mesh``, or one with the same names.
        zero: 3 frees gathered weights after each pass; 2 keeps them from the forward to
            the backward pass.
        units: The classes of modules to gather as a whole, by default those of
            ``find_units``.
        plan: The plan of ``parallelize_module`` for tp, by default that of
            ``tensor_parallel_plan``.
        precision: The dtypes of gathered weights and reduced gradients.

    Raises:
        UsageError: An axis is not supported, there is no plan for tp, a block divided
            over tp gives different results, or models differ between ranks.
    """
    names = mesh.mesh_dim_names or ()
    if zero not in (2, 3):
        raise UsageError(
            f"zero must be 2 or 3, got {zero}. For 1, use "
            "ronde.torch.DistributedOptimizer(zero=1) with the bare model."
        )
    for axis, cure in (
        ("pp", "Use pipeline()."),
        ("cp", "Use torch.distributed.tensor.experimental.context_parallel."),
    ):
        if axis in names and mesh[axis].size() > 1:
            size = mesh[axis].size()
            raise UsageError(f"parallelize() does not support {axis}={size}. {cure}")
    found = find_units(model, units)
    groups = _by_dtype([*found, model])
    make_equal(model, mesh)
    if "tp" in names and mesh["tp"].size() > 1:
        tp_plan = plan or tensor_parallel_plan(model, mesh["tp"].size())
        require_same_results(model, mesh["tp"], tp_plan)
        parallelize_module(model, mesh["tp"], dict(tp_plan))
    elif plan is not None:
        raise UsageError("plan cannot be used without tp. Choose a layout with tp.")
    data = tuple(name for name in _DATA if name in names)
    if not data or (mesh[data].size() == 1 and precision is None):
        return model
    options: dict[str, Any] = {
        "mesh": mesh[data],
        "reshard_after_forward": zero == 3,
        "mp_policy": precision or MixedPrecisionPolicy(),
    }
    for group in groups:
        fully_shard(group, **options)
    _use_group_memory(model, mesh[data])
    return model


def find_units(
    model: nn.Module, classes: Sequence[type[nn.Module]] | None = None
) -> list[nn.Module]:
    """Return the modules to gather one by one, inner ones first.

    Without classes these are repeated blocks: the members of each ``ModuleList`` or
    ``Sequential`` that has at least two of one class with parameters, unless they are
    inside another block or share parameters with modules outside.

    Raises:
        UsageError: The model has no module of these classes, or they share parameters.
    """
    if classes is None:
        units: list[nn.Module] = []
        _find_repeated(model, units)
        shared = {owner for owners in _shared(model, units) for owner in owners}
        return [unit for unit in units if unit not in shared]
    found = [m for m in model.modules() if isinstance(m, tuple(classes))]
    if not found:
        names = ", ".join(each.__name__ for each in classes)
        raise UsageError(
            f"{type(model).__name__} has no module of the classes in units: {names}."
        )
    units = [module for module in reversed(found) if module is not model]
    for owners in _shared(model, units):
        first, second, *_ = owners.values()
        raise UsageError(
            f"units must not share parameters, but {first} and {second} are the same "
            "parameter. Choose classes of modules that contain both."
        )
    return units


def _shared(model: nn.Module, units: Sequence[nn.Module]) -> list[dict[nn.Module, str]]:
    """Return the names of each shared parameter, by the units or model that contain it.

    FSDP2 can gather a parameter with only one unit.
    """
    plain: Any = model
    modules: dict[str, nn.Module] = dict(plain.named_modules(remove_duplicate=False))
    owners: dict[nn.Parameter, dict[nn.Module, str]] = {}
    for name, parameter in plain.named_parameters(remove_duplicate=False):
        path = name.rpartition(".")[0]
        while path and modules[path] not in units:
            path = path.rpartition(".")[0]
        owners.setdefault(parameter, {}).setdefault(modules[path], name)
    return [found for found in owners.values() if len(found) > 1]


def _find_repeated(module: nn.Module, units: list[nn.Module]) -> None:
    children = list(module.children())
    repeated: set[type[nn.Module]] = set()
    if isinstance(module, nn.ModuleList | nn.Sequential):
        owners = [type(c) for c in children if any(True for _ in c.parameters())]
        repeated = {cls for cls, number in Counter(owners).items() if number > 1}
    for child in children:
        if type(child) in repeated:
            units.append(child)
        else:
            _find_repeated(child, units)


def _by_dtype(units: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Return the groups to shard: units, each after its modules of another dtype.

    FSDP2 supports one dtype per group, and detects a mix only in the first forward.
    """
    seen: set[nn.Parameter] = set()
    groups: list[list[nn.Module]] = []
    for unit in units:
        numels = Counter[torch.dtype]()
        owners: dict[torch.dtype, list[nn.Module]] = {}
        for module in unit.modules():
            own = [p for p in module.parameters(recurse=False) if p not in seen]
            seen.update(own)
            trained = [parameter for parameter in own if parameter.requires_grad]
            dtypes = {parameter.dtype for parameter in trained}
            if len(dtypes) > 1:
                raise UsageError(
                    "parameters of a module must have one dtype, got "
                    f"{', '.join(sorted(map(str, dtypes)))} in "
                    f"{type(module).__name__}. Put parameters of another dtype into a "
                    "separate module."
                )
            for parameter in trained:
                # A unit has the dtype of its direct parameters, else the most frequent.
                numels[parameter.dtype] += parameter.numel() << 64 * (module is unit)
            for dtype in dtypes:
                owners.setdefault(dtype, []).append(module)
        for dtype, _ in numels.most_common()[1:]:
            groups.append(owners[dtype])
        groups.append([unit])
    return groups


def _use_group_memory(model: nn.Module, mesh: DeviceMesh) -> None:
    """Allocate FSDP2's buffers in the group's shared memory, if it has any."""
    group = mesh.get_group(mesh.ndim - 1)
    device = torch.device(mesh.device_type)
    backend = group._get_backend(device)  # noqa: SLF001  as FSDP2 itself asks
    if device.type != "cpu" or not backend.supports_tensor_alloc(device):
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_allocate_memory_from_process_group_for_comm(True)
