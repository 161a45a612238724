"""A process of another user that tries to get into a job, or to end it.

``python -c SOURCE '[STAGE, [[ADDRESS, PORT]...], [[ADDRESS, PORT]...]]'`` writes a line
``{"ready": ...}`` once it has tried all there is to try, with what it has gained, and
then goes on to hold what it holds until its standard input ends: then a last line with
what it gained meanwhile. The standard library alone: other users see no more than that.

Stages: ``before`` takes the first ports and poses there, and takes names of
directories; all stages read files and speak to sockets, and crowd the second ports.
"""

# It tries all places, by the plainest means.
# ruff: noqa: C901, PTH102, PTH116, PTH123, PTH208, S108, SIM105

import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import time

GREETING = b"ronde store 2\r\n\0" + b"n" * 32
TORCH_HELLO = b"\0" + struct.pack("=I", 0x3C85F7CE) + b"\x07"
"""What torch's store takes for a client that asks how many keys there are."""
CHECK = b"\0\0\0\x06\x04\0\0\0\x01k"
CROWD = 300

gained = []
held = []


def processes():
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid != os.getuid():
                    yield int(name)
            except OSError:
                pass


def read_secrets():
    """Open whatever other users' processes have open, or were told."""
    for pid in processes():
        for what in ("environ", "mem", "maps"):
            try:
                with open(f"/proc/{pid}/{what}", "rb") as file:
                    if what != "mem":
                        file.read(1) and gained.append(f"read {what} of {pid}")
            except OSError:
                pass
        try:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                os.close(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR))
                gained.append(f"opened descriptor {fd} of {pid}")
        except OSError:
            pass
        try:
            os.kill(pid, 0)
            gained.append(f"may signal {pid}")
        except OSError:
            pass
    for folder in ("/tmp", "/dev/shm", "/root", "/run"):
        for name in names_in(folder):
            path = f"{folder}/{name}"
            if name.startswith(("ronde-", "ronde_", ".config")) and not is_own(path):
                gained.extend(f"listed {path}/{each}" for each in names_in(path))


def names_in(folder):
    try:
        return os.listdir(folder)
    except OSError:
        return []


def is_own(path):
    return os.lstat(path).st_uid == os.getuid()


def speak_to_unix_sockets():
    with open("/proc/net/unix") as file:
        paths = {line.split()[7] for line in file if len(line.split()) > 7}
    for path in sorted(p for p in paths if "ronde" in p):
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(path.replace("@", "\0", 1))
            sock.sendall(CHECK)
            if select.select([sock], [], [], 1.0)[0] and sock.recv(100):
                gained.append(f"was answered at {path}")
        except OSError:
            pass
        finally:
            sock.close()


def speak_to_ports(places):
    """Speak to all at once."""
    threads = [threading.Thread(target=speak_to_port, args=(p,)) for p in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def speak_to_port(place):
    """Ask as torch's clients do, say rubbish, and come in great number."""
    for words in (TORCH_HELLO, CHECK, b"\xff" * 200):
        try:
            with socket.create_connection(place, 1.0) as sock:
                sock.sendall(words)
                said = sock.recv(100)
                if words == TORCH_HELLO and len(said) == 8:
                    gained.append(f"torch's store at {place} obeyed")
        except OSError:
            pass
    for number in range(CROWD):
        try:
            sock = socket.create_connection(place, 1.0)
            if number % 2:
                sock.sendall(b"\xff" * 7)
            held.append(sock)
        except OSError:
            break


def pose(address, port):
    """Answer as rank 0 might, with whatever the caller seems to expect."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(128)
    except OSError:
        return
    store = socket.create_server((address, 0))
    held.extend((listener, store))

    def serve():
        while True:
            sock, _ = listener.accept()
            held.append(sock)
            say(visited=port)
            threading.Thread(target=answer, args=(sock,), daemon=True).start()

    def answer(sock):
        if select.select([sock], [], [], 0.2)[0]:
            if sock.recv(1000).endswith(b"\n"):  # it shows a token, and asks for a port
                sock.sendall(b"%d\n" % store.getsockname()[1])
                store.accept()
                gained.append("a rank came to a store that was not its own")
            return
        sock.sendall(GREETING)
        sock.recv(10000)
        sock.sendall(b"\0\0\0\x25\0\0\0\0\x20" + b"p" * 32)
        if sock.recv(100):
            gained.append("a rank obeyed who posed as rank 0")

    threading.Thread(target=serve, daemon=True).start()


def take_names(user):
    """Take the directories that ranks of another user might look for."""
    for name in (f"ronde-{user}", *(f"ronde-{user}.{n}" for n in range(20))):
        try:
            os.mkdir(f"/tmp/{name}", 0o777)
        except OSError:
            pass


def say(**words):
    os.write(1, f"{json.dumps(words)}\n".encode())


def main():
    stage, taken, spoken_to = json.loads(sys.argv[1])
    signal.alarm(120)
    if stage == "before":
        take_names(0)
        for address, port in taken:
            pose(address, port)
    read_secrets()
    speak_to_unix_sockets()
    speak_to_ports([tuple(place) for place in spoken_to])
    say(ready=gained, user=os.getuid(), num_held=len(held))
    sys.stdin.read()
    say(gained=gained)


if __name__ == "__main__":
    started = time.monotonic()
    main()
    os._exit(0)
