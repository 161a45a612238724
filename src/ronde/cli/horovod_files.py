"""The configuration file that horovodrun's options may stand in."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from ronde.cli.host_options import read_text
from ronde.errors import UsageError
from ronde.launch.directory import absolute_path
from ronde.launch.logs import attempt_dir
from ronde.launch.sink import Generation, Sink
from ronde.launch.through import Through


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


class LinkedOutputs(Through):
    """Has the ranks' files found where horovodrun puts them, too.

    That is ``DIR/rank.<r>/stdout`` and ``stderr``, with zeros before ``<r>``.

    Args:
        inner: Gets everything; writes the files below DIR.
        directory: DIR.
    """

    def __init__(self, inner: Sink, directory: str) -> None:
        super().__init__(inner)
        self._directory = absolute_path(directory)

    def begin(self, generation: Generation) -> None:
        """Link the files of a start of all ranks.

        Raises:
            UsageError: DIR cannot be written.
        """
        super().begin(generation)
        logs = Path(attempt_dir(str(self._directory), generation))
        width = len(str(len(generation.hosts) - 1))
        try:
            for rank in range(len(generation.hosts)):
                directory = self._directory / f"rank.{rank:0{width}}"
                directory.mkdir(parents=True, exist_ok=True)
                for stream in ("stdout", "stderr"):
                    (directory / stream).unlink(missing_ok=True)
                    target = logs / str(rank) / f"{stream}.log"
                    (directory / stream).symlink_to(target)
        except OSError as error:
            raise UsageError(
                "--output-filename must be a directory that can be written, got "
                f"{str(self._directory)!r} ({error.strerror}). Create it or name "
                "another."
            ) from None
