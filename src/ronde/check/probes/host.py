"""What of a host, apart from its GPUs and its network, decides how training runs."""

from ronde.check.facts import Reading
from ronde.check.probes.host_activity import Activity
from ronde.check.probes.host_control_groups import read_control_groups
from ronde.check.probes.host_kernel import read_kernel
from ronde.check.probes.host_limits import read_limits
from ronde.check.probes.host_shared_memory import read_shared_memory
from ronde.check.probes.host_tracing import read_tracing


def read(reading: Reading) -> None:
    """Take down the facts ``host.*``."""
    root = str(reading.settings.get("root", "/")).rstrip("/")
    activity = Activity(root)
    read_limits(reading, root)
    read_shared_memory(reading, root)
    read_control_groups(reading, root)
    read_kernel(reading, root)
    read_tracing(reading, root)
    activity.read(reading)
