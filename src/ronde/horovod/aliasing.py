"""Lets ``import horovod.X`` give ronde's module: the same object, not a copy."""

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
    "common.elastic": "torch.elastic.state",
    "common.exceptions": "horovod.compatibility",
    "common.process_sets": "session",
    "common.util": "horovod.compatibility",
    "data.data_loader_base": "horovod.compatibility",
    "runner.common.util.config_parser": "cli.horovod_launch",
    "runner.common.util.env": "horovod.launcher",
    "runner.elastic.constants": "membership.policy",
    "runner.elastic.worker": "torch.elastic.state",
    "runner.launch": "cli.horovod_launch",
    "runner.runner": "horovod.launcher",
    "runner.util.threads": "horovod.launcher",
}
"""Horovod's modules, and which of ronde's have what is in them."""
_PACKAGES = {name.rpartition(".")[0] for name in _MODULES} | {"runner.common"}
_RUN = "run"
"""A function; until 0.19 the package that is ``horovod.runner`` now."""
_TO_COME = ("tensorflow", "keras")
_NOT_HERE = ("mxnet", "ray", "spark")


def install() -> None:
    """Make ``horovod``, which calls this, and all below it ronde's from now on."""
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
        # ``from horovod import torch`` asks for a part of the module that it was given.
        package, _, name = fullname.removeprefix("ronde.").partition(".")
        if package != "horovod" or not name:
            return None
        if name in _TO_COME + _NOT_HERE:
            how = "comes in a later version" if name in _TO_COME else "is no part"
            raise ModuleNotFoundError(
                f"horovod.{name} {how} of ronde: this version has horovod.torch.",
                name=f"horovod.{name}",
            )
        if name.startswith(f"{_RUN}."):
            name = f"runner{name.removeprefix(_RUN)}"
        loader, is_package = _loader(name)
        return loader and ModuleSpec(fullname, loader, is_package=is_package)


def _loader(name: str) -> tuple[Loader | None, bool]:
    """Return what loads one of Horovod's modules, and whether it is a package."""
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
        # Nothing is to be executed; but importlib has put the alias's spec in place of
        # the module's own, without which it could neither be reloaded nor pickled.
        module.__spec__ = self._spec or module.__spec__


def _find_run() -> ModuleType:
    """Make ``import horovod.run.runner`` work; ``horovod.run`` stays a function."""
    run = import_module("ronde.horovod").run
    run.run = run
    return cast("ModuleType", run)


def _find_package(name: str) -> ModuleType:
    """Make a package of Horovod's that has nothing but modules, and ``run``."""
    module = sys.modules.setdefault(f"horovod.{name}", ModuleType(f"horovod.{name}"))
    if name == "runner":
        module.__dict__["run"] = import_module("ronde.horovod").run
    return module
