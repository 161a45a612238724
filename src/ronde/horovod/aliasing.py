"""Lets ``import horovod.X`` give ronde's module: the same object, not a copy."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import cast

_ALIAS = "horovod"
_HOME = "ronde.horovod"
_RUN = "horovod.run"
"""A function; until 0.19 the package that is ``horovod.runner`` now."""
_ELSEWHERE = {"horovod.torch": "ronde.torch", _RUN: "ronde.horovod.runner"}
"""Horovod's modules that are not where they are below ``ronde.horovod``."""
_TO_COME = ("horovod.tensorflow", "horovod.keras")
_NOT_HERE = ("horovod.mxnet", "horovod.ray", "horovod.spark")


def install() -> None:
    """Make ``horovod`` and all below it ronde's, in this process, from now on.

    Meant for the package ``horovod`` itself, which this replaces while it is imported.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    sys.modules[_ALIAS] = import_module(_HOME)


def _own_name(name: str) -> str:
    """Return the name of ronde's module for one of Horovod's."""
    for theirs, own in _ELSEWHERE.items():
        if name == theirs or name.startswith(f"{theirs}."):
            return own + name.removeprefix(theirs)
    return _HOME + name.removeprefix(_ALIAS)


class _Finder(MetaPathFinder):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        del path, target
        # ``from horovod import torch`` asks for a part of the module that it was given.
        name = fullname.removeprefix("ronde.")
        if name in _TO_COME + _NOT_HERE:
            how = "comes in a later version" if name in _TO_COME else "is no part"
            raise ModuleNotFoundError(
                f"{name} {how} of ronde: this version has horovod.torch.", name=name
            )
        if name == _RUN:
            return ModuleSpec(name, _RunLoader(), is_package=True)
        own = _own_name(name)
        if not name.startswith(f"{_ALIAS}.") or own == fullname:
            return None
        try:
            spec = find_spec(own)
        except ModuleNotFoundError as error:
            if not own.startswith(f"{error.name}."):
                raise
            return None  # its parent is a module, or is not there itself
        if spec is None:
            return None
        is_package = spec.submodule_search_locations is not None
        return ModuleSpec(fullname, _Loader(own), is_package=is_package)


class _Loader(Loader):
    def __init__(self, own: str) -> None:
        self._own = own
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        del spec
        module = import_module(self._own)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # Nothing is to be executed; but importlib has put the alias's spec in place of
        # the module's own, without which it could neither be reloaded nor pickled.
        module.__spec__ = self._spec


class _RunLoader(Loader):
    """Makes ``import horovod.run.runner`` work; ``horovod.run`` stays a function."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        del spec
        run = import_module(_HOME).run
        run.run = run
        return cast("ModuleType", run)

    def exec_module(self, module: ModuleType) -> None:
        """Execute nothing."""
