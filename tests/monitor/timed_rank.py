"""A rank that spends known times in known lines, and writes when it did what."""

import json
import sys
import time
from pathlib import Path

import numpy as np

from ronde.launch import own_environment

MATRIX = np.ones((256, 256), np.float32)
done = []  # what, from, to in Unix time


def until(part, ends):
    count = 0
    while time.time() < ends:
        if part == "loop":
            for _ in range(2000):  # loop
                count += _  # loop
        elif part == "product":
            MATRIX @ MATRIX  # product
        else:
            json.dumps([count] * 200)  # text


def main(seconds):
    ends = time.time() + seconds
    while time.time() < ends:
        for part, part_s in PARTS.items():
            begun = time.time()
            if part == "sleep":
                time.sleep(part_s)  # sleep
            else:
                until(part, begun + part_s)
            done.append((part, begun, time.time()))


PARTS = {"loop": 0.008, "sleep": 0.010, "product": 0.014, "text": 0.008}
main(float(sys.argv[1]))
Path(sys.argv[2], own_environment()["RANK"]).write_text(json.dumps(done))
