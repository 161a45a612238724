"""The probe that imports torch, which takes seconds and may hang in a driver."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from ronde.check.probing import FactReader
from ronde.launch.environments import own_environment

IMPORT_ERROR = "torch.import_error"  # fact: the error of the import, or empty
# Fact: a folder or file torch that PYTHONPATH puts before the installed one, or "".
SHADOWING = "torch.shadowing"


def read(reader: FactReader) -> None:
    before = filter(None, own_environment().get("PYTHONPATH", "").split(":"))
    spec = find_spec("torch")
    path = Path((spec and spec.origin) or "")
    path = path.parent if path.name == "__init__.py" else path
    is_before = path.parent in [Path(each).absolute() for each in before]
    reader.values[SHADOWING] = str(path) if is_before else ""
    error = find_error("torch")
    if not error and not (path / "version.py").exists():
        error = f"{path} is another package: it has no version.py"
    reader.values[IMPORT_ERROR] = error


def find_error(name: str) -> str:
    """Import a package, and return the error message, or ""."""
    try:
        package = import_module(name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - any of them is the answer
        first = f"{error}".strip().partition("\n")[0]
        return f"{type(error).__name__}: {first}"
    # Python imports any folder of this name as a package, even an empty one.
    if package.__file__ is None:
        return f"{next(iter(package.__path__))} has no __init__.py"
    return ""
