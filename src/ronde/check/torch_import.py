"""The probe that imports torch: it takes seconds, and a driver may hang in it."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from ronde.check.probing import FactReader
from ronde.launch.environments import own_environment

IMPORT_ERROR = "torch.import_error"  # fact: why torch cannot be imported, or empty
# Fact: the folder or file of a torch that PYTHONPATH puts before pip's, or empty.
SHADOWING = "torch.shadowing"


def read(reader: FactReader) -> None:
    before = filter(None, own_environment().get("PYTHONPATH", "").split(":"))
    spec = find_spec("torch")
    place = Path((spec and spec.origin) or "")
    place = place.parent if place.name == "__init__.py" else place
    is_before = place.parent in [Path(each).absolute() for each in before]
    reader.values[SHADOWING] = str(place) if is_before else ""
    error = find_error("torch")
    if not error and not (place / "version.py").exists():
        error = f"{place} is another package: it has no version.py"
    reader.values[IMPORT_ERROR] = error


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
