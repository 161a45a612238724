"""Import hook that makes ``import horovod.X`` return ronde's own module object."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import cast

_MODULES = {
    "torch.compression": "data_parallel.compression",
    "common.elastic": "session.elastic",
    "common.exceptions": "horovod.compatibility",
    "common.process_sets": "session",
    "common.util": "horovod.compatibility",
    "data.data_loader_base": "horovod.compatibility",
    "runner.common.util.config_parser": "cli.horovod_launch",
    "runner.common.util.env": "horovod.launcher",
    "runner.elastic.constants": "membership.policy",
    "runner.elastic.worker": "session.elastic",
    "runner.launch": "cli.horovod_launch",
    "runner.runner": "horovod.launcher",
    "runner.util.threads": "horovod.launcher",
}
"""Horovod's modules, and the module of ronde that replaces each."""
_PACKAGES = {name.rpartition(".")[0] for name in _MODULES} | {"runner.common"}
_RUN = "run"
"""A function in Horovod; up to version 0.19 also the package ``horovod.runner``."""
_TO_COME = ("tensorflow", "keras")
_NOT_HERE = ("mxnet", "ray", "spark")


def install() -> None:
    """Replace the calling package ``horovod`` and its modules with ronde's."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    sys.modules["horovod"] = import_module("ronde.horovod")


class _Finder(MetaPathFinder):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        del path, target
        # ``from horovod import torch`` looks for a submodule of ``ronde.horovod``.
        package, _, name = fullname.removeprefix("ronde.").partition(".")
        if package != "horovod" or not name:
            return None
        if name in _TO_COME + _NOT_HERE:
            later = " yet" if name in _TO_COME else ""
            raise ModuleNotFoundError(
                f"ronde does not support horovod.{name}{later}, only horovod.torch.",
                name=f"horovod.{name}",
            )
        if name.startswith(f"{_RUN}."):
            name = f"runner{name.removeprefix(_RUN)}"
        loader, is_package = _loader(name)
        return loader and ModuleSpec(fullname, loader, is_package=is_package)


def _loader(name: str) -> tuple[Loader | None, bool]:
    """Return a loader for one of Horovod's modules, and True if it is a package."""
    if name == _RUN:
        return _Loader(_find_run), True
    if name in _MODULES:
        return _Loader(partial(import_module, f"ronde.{_MODULES[name]}")), False
    if name.partition(".")[0] != "torch":
        is_known = name in _PACKAGES
        return _Loader(partial(_find_package, name)) if is_known else None, True
    own = find_spec(f"ronde.{name}")
    is_package = own is not None and own.submodule_search_locations is not None
    return own and _Loader(partial(import_module, own.name)), is_package


class _Loader(Loader):
    def __init__(self, find: Callable[[], ModuleType]) -> None:
        self._find = find
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        del spec
        module = self._find()
        self._spec = getattr(module, "__spec__", None)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The module is loaded already, but importlib has replaced its spec with the
        # alias's. With that it could neither be reloaded nor pickled.
        module.__spec__ = self._spec or module.__spec__


def _find_run() -> ModuleType:
    """Make ``import horovod.run.runner`` work, though ``horovod.run`` is a function."""
    run = import_module("ronde.horovod").run
    run.run = run
    return cast("ModuleType", run)


def _find_package(name: str) -> ModuleType:
    """Create an empty package of Horovod's; ``horovod.runner`` gets ``run``."""
    module = sys.modules.setdefault(f"horovod.{name}", ModuleType(f"horovod.{name}"))
    if name == "runner":
        module.__dict__["run"] = import_module("ronde.horovod").run
    return module
