"""Looks up the names on standard input, all at once; writes a line for each answer.

A line has the name's index and its addresses, none for a name that does not exist. It
stands alone, so that it starts at once: ``python -I -S resolver.py``.
"""

import os
import socket
import sys
import threading
from collections.abc import Iterator

_NUM_THREADS = 64
_NOT_THERE = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))


def _answer(names: Iterator[tuple[int, str]], lock: threading.Lock) -> None:
    while True:
        with lock:
            index, name = next(names, (-1, ""))
        if index < 0:
            return
        try:
            found = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
        except UnicodeError:
            found = []
        except socket.gaierror as error:
            if error.errno not in _NOT_THERE:
                continue
            found = []
        addresses = dict.fromkeys(str(each[4][0]) for each in found)
        # One write, shorter than what a pipe takes whole.
        os.write(1, " ".join([str(index), *addresses]).encode()[:4000] + b"\n")


def main() -> None:
    """Answer as long as there are names."""
    names = sys.stdin.read().split("\n")
    asked, lock = enumerate(names), threading.Lock()
    threads = [
        threading.Thread(target=_answer, args=(asked, lock))
        for _ in range(min(_NUM_THREADS, len(names)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
