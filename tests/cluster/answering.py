"""A name server that knows no name; it says so after so many ms, or ``never``."""

import os
import socket
import sys
import threading
import time

server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
os.write(1, b"up\n")


def answer(question, address):
    time.sleep(float(sys.argv[1]) / 1000)
    # As it was asked: an answer, and that there is no such name.
    server.sendto(question[:2] + b"\x81\x83" + question[4:], address)


while True:
    asked = server.recvfrom(512)
    if sys.argv[1] != "never":
        threading.Thread(target=answer, args=asked, daemon=True).start()
