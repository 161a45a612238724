"""Where ``import horovod`` leads: to ronde's alias, or to Horovod itself."""

import os
from collections.abc import Iterable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path

ALIAS_DIRECTORY = Path(__file__).parents[1] / "horovod" / "alias"
_FORCED = "RONDE_HOROVOD_ALIAS"


def alias_environment(
    environ: Mapping[str, str], *, is_wanted: bool | None
) -> dict[str, str]:
    """Return the variables that let ranks import ronde as ``horovod``, or do not.

    Args:
        environ: What the ranks would have without them.
        is_wanted: False takes the alias off the path. True has it win over a Horovod
            that is installed for a rank's Python, None has it give way to that one.
    """
    path = environ.get("PYTHONPATH")
    before = path.split(os.pathsep) if path else []
    after = [entry for entry in before if entry != str(ALIAS_DIRECTORY)]
    if is_wanted is not False:
        after.insert(0, str(ALIAS_DIRECTORY))
    env = {_FORCED: "1"} if is_wanted else {}
    return env if before == after else env | {"PYTHONPATH": os.pathsep.join(after)}


def find_horovod(paths: Iterable[str]) -> Path | None:
    """Return the package that is Horovod itself, or None where these have none."""
    # The package in the alias directory looks in the same way, without ronde.
    place = ALIAS_DIRECTORY.parts[-3:]
    others = [entry for entry in paths if Path(entry).parts[-3:] != place]
    spec = PathFinder.find_spec("horovod", others)
    # A mere directory of that name, a namespace without a loader, is no Horovod.
    if spec is None or spec.loader is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def warn_of_horovod(environ: Mapping[str, str], paths: Iterable[str]) -> str:
    """Return a warning where ranks get Horovod itself rather than the alias, else "".

    Args:
        environ: The ranks' variables, after ``alias_environment``.
        paths: Where this Python finds modules; the ranks' may be another.
    """
    entries = environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(ALIAS_DIRECTORY) not in entries or environ.get(_FORCED) == "1":
        return ""
    found = find_horovod([*filter(None, entries), *paths])
    if found is None:
        return ""
    return (
        f"Horovod is installed beside ronde, in {found}, and is what the ranks import "
        "as horovod: --horovod-alias gives them ronde's, --no-horovod-alias ends this "
        "warning"
    )
