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
    "common.basics": "horovod.compatibility",
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
_FRONT_ENDS = ("torch", "tensorflow", "keras")
"""Packages whose modules have Horovod's names."""
_IN_PACKAGE = (
    "functions",
    "gradient_aggregation",
    "gradient_aggregation_eager",
    "util",
)
"""Modules of a front end whose names the package has, unless it has the module."""
_RUN = "run"
"""A function in Horovod; up to version 0.19 also the package ``horovod.runner``."""
_NOT_HERE = ("mxnet", "ray", "spark", "_keras")


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
        if name in _NOT_HERE:
            raise ModuleNotFoundError(
                f"ronde does not support horovod.{name}, only horovod.torch, "
                "horovod.tensorflow, horovod.tensorflow.keras and horovod.keras.",
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
    front_end = name.partition(".")[0]
    if front_end not in _FRONT_ENDS:
        is_known = name in _PACKAGES
        return _Loader(partial(_find_package, name)) if is_known else None, True
    own = find_spec(f"ronde.{name}")
    package, _, module = name.rpartition(".")
    if own is None and module in _IN_PACKAGE:
        return _Loader(partial(import_module, f"ronde.{package}")), False
    is_package = own is not None and own.submodule_search_locations is not None
    return own and _Loader(partial(_find_own, front_end, own.name)), is_package


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


def _find_own(framework: str, name: str) -> ModuleType:
    """Import a module of a front end, or raise an error that names its framework."""
    if framework != "torch":
        frameworks = import_module("ronde.session.frameworks")
        frameworks.import_framework(framework)
    return import_module(name)


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
