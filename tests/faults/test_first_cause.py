"""The rank that failed first is named, however long it takes to end."""

import json
import subprocess
import sys

import pytest

_TIMEOUT_S = 100

# Rank 1 serves; the others connect to it, and what they sent is never read: when it
# closes, each of them gets the kernel's own ECONNRESET.
PEERS = """
import atexit, os, signal, socket, sys, threading, time
rank, size, slow_s = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), {slow_s}
path = os.environ["FOLDER"] + "/rank1-" + os.environ["RONDE_EPOCH"]
if rank == 1:
    server = socket.socket(socket.AF_UNIX)
    server.bind(path + "-new")
    server.listen()
    os.rename(path + "-new", path)
    peers = [server.accept()[0] for _ in range(size - 1)]
    for peer in peers:
        peer.recv(1)
    atexit.register(time.sleep, slow_s)
    def leave():
        for peer in peers:
            peer.close()
{fail}
peer = socket.socket(socket.AF_UNIX)
while not os.path.exists(path):
    time.sleep(0.01)
peer.connect(path)
peer.sendall(b"12")
{survive}
"""

RAISE = """
    try:
        raise ValueError("the real cause")
    finally:
        leave()
"""
EXIT_93 = """
    leave()
    sys.exit(93)
"""
SLOW_THREAD = """
    threading.Thread(target=time.sleep, args=(slow_s,)).start()
    leave()
    raise ValueError("the real cause")
"""
CRASH = """
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY,) * 2)
    os.chdir(os.environ["FOLDER"])
    big = b"1" * (256 << 20)
    leave()
    os.kill(os.getpid(), signal.SIGSEGV)
"""
LOSE = "peer.recv(1)"
LOSE_IN_WORDS = """
try:
    peer.recv(1)
except OSError as error:
    print(f"giving up: {error}", file=sys.stderr)
    sys.exit(7)
"""
LOSE_SILENTLY = """
try:
    peer.recv(1)
except OSError:
    sys.exit(7)
"""


def run(tmp_path, size, program, *options):
    """Run a program that fails; return exit code, the report's verdict, and stderr."""
    report = tmp_path / "report"
    words = ("-n", str(size), "-x", f"FOLDER={tmp_path}", "--error-file", str(report))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ronde", "run", *words, *options),
            *("--", sys.executable, "-c", program),
        ],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert report.exists(), done.stderr
    return done.returncode, json.loads(report.read_text())["verdict"], done.stderr


@pytest.mark.parametrize(("size", "slow_s"), [(2, 0.3), (3, 3), (4, 0.3)])
def test_who_ends_slowly_is_blamed_and_quoted(tmp_path, size, slow_s):
    program = PEERS.format(slow_s=slow_s, fail=RAISE, survive=LOSE)
    code, verdict, block = run(tmp_path, size, program)
    assert (code, verdict["cause"]["rank"]) == (1, 1)
    assert "ValueError: the real cause" in block.partition("+--")[2]
    lost = [end["rank"] for end in verdict["also_failed"] if end["lost_its_peer"]]
    assert sorted(lost) == [rank for rank in range(size) if rank != 1]


@pytest.mark.parametrize(
    ("fail", "survive", "expected"),
    [
        (SLOW_THREAD, LOSE, 1),
        (RAISE, LOSE_IN_WORDS, 1),
        (RAISE, LOSE_SILENTLY, 1),
        (EXIT_93, LOSE, 93),
        (EXIT_93, LOSE_IN_WORDS, 93),
        (CRASH, LOSE_SILENTLY, 139),
    ],
    ids=["thread", "words", "silent", "exit", "exit words", "core"],
)
def test_its_exit_code_counts_whatever_its_peers_make_of_it(
    tmp_path, fail, survive, expected
):
    program = PEERS.format(slow_s=0.5, fail=fail, survive=survive)
    code, verdict, _ = run(tmp_path, 3, program, "--max-restarts", "1")
    epoch = json.loads((tmp_path / "report").read_text())["epoch"]
    assert (code, verdict["cause"]["rank"]) == (expected, 1)
    assert epoch == (0 if expected == 93 else 1)
    for core in tmp_path.glob("core*"):
        core.unlink()


# Ranks of Horovod's API: the exit of one is slow after it has told the others.
HOROVOD = """
import atexit, os, sys, time
atexit.register(time.sleep, 0.5)
import torch
import horovod.torch as hvd
hvd.init()
hvd.allreduce(torch.ones(1), name="first")
if hvd.rank() == 1:
    {fail}
try:
    hvd.allreduce(torch.ones(1), name="second")
except Exception:
    {survive}
"""


@pytest.mark.parametrize(
    ("fail", "survive", "expected"),
    [
        ("sys.exit(93)", "raise", 93),
        ("sys.exit(93)", "os._exit(7)", 93),
        ("raise ValueError('the real cause')", "os._exit(7)", 1),
        ("hvd.shutdown(); sys.exit(93)", "raise", 93),
    ],
)
def test_a_rank_of_horovods_api_is_known_by_its_goodbye(
    tmp_path, fail, survive, expected
):
    program = HOROVOD.format(fail=fail, survive=survive)
    code, verdict, _ = run(tmp_path, 2, program, "--max-restarts", "1")
    assert (code, verdict["cause"]["rank"]) == (expected, 1)
