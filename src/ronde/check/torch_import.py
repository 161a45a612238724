"""The probe that imports torch: it takes seconds, and a driver may hang in it."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from ronde.check.probing import FactReader
from ronde.launch.environments import own_environment

IMPORT_ERROR = "torch.import_error"  # fact: why torch cannot be imported, or empty
# Fact: the folder of a torch that PYTHONPATH puts before what pip installs, or empty.
SHADOWING = "torch.shadowing"


def read(reader: FactReader) -> None:
    before = own_environment().get("PYTHONPATH", "").split(":")
    spec = find_spec("torch")
    folder = Path(spec.origin).parent if spec and spec.origin else None
    is_before = folder is not None and str(folder.parent) in before
    reader.values[SHADOWING] = str(folder) if is_before else ""
    reader.values[IMPORT_ERROR] = find_error("torch")


def find_error(name: str) -> str:
    """Import a package; return why it cannot be used, empty if it can."""
    try:
        package = import_module(name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - any of them is the answer
        first = f"{error}".strip().partition("\n")[0]
        return f"{type(error).__name__}: {first}"
    # Python takes any folder of this name for a package, also an empty one.
    if package.__file__ is None:
        return f"{next(iter(package.__path__))} has no __init__.py"
    return ""
