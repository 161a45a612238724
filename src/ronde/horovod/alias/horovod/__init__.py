"""Stands in for Horovod where it is not installed; ``ronde run`` puts it on the path.

A directory above this one comes first on the ranks' ``PYTHONPATH``. Where a Horovod is
installed for the Python that imports this, it is the one that is imported.
"""

import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path

_PLACE = ("ronde", "horovod", "alias")


def _find_installed() -> ModuleSpec | None:
    # Another ronde's stand-in, of a launcher around this one, is none either.
    others = [entry for entry in sys.path if Path(entry).parts[-3:] != _PLACE]
    spec = PathFinder.find_spec("horovod", others)
    # A mere directory of that name, a namespace without a loader, is no Horovod.
    return spec if spec is not None and spec.loader is not None else None


def _give_way(spec: ModuleSpec) -> None:
    module = module_from_spec(spec)
    sys.modules["horovod"] = module
    if spec.loader is not None:
        spec.loader.exec_module(module)


def _stand_in() -> None:
    try:
        from ronde.horovod.aliasing import install
    except ModuleNotFoundError as error:
        if error.name not in ("ronde", "ronde.horovod"):
            raise
        raise ModuleNotFoundError(
            f"horovod is ronde's here, and ronde must be installed for the Python that "
            f"imports it, {sys.executable}. Type: {sys.executable} -m pip install "
            "ronde, or ronde run --no-horovod-alias.",
            name="horovod",
        ) from None
    install()


if (_installed := _find_installed()) is not None:
    _give_way(_installed)
else:
    _stand_in()
