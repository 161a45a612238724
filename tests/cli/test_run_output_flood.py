import os
import sys
from pathlib import Path

import pytest
from tests.limits import HANG_S

NUM_RANKS = 4
RANK_BYTES = 256 << 20
MAX_CONTROLLER_MIB = 200
READ_BYTES = 1 << 20

# Every line differs from its neighbours in number, begin and length, so that one that
# is lost, cut or mixed with another cannot go unnoticed.
LINES = """
PATTERN = bytes(range(33, 127)) * 20

def line(rank, number):
    begin = number % 89
    return b"%d:%d:" % (rank, number) + PATTERN[begin : begin + number % 1024]
"""

PROGRAM = f"""
import os
{LINES}
rank = int(os.environ["RANK"])
number, num_bytes, held = 0, 0, b""
while num_bytes < {RANK_BYTES}:
    lines = b"".join(line(rank, i) + b"\\n" for i in range(number, number + 512))
    number, num_bytes, held = number + 512, num_bytes + len(lines), held + lines
    # Pieces that end within lines, so that the ranks' writes tear them.
    while len(held) > 50021:
        held = held[os.write(1, held[:50021]):]
while held:
    held = held[os.write(1, held):]
os.write(2, b"%d\\n" % number)
"""

exec(LINES)  # noqa: S102 - the ranks' own lines


def peak_memory_mib(pid: int) -> float:
    """Return the most memory that a process has had, 0 for one that has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except ProcessLookupError:
        return 0.0
    said = [li.split()[1] for li in status.splitlines() if li.startswith("VmHWM:")]
    return int(said[0]) / 1024 if said else 0.0


@pytest.mark.soak
def test_a_gibibyte_of_four_ranks_comes_out_whole_in_little_memory(ronde):
    numbers = [0] * NUM_RANKS
    heads = [b"[%d] " % rank for rank in range(NUM_RANKS)]
    rank_of = {head: rank for rank, head in enumerate(heads)}
    num_bytes = 0
    peak_mib = 0.0
    words = ("run", "-n", str(NUM_RANKS), "--", sys.executable, "-S", "-c", PROGRAM)
    with ronde.start(*words) as process:
        held = b""
        while data := os.read(process.stdout.fileno(), READ_BYTES):
            num_bytes += len(data)
            *lines, held = (held + data).split(b"\n")
            for each in lines:
                rank = rank_of[each[:4]]
                assert each == heads[rank] + line(rank, numbers[rank])  # noqa: F821
                numbers[rank] += 1
            peak_mib = max(peak_mib, peak_memory_mib(process.pid))
        said = sorted(process.stderr.read().splitlines())
        assert process.wait(HANG_S) == 0
    assert held == b""
    assert said == [b"[%d] %d" % (r, numbers[r]) for r in range(NUM_RANKS)]
    assert num_bytes > NUM_RANKS * RANK_BYTES
    assert 0 < peak_mib < MAX_CONTROLLER_MIB
