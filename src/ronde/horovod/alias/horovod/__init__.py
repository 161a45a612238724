"""A replacement for Horovod, used if Horovod is not installed.

``ronde run`` puts the parent directory first on the ranks' ``PYTHONPATH``, and ``ronde
alias --install`` puts it into a .pth file. An installed Horovod is imported instead,
unless ``RONDE_HOROVOD_ALIAS`` is 1.
"""

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path

_TAIL = ("ronde", "horovod", "alias")


def _find_installed() -> ModuleSpec | None:
    # An outer launcher may have put another ronde's replacement on the path.
    others = [entry for entry in sys.path if Path(entry).parts[-3:] != _TAIL]
    spec = PathFinder.find_spec("horovod", others)
    # A plain directory of that name is a namespace package, without a loader.
    return spec if spec is not None and spec.loader is not None else None


def _use_installed(spec: ModuleSpec) -> None:
    module = module_from_spec(spec)
    sys.modules["horovod"] = module
    if spec.loader is not None:
        spec.loader.exec_module(module)


def _use_ronde() -> None:
    try:
        from ronde.horovod.aliasing import install
    except ModuleNotFoundError as error:
        if error.name not in ("ronde", "ronde.horovod"):
            raise
        raise ModuleNotFoundError(
            "horovod is an alias of ronde here, but ronde is not installed for "
            f"{sys.executable}. Type: {sys.executable} -m pip install ronde, or run "
            "without the alias: ronde run --no-horovod-alias",
            name="horovod",
        ) from None
    install()


# Read directly, as this Python may have no ronde.
_is_forced = os.environ.get("RONDE_HOROVOD_ALIAS") == "1"  # noqa: TID251
if _is_forced or (_installed := _find_installed()) is None:
    _use_ronde()
else:
    _use_installed(_installed)
