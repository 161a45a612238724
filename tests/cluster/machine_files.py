"""What a host of ``machines`` is, the script that makes it, and its files."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BRIDGE_SCRIPT = """
ip link add bridge type bridge mcast_snooping 0
ip link set bridge up
echo up
exec sleep infinity
"""

# Its standard input says when the link is there. The first process of a host must reap
# orphans: children of one that ignores SIGCHLD are reaped by the kernel.
HOST_SCRIPT = """
set -e
name=$1 folder=$2 address=$3 address6=$4 limit=$5
read -r _
hostname "$name"
ip link set lo up
ip address add "$address/24" dev eth0
ip address add "$address6/64" dev eth0 nodad
ip link set eth0 up
tc qdisc add dev eth0 root tbf $limit
mount -n --bind "$folder/hosts" /etc/hosts
mkdir "$folder/mount"
mount -n -t sysfs sysfs "$folder/mount"
mount -n --rbind /sys/fs/cgroup "$folder/mount/fs/cgroup"
mount -n --move "$folder/mount" /sys
while read -r private; do
    mount -n -t tmpfs -o mode=1777 tmpfs "$folder/mount"
    while read -r kept; do
        case $kept in "$private"/*)
            mkdir -p "$folder/mount${kept#"$private"}"
            mount -n --bind "$kept" "$folder/mount${kept#"$private"}"
        esac
    done <"$folder/kept"
    mount -n --move "$folder/mount" "$private"
done <"$folder/private"
rmdir "$folder/mount"
mkdir -m 755 /run/sshd
$(command -v sshd) -f "$folder/sshd_config" -E "$folder/sshd.log"
until test -s /run/sshd.pid; do sleep 0.01; done
echo up
exec env --ignore-signal=CHLD sleep infinity
"""

_SSHD = """
HostKey {folder}/host_key
AuthorizedKeysFile {keys}
PidFile /run/sshd.pid
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
MaxStartups 100
PrintMotd no
"""

_SSH = """
Host *
    IdentityFile {folder}/user_key
    IdentitiesOnly yes
    IdentityAgent none
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile none
    StrictHostKeyChecking yes
"""


@dataclass(slots=True)
class Machine:
    """One host.

    Attributes:
        name: What its own programs and the others call it: ``node1`` is the first.
        address: Its IPv4 address.
        address6: Its IPv6 address.
        folder: Its files: ``hosts`` (its ``/etc/hosts``, to be written to in place),
            ``sshd_config`` and ``sshd.log``. Every host sees it.
        init_pid: Its first process, as seen from outside.
    """

    name: str
    address: str
    address6: str
    folder: Path
    init_pid: int = 0


def write_files(
    folder: Path,
    hosts: Sequence[Machine],
    private: Sequence[Path],
    kept: Sequence[Path],
) -> None:
    """Write what the hosts and their users read.

    Args:
        folder: Where; ``ssh_config`` in it is for the users.
        hosts: All of them.
        private: See ``machines``; ``/dev/shm``, ``/tmp`` and ``/run`` always are.
        kept: What is seen although it is below a private folder.
    """
    _make_key(folder / "user_key")
    names = "".join(
        f"{host.address} {host.name}\n{host.address6} {host.name}\n" for host in hosts
    )
    always = (Path("/dev/shm"), Path("/tmp"), Path("/run"))  # noqa: S108
    known: list[str] = []
    for host in hosts:
        host.folder.mkdir()
        key = _make_key(host.folder / "host_key")
        known.append(f"{host.name},{host.address},{host.address6} {key}\n")
        written = {
            "hosts": f"127.0.0.1 localhost\n::1 localhost ip6-localhost\n{names}",
            "private": _lines((*always, *private)),
            "kept": _lines(kept),
            "sshd_config": _SSHD.format(
                folder=host.folder, keys=folder / "user_key.pub"
            ),
        }
        for name, text in written.items():
            (host.folder / name).write_text(text)
    (folder / "known_hosts").write_text("".join(known))
    (folder / "ssh_config").write_text(_SSH.format(folder=folder))


def _lines(paths: Sequence[Path]) -> str:
    return "".join(f"{path.resolve()}\n" for path in paths)


def _make_key(path: Path) -> str:
    """Make a key pair; return the public one."""
    words = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path))
    subprocess.run(words, check=True, capture_output=True)
    return path.with_suffix(".pub").read_text().strip()
