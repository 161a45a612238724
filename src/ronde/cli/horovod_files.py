"""What horovodrun's options name: files to read, and a script to run."""

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from ronde.errors import UsageError
from ronde.launch.hosts import Host, parse_discovered

_DISCOVERY_TIMEOUT_S = 60


def read_text(path: str, said_by: str) -> str:
    """Read a file.

    Args:
        path: Where it is.
        said_by: The option that names it.

    Raises:
        UsageError: It cannot be read.
    """
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{said_by} must be a file that can be read, got {path!r} ({error}). "
            "Check the path."
        ) from None


def discover(script: str, slots: str) -> tuple[Host, ...]:
    """Run a discovery script once and return the hosts that it prints.

    Args:
        script: A command line.
        slots: Of a host that it names without, a number.

    Raises:
        UsageError: The script fails, or prints something else.
    """
    if not slots.isdecimal() or not slots.isascii():
        raise UsageError(
            f"--slots-per-host must be a whole number, got {slots!r}. Correct it."
        )
    try:
        done = subprocess.run(  # noqa: S602  horovodrun takes a command line, too
            script,
            shell=True,
            stdout=subprocess.PIPE,
            text=True,
            timeout=_DISCOVERY_TIMEOUT_S,
            check=True,
        )
    except (subprocess.SubprocessError, UnicodeDecodeError) as error:
        raise UsageError(
            "--host-discovery-script must print hosts and end with 0, got "
            f"{script!r} ({error}). Run it by hand."
        ) from None
    return parse_discovered(done.stdout, int(slots), script)


def read_config(path: str, sections: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield section, key and value of a configuration file in YAML.

    A section that is no mapping has an empty key. true and false are 1 and 0.

    Args:
        path: The file.
        sections: Those that it may have.

    Raises:
        UsageError: It cannot be read, or PyYAML is missing.
    """
    text = read_text(path, "--config-file")
    try:
        import yaml
    except ModuleNotFoundError:
        raise UsageError(
            "--config-file must have PyYAML to be read, which is not installed. "
            "Type: pip install pyyaml"
        ) from None
    try:
        content: Any = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise UsageError(f"{path} must be YAML, but {error}. Correct it.") from None
    if not isinstance(content, dict) or not set(cast("Any", content)) <= set(sections):
        raise UsageError(
            f"{path} must have the sections {', '.join(sections)} and no others. "
            "Correct it."
        )
    for section, values in cast("dict[str, Any]", content).items():
        is_section = isinstance(values, dict)
        pairs = cast("dict[str, Any]", values if is_section else {"": values})
        for key, value in pairs.items():
            is_switch = isinstance(value, bool)
            yield section, str(key), str(int(value)) if is_switch else str(value)
