"""Whether a host is a virtual machine."""

import re

from ronde.topology.kernel_files import read_text

_CPUINFO_BYTES = 8192
"""Of the first CPU; kernels there are that take milliseconds for each further one."""

_FIRMWARE = "sys/class/dmi/id"
_HYPERVISORS = re.compile(
    r"QEMU|KVM|VMware|Virtual Machine|Google Compute Engine|Amazon EC2|OpenStack|Xen"
)
_BARE = ".metal"
"""How the products of Amazon EC2 end that are whole machines."""


def read_is_virtual(root: str) -> bool:
    """Return whether this is a virtual machine; what is not told is taken to be none.

    x86 tells by a flag of its CPUs. Others do not, and there the firmware is asked for
    its maker's name.

    Args:
        root: Where ``proc`` and ``sys`` are; empty for this machine.
    """
    cpu = read_text(f"{root}/proc/cpuinfo", _CPUINFO_BYTES)
    flags = re.search(r"^flags\s*:(.*)", cpu, re.MULTILINE)
    if flags is not None:
        return "hypervisor" in flags[1].split()
    names = (f"{root}/{_FIRMWARE}/{name}" for name in ("sys_vendor", "product_name"))
    told = " ".join(map(read_text, names))
    return _HYPERVISORS.search(told) is not None and not told.endswith(_BARE)
