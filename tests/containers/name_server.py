"""Name server of pods: ``name_server.py FOLDER``, as root in their network.

It answers for the names in ``FOLDER/*/names``, one line ``ADDRESS NAME NAME...`` each,
while the pod starts or runs; other names do not exist. It runs without ronde.
"""

import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path

EXISTS, IS_UNKNOWN = 0x8180, 0x8183
_A = 1


def addresses_of(folder: Path, name: str) -> list[str]:
    """Return the addresses of a name."""
    found: list[str] = []
    for path in sorted(folder.glob("*/names")):
        with suppress(FileNotFoundError):
            address, *names = path.read_text().split()
            if name in names and _is_alive(path.parent.name):
                found.append(address)
    return found


def _is_alive(pod: str) -> bool:
    pid = Path(f"/run/{pod}.pid")
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid.read_text()}/stat").exists()
    return True  # it starts


def answer(folder: Path, question: bytes) -> bytes:
    """Return the answer to one question about an address."""
    labels: list[str] = []
    at = 12
    while length := question[at]:
        labels.append(question[at + 1 : at + 1 + length].decode())
        at += 1 + length
    [kind] = struct.unpack_from(">H", question, at + 1)
    found = addresses_of(folder, ".".join(labels).lower())
    state = EXISTS if found else IS_UNKNOWN
    # The name is the question's; class 1; valid for 0 s; 4 bytes.
    records = [
        struct.pack(">HHHIH", 0xC00C, _A, 1, 0, 4) + socket.inet_aton(address)
        for address in found
        if kind == _A
    ]
    head = question[:2] + struct.pack(">HHHHH", state, 1, len(records), 0, 0)
    return head + question[12 : at + 5] + b"".join(records)


def main() -> None:
    folder = Path(sys.argv[1])
    server = socket.socket(type=socket.SOCK_DGRAM)
    server.bind(("0.0.0.0", 53))  # noqa: S104
    print("up", flush=True)  # noqa: T201
    while True:
        question, client = server.recvfrom(512)
        server.sendto(answer(folder, question), client)


if __name__ == "__main__":
    main()
