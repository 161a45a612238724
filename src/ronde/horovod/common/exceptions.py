"""Horovod's exceptions."""

from ronde.errors import CollectiveError as HorovodInternalError
from ronde.torch.elastic.updates import HostsUpdatedInterrupt

__all__ = [
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "get_version_mismatch_message",
]


class HorovodVersionMismatchError(ImportError):
    """A framework is not the one that Horovod was built with: never so with ronde.

    Attributes:
        name: The framework.
        version: The one that runs.
        installed_version: The one that was built with.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version


def get_version_mismatch_message(
    name: str, version: str, installed_version: str
) -> str:
    """Say that a framework's version is not the one that was built with.

    Args:
        name: The framework.
        version: The one that runs.
        installed_version: The one that was built with.
    """
    return (
        f"{name} must be the version that was built with, {installed_version}, got "
        f"{version}. Install that one, or build anew."
    )
