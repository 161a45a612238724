"""Recognise files without a topology, to suggest the right command for them."""

import re

from ronde.topology.nccl_log import is_nccl_log
from ronde.topology.probes.base import Saved, first_lines
from ronde.topology.probes.rdma_text import is_rdma_text
from ronde.topology.probes.smi_query import is_query

_STAMP = r"\[ *\d+\.\d{6}\]|\[\w{3} \w{3} +\d+ [\d:]{8} \d{4}\]|\[\w{3}\d+ [\d:]{5}\]"
KERNEL_LINE = re.compile(
    # The tag of a launcher; dmesg -x or -r.
    r"(?:[\w.-]+: )?(?:[a-z]+ *:[a-z]+ *: |<\d+>)?"
    rf"(?:(?P<at>{_STAMP}|\d{{4}}-\d\d-\d\dT[\d:]{{8}},\d{{6}}[+-]\d\d:?\d\d) "
    r"|(?P<date>\w{3} +\d+ [\d:]{8}|\d{4}-\d\d-\d\d[T ]\S+) \S+ kernel: "
    r"|\d+,\d+,\d+,[^; ]*;"
    # Without a stamp: journalctl -o cat, and further lines of one message.
    r"|\s*kernel: |\s*(?=NVRM: |(?:mlx5_core|amdgpu|nvidia) [\da-f:.]{12}[ :]))"
    r"(?P<text>.*)"
)
"""A line of the kernel's log as dmesg, the journal or syslog has it."""

LOG, KERNEL_LOG = "a log of NCCL or torch", "a kernel log"
_CHECK = "Type: ronde check read {file}"
_GIVE = "Give it the output of: "
_CURES = {
    LOG: "Type: ronde topo log {file}",
    KERNEL_LOG: _CHECK,
    "output of nccl-tests": "Type: ronde bench read {file}",
    "a graph of NCCL's search": "Give it the file of NCCL_TOPO_DUMP_FILE.",
    "Slurm's topology.yaml": f"{_GIVE}scontrol show topology",
    "lstopo's drawing": "Write it as XML: lstopo topo.xml",
    "an AMD table without links": f"{_GIVE}amd-smi topology",
    "AMD's JSON output": f"{_GIVE}amd-smi topology",
    "a Python traceback": "The program that wrote it has failed: run it again.",
    "packed": "Unpack it first.",
    "an archive": "Unpack it first.",
}
_FORMS = rf"""
output of nccl-tests: # +size +count|# nThread \d|# Out of bounds values
{KERNEL_LOG}: {KERNEL_LINE.pattern}
Slurm's topology.yaml: [ \t]*- +topology:
a graph of NCCL's search: <graphs\b
output of numactl -H: available: \d+ nodes|node distances:
output of lscpu: Architecture: {{3,}}\S+$|NUMA node0 CPU\(s\):
output of ip: \d+: [\w.@-]+: <[A-Z_,-]+> mtu \d+
nvidia-smi's table: \| NVIDIA-SMI \d
an AMD table without links: \| AMD-SMI \d|=+ ROCm System Management
AMD's JSON output: \s*"link_type": |.*"\(Topology\)
lstopo's drawing: Machine \(\d+\S+ total
a Python traceback: Traceback \(most recent call last\)
an archive: PK\x03\x04|.{{257}}ustar
packed: BZh\d1AY|\xfd7zXZ|\x28\xb5\x2f\xfd
"""
"""The kind of a file, and a pattern for the beginning of one of its lines."""


def recognise_other(saved: Saved) -> tuple[str, str]:
    """Return the kind of a file without a topology, and a remedy; two "" if unknown."""
    # The kernel's stamps look like tags of launchers, so whole lines count as well.
    start = saved.data[:512].decode("latin-1")
    head = saved.text[: 1 << 16]
    if is_nccl_log(head):
        return LOG, _CURES[LOG].format(file=saved.name)
    for name, is_one in (("nvidia-smi -q", is_query), ("ibstat", is_rdma_text)):
        if is_one(saved):
            return f"output of {name}", _CHECK.format(file=saved.name)
    lines = [start, *head.splitlines(), *first_lines(head)]
    for row in _FORMS.strip().splitlines():
        name, _, pattern = row.partition(": ")
        if any(map(re.compile(pattern, re.DOTALL).match, lines)):
            cure = _CURES.get(name, f"{_GIVE}nvidia-smi topo -m")
            return name, cure.format(file=saved.name)
    return "", ""
