"""The probe that imports torch: it takes seconds, and a driver may hang in it."""

from importlib import import_module

from ronde.check.probing import FactReader

IMPORT_ERROR = "torch.import_error"  # fact: why torch cannot be imported, or empty


def read(reader: FactReader) -> None:
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
