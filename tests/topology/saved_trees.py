"""Trees of /proc and /sys: of real machines, saved, and small ones written here."""

import re
import tarfile
from pathlib import Path

SNAPSHOTS = Path(__file__).parent / "samples" / "sysfs_snapshots"
NAMES = sorted(
    path.name.removeprefix("hwloc_").removesuffix(".tar.bz2")
    for path in SNAPSHOTS.glob("*.tar.bz2")
)

# All that is looked at: a snapshot has thousands of files more, which take seconds.
_READ = re.compile(
    r"sys/devices/system/cpu/(online|cpu\d+/topology/thread_siblings)"
    r"|sys/devices/system/node/(online|possible|node\d+/(cpumap|distance|meminfo))"
    r"|sys/devices/pci[^/]*(/[0-9a-f:.]+)+/"
    r"(class|vendor|device|subsystem_(vendor|device)|numa_node|local_cpu.*|.*_link_.*)"
    r"|sys/devices/pci.*/((carrier|type|speed)|ports/\d+/[a-z_]+)"
    r"|sys/(class/(net|infiniband)|bus/pci/devices)/.*"
    r"|sys/fs/cgroup/cpuset/.*cpuset\.(cpus|effective_cpus)"
    r"|proc/(cpuinfo|meminfo|self/(status|cgroup)|driver/nvidia/gpus/.*)"
)


def unpack(name: str, directory: Path) -> Path:
    """Unpack what is read of a saved machine, and return where its root is."""

    def is_read(member: tarfile.TarInfo) -> bool:
        return _READ.fullmatch(member.name.partition("/")[2]) is not None

    with tarfile.open(SNAPSHOTS / f"hwloc_{name}.tar.bz2") as archive:
        archive.extractall(directory, filter(is_read, archive), filter="tar")
    (tree,) = directory.iterdir()
    return tree


class Tree:
    """A root directory, written file by file."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str = "") -> "Tree":
        """Write a file and the directories above it."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return self

    def link(self, path: str, target: str) -> "Tree":
        """Make a link to a directory that is told from the root, and that directory."""
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        (self.root / target).mkdir(parents=True, exist_ok=True)
        link.symlink_to("../" * path.count("/") + target)
        return self

    def cpus(self, online: str) -> "Tree":
        """Let these CPUs be online, each a core of its own."""
        return self.write("sys/devices/system/cpu/online", online)

    def node(self, number: int, mask: str) -> "Tree":
        """Write a NUMA node."""
        own = f"sys/devices/system/node/node{number}"
        return self.write(f"{own}/cpumap", mask)

    def device(self, place: str, **files: str) -> "Tree":
        """Write a device at its place on the bus: bridges and itself, by slashes."""
        address = place.rpartition("/")[2]
        self.link(f"sys/bus/pci/devices/{address}", f"sys/devices/{place}")
        for name, text in files.items():
            self.write(f"sys/devices/{place}/{name.lstrip('_')}", f"{text}\n")
        return self
