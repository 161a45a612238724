"""The faults of ``launch_faults.py``, and the end that each job must have.

Programs are of the shell or of Python without its site, so that a rank starts in a few
milliseconds. Unless it is said otherwise, rank 1 fails and the others wait for it.
"""

import errno
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

DEADLINE_S = 40.0
ANY = -1
"""Stands for any cause, and for no report at all."""

Ends = Sequence[tuple[int, int | None]]


@dataclass(frozen=True, slots=True)
class Running:
    """A job whose ranks have said hello; ``launcher`` may be a wrapper of it."""

    launcher: "subprocess.Popen[bytes]"
    # entries of the environment: one that launcher, agent and ranks have, and the
    # ranks' RONDE_COOKIE
    marks: tuple[str, ...]
    folder: Path  # of this job; ranks have it as FOLDER
    ranks: Mapping[int, int] = field(default_factory=dict[int, int])  # pids
    keeper: int = 0  # pid of the agent's reaper
    agent: int = 0


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to end a job."""

    name: str
    program: Sequence[str]  # of each rank
    # allowed exit codes, each with the rank that is the cause: None for no cause, ANY
    # for any
    ends: Ends
    act: Callable[[Running], None] | None = None  # once all ranks have said hello
    options: Sequence[str] = ()  # of ``ronde run``; ``@`` is the job's folder
    size: int = 2
    quote: str = ""  # expected on the launcher's stderr
    epoch: int = 0  # the last generation
    behind: Sequence[str] = ()  # words before the command
    on_terminal: bool = False
    is_early: bool = False  # act at a random moment of the start
    is_long: bool = False  # takes seconds
    is_possible: Callable[[], bool] = lambda: True  # on this machine


def read_until(stream: "IO[bytes] | None", words: bytes, times: int = 1) -> bytes:
    """Read a pipe until the words have come so often, or raise."""
    if stream is None:
        raise AssertionError("the launcher was started with pipes")
    fd = stream.fileno()
    ends_at = time.monotonic() + DEADLINE_S
    said = b""
    while said.count(words) < times or not said.endswith(b"\n"):
        ready, _, _ = select.select([fd], [], [], max(0, ends_at - time.monotonic()))
        data = os.read(fd, 65536) if ready else b""
        if not data:
            raise TimeoutError(f"waited for {times} * {words!r}, got {said!r}")
        said += data
    return said


def _python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code]


def _shell(code: str) -> list[str]:
    return ["/bin/sh", "-c", code]


_HELLO = 'echo "ready $RONDE_COOKIE $RANK $$"; '
_WAIT = "exec sleep 600"
_ONE = f'[ "$RANK" = 1 ] || {_WAIT}; '
_GREETING = """
import atexit, os, signal, socket, sys, threading, time, traceback
rank, folder = int(os.environ["RANK"]), os.environ.get("FOLDER", "")
def greet():
    print("ready", os.environ["RONDE_COOKIE"], rank, os.getpid(), flush=True)
"""
_PY_ONE = _GREETING + "if rank != 1:\n    time.sleep(600)\n"

_DAEMON = """
greet()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "600"])
    os._exit(0)
os.wait()
"""

# Every process lives a moment, forks the next one into a session of its own and ends:
# a killer that reads the process table first always comes too late.
_COMET = """
greet()
if os.fork() == 0:
    while True:
        os.setsid()
        if os.fork():
            os._exit(0)
        time.sleep(0.002)
time.sleep(600)
"""

# Forks as fast as it may, up to a bound that no machine minds.
_STORM = """
def fork(depth):
    while depth:
        depth -= 1
        if os.fork() == 0:
            fork(depth)
    if rank != 1 or os.getpid() != first:
        time.sleep(600)
first = os.getpid()
fork(6)
sys.exit(3)
"""

# Rank 1 serves; the others connect to it, and what they sent is never read: when it
# closes, each of them gets the kernel's own ECONNRESET. Then rank 1 is slow to end.
_PEERS = (
    _GREETING
    + """
path = folder + "/rank1-" + os.environ["RONDE_EPOCH"]
if rank == 1:
    server = socket.socket(socket.AF_UNIX)
    server.bind(path + "-new")
    server.listen()
    os.rename(path + "-new", path)
    peers = [server.accept()[0] for _ in range(int(os.environ["WORLD_SIZE"]) - 1)]
    for peer in peers:
        peer.recv(1)
    def leave():
        for peer in peers:
            peer.close()
    def leave_slowly(seconds=0.3):
        atexit.register(time.sleep, seconds)
        leave()
    FAIL
peer = socket.socket(socket.AF_UNIX)
while not os.path.exists(path):
    time.sleep(0.01)
peer.connect(path)
peer.sendall(b"12")
try:
    peer.recv(1)
except OSError as error:
    SURVIVE
"""
)
_RAISE = "leave_slowly(); raise ValueError('the real cause')"
_RAISE_VERY_SLOWLY = "leave_slowly(3); raise ValueError('the real cause')"
_RAISE_IN_THREADS = (
    "threading.Thread(target=time.sleep, args=(0.3,)).start(); leave(); "
    "raise ValueError('the real cause')"
)
_CRASH = (
    "import resource; "
    "resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY,) * 2); "
    "os.chdir(folder); big = b'1' * (128 << 20); leave(); "
    "os.kill(os.getpid(), signal.SIGSEGV)"
)
# Not before the other has raised its exception, or the kernel has begun to dump.
_IN_SILENCE = "time.sleep(0.1); os._exit(7)"
_IN_WORDS = "sys.exit(f'giving up: {error}')"
_IN_WORDS_7 = "print(f'giving up: {error}', file=sys.stderr); sys.exit(7)"


def _peers(fail: str, survive: str = "raise") -> list[str]:
    return _python(_PEERS.replace("FAIL", fail).replace("SURVIVE", survive))


# Runs the rest of its words where the kernel refuses ``pidfd_open`` with this number.
_REFUSE = """
import ctypes, os, struct, sys
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
steps = [(LOAD, 0, 0, 0), (EQUAL, 0, 1, 434),
         (RETURN, 0, 0, 0x00050000 | int(sys.argv[1])), (RETURN, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *s) for s in steps))
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_void_p)]
program = Program(len(steps), ctypes.addressof(code))
libc = ctypes.CDLL(None)
failed = [libc.prctl(38, 1, 0, 0, 0), libc.prctl(22, 2, ctypes.byref(program), 0, 0)]
assert not any(failed), failed
os.execv(sys.argv[2], sys.argv[2:])
"""
_BLOCK = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
os.execvp(sys.argv[1], sys.argv[1:])
"""
_IGNORE = ("/bin/sh", "-c", "trap '' INT; exec \"$@\"", "sh")
_FEW_FILES = ("/bin/sh", "-c", 'ulimit -n 64; exec "$@"', "sh")
_PARENT = ("/bin/sh", "-c", '"$@"; echo parent saw $?', "sh")
_PIDS = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
_SMALL_DISK = (
    *("unshare", "--mount", "/bin/sh", "-c"),
    'mount -t tmpfs -o size=64k none "$FOLDER/tmp" && exec "$@"',
    "sh",
)
# Runs the rest of its words in a control group that may have 64 MiB, and removes it.
_SMALL_MEMORY = (
    *("/bin/sh", "-c"),
    """
    top=/sys/fs/cgroup; limit=memory.max
    [ -d $top/memory ] && top=$top/memory limit=memory.limit_in_bytes
    group=$top/ronde-fault-$$
    mkdir $group && echo 67108864 > $group/$limit || exit 99
    GROUP=$group /bin/sh -c 'echo $$ > $GROUP/cgroup.procs; exec "$@"' sh "$@"
    code=$?; rmdir $group; exit $code
    """,
    "sh",
)

# Rank 1 fails; rank 0, told to end, leaves an orphan that gets rank 1's number.
_RECYCLE = (
    _GREETING
    + """
note = folder + "/pid"
if rank == 1:
    while not os.path.exists(folder + "/waits"):
        time.sleep(0.01)
    with open(note, "w") as file:
        file.write(str(os.getpid()))
    os._exit(3)
agent = os.getppid()
def end(*_):
    with open(note) as file:
        pid = int(file.read())
    if os.fork():
        os.wait()
        os._exit(0)
    while True:
        with open("/proc/sys/kernel/ns_last_pid", "w") as file:
            file.write(str(pid - 1))
        child = os.fork()
        if child == 0:
            while os.getppid() != agent:
                time.sleep(0.005)
            os._exit(0)
        if child == pid:
            os._exit(0)
        os.kill(child, 9)
        os.waitpid(child, 0)
signal.signal(signal.SIGTERM, end)
open(folder + "/waits", "w").close()
time.sleep(600)
"""
)


def _can_run(*words: str) -> bool:
    done = subprocess.run(
        [*words, "true"],
        env={"FOLDER": "/", "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    return done.returncode == 0


def _can_choose_pids() -> bool:
    is_writable = os.access("/proc/sys/kernel/ns_last_pid", os.W_OK)
    return is_writable and _can_run(*_PIDS)


def _can_mount() -> bool:
    return _can_run("unshare", "--mount")


def _can_limit_memory() -> bool:
    return _can_run(*_SMALL_MEMORY)


def _sends(number: int) -> Callable[[Running], None]:
    return lambda running: running.launcher.send_signal(number)


def _kills(rank: int, number: int = signal.SIGKILL) -> Callable[[Running], None]:
    return lambda running: os.kill(running.ranks[rank], number)


def _kills_agent(running: Running) -> None:
    os.kill(running.agent, signal.SIGKILL)


def _kills_keeper(running: Running) -> None:
    os.kill(running.keeper, signal.SIGKILL)


def _stops_keeper(running: Running) -> None:
    os.kill(running.keeper, signal.SIGSTOP)
    _opens_gate(running)


def _stops_agent(running: Running) -> None:
    os.kill(running.agent, signal.SIGSTOP)
    _opens_gate(running)


def _opens_gate(running: Running) -> None:
    """Have rank 1 go on."""
    (running.folder / "gate").touch()


def _stops_rank_and_sends(number: int) -> Callable[[Running], None]:
    def act(running: Running) -> None:
        os.kill(running.ranks[1], signal.SIGSTOP)
        running.launcher.send_signal(number)

    return act


def _interrupts_twice(running: Running) -> None:
    running.launcher.send_signal(signal.SIGINT)
    # The launcher answers the first one in words.
    read_until(running.launcher.stderr, b"Ctrl-C kills")
    running.launcher.send_signal(signal.SIGINT)


def _interrupts_then_ends(running: Running) -> None:
    running.launcher.send_signal(signal.SIGINT)
    running.launcher.send_signal(signal.SIGTERM)


def _asks_then_ends(running: Running) -> None:
    running.launcher.send_signal(signal.SIGQUIT)
    read_until(running.launcher.stderr, b"sleep")
    running.launcher.send_signal(signal.SIGTERM)


def _interrupts_after_restart(running: Running) -> None:
    _opens_gate(running)
    read_until(running.launcher.stdout, b"ready ", 2)
    running.launcher.send_signal(signal.SIGINT)


def _closes_output(running: Running) -> None:
    if running.launcher.stdout is not None:
        running.launcher.stdout.close()
        running.launcher.stdout = None
    _opens_gate(running)


def _reads_late(running: Running) -> None:
    """Read nothing until the ranks wait for that."""
    _opens_gate(running)
    ends_at = time.monotonic() + DEADLINE_S
    while not (running.folder / "full").exists() and time.monotonic() < ends_at:
        time.sleep(0.01)


def _kills_parent(running: Running) -> None:
    running.launcher.kill()
    _opens_gate(running)


_WITH_SESSION = _HELLO + "setsid sleep 600 & " + _WAIT
_GATE = 'while [ ! -e "$FOLDER/gate" ]; do sleep 0.02; done; '
_GATED = _HELLO + _ONE + _GATE + "exit 3"
_STUBBORN = 'trap "" INT TERM; ' + _HELLO + "while :; do sleep 600; done"
_FIRST_TIME_ONLY = '[ "$RONDE_EPOCH" = 0 ] || exit 0; '
_TAKE_TERM = "import signal, sys; signal.signal(15, lambda *_: sys.exit(1))\n"
_HANDLED = """
try:
    raise KeyError("an older one")
except KeyError:
    traceback.print_exc()
"""

_CODES = tuple(
    Fault(f"rank exits {code}", _shell(f"{_ONE}exit {code}"), ((code, 1),))
    for code in (1, 2, 3, 42, 64, 127, 255)
)
_SIGNALS = tuple(
    Fault(
        f"rank ends by SIG{name}",
        _shell(f"{_ONE}kill -{name} $$"),
        ((128 + signal.Signals[f"SIG{name}"], 1),),
        quote=f"killed by SIG{name}",
    )
    for name in ("HUP", "USR1", "TERM", "KILL", "SEGV", "ABRT", "BUS", "FPE", "ILL")
)


def _fails(name: str, code: str, exit_code: int = 1, quote: str = "") -> Fault:
    """Have rank 1 run this Python code, while the others wait."""
    return Fault(name, _python(_PY_ONE + code), ((exit_code, 1),), quote=quote)


_RAISES = "raise ValueError('the cause')"
_CAUSE = "ValueError: the cause"
_NOISE = "print('\\n'.join('x' * 50), file=sys.stderr)\n"
_THREAD = "t = threading.Thread(target=lambda: 1 / 0)\nt.start()\nt.join()\n"
_EXEC = "os.execv('/bin/sh', ['sh', '-c', 'exit 6'])"
_WAIT_EXCEPT = '[ "$RANK" = {} ] || exec sleep 600; '

_PYTHON = (
    _fails("rank raises", _RAISES, quote=_CAUSE),
    _fails("older traceback handled, then it raises", _HANDLED + _RAISES, 1, _CAUSE),
    _fails(
        "last words, after a traceback that was handled",
        _HANDLED + _NOISE + "sys.exit('no data')",
        quote="|     no data",
    ),
    Fault(
        "handled traceback in all ranks, one killed",
        _python(_GREETING + _TAKE_TERM + _HANDLED + "greet()\ntime.sleep(600)"),
        ((137, 1),),
        _kills(1),
    ),
    _fails("deep traceback", "def f(): f()\nf()", quote="RecursionError"),
    _fails("thread raises, then exit 5", _THREAD + "sys.exit(5)", 5, "ZeroDivision"),
    _fails("memory error", "bytearray(1 << 60)", quote="MemoryError"),
    _fails("rank interrupted", "raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    _fails("exception group", f"raise ExceptionGroup('g', [{_RAISES[6:]}])", 1, _CAUSE),
    _fails("fails in atexit", "atexit.register(os._exit, 5)", 5),
    _fails("os._exit", "os._exit(4)", 4),
    _fails("abort()", "os.abort()", 134),
    _fails("no traceback", "sys.exit('words')", quote="words"),
    Fault("syntax error", _python("1 +"), ((1, ANY),), quote="SyntaxError"),
    _fails("exec of a program that fails", _EXEC, 6),
    Fault("all ranks fail at once", _shell("exit 9"), ((9, ANY),), size=4),
    Fault(
        "two ranks fail within 50 ms",
        _shell('[ "$RANK" = 0 ] && exit 3; ' + _ONE + "exit 4"),
        ((3, 0), (4, 1)),
        size=3,
    ),
    Fault("rank fails alone", _shell("exit 3"), ((3, 0),), size=1),
    Fault(
        "rank 3 of 4 fails",
        _shell(_WAIT_EXCEPT.format(3) + "exit 3"),
        ((3, 3),),
        size=4,
    ),
    Fault("no such program", ["/no/such/program"], ((64, None),)),
)

_SLOW = (
    *(
        Fault(
            f"slow exit of one of {size}",
            _peers(_RAISE),
            ((1, 1),),
            size=size,
            quote="ValueError: the real cause",
        )
        for size in (2, 3, 4)
    ),
    Fault("very slow exit", _peers(_RAISE_VERY_SLOWLY), ((1, 1),), is_long=True),
    Fault("exit held up by a thread", _peers(_RAISE_IN_THREADS), ((1, 1),), size=3),
    Fault(
        "slow exit, the peers report it and exit 1",
        _peers(_RAISE, _IN_WORDS),
        ((1, 1),),
        size=3,
    ),
    Fault(
        "slow exit, the peers report it and exit 7",
        _peers(_RAISE, _IN_WORDS_7),
        ((1, 1),),
        size=3,
    ),
    Fault(
        "slow exit, the peers exit 7 in silence",
        _peers(_RAISE, _IN_SILENCE),
        ((1, 1),),
        size=3,
    ),
    Fault(
        "slow exit 93, which bars restarts",
        _peers("leave_slowly(); sys.exit(93)"),
        ((93, 1),),
        options=("--max-restarts", "1"),
    ),
    Fault(
        "slow exit 5, which bars restarts",
        _peers("leave_slowly(); sys.exit(5)", _IN_WORDS_7),
        ((5, 1),),
        options=("--max-restarts", "1", "--no-restart-codes", "5"),
        size=3,
    ),
    Fault("core dump", _peers(_CRASH), ((139, 1),), quote="core dumped", is_long=True),
    Fault(
        "core dump, the peers exit 7 in silence",
        _peers(_CRASH, _IN_SILENCE),
        ((139, 1),),
        is_long=True,
    ),
    Fault(
        "slow exit, too slow for the grace",
        _peers("leave_slowly(60); raise ValueError('the real cause')"),
        ((1, 1),),
        options=("--grace", "500ms"),
        quote="ValueError: the real cause",
    ),
)

_HOROVOD = """
import atexit, os, sys, time
atexit.register(time.sleep, 0.5)
import torch
import horovod.torch as hvd
hvd.init()
if hvd.rank() == 1:
    sys.exit(93)
try:
    hvd.allreduce(torch.ones(1))
except Exception:
    os._exit(7)
"""

_STOPPED = (
    Fault(
        "rank is SIGKILLed from outside", _shell(_HELLO + _WAIT), ((137, 0),), _kills(0)
    ),
    Fault(
        "rank ignores SIGTERM",
        _shell(
            'trap "" TERM; ' + _HELLO + '[ "$RANK" = 1 ] && exit 3; '
            "while :; do sleep 600; done"
        ),
        ((3, 1),),
        options=("--grace", "200ms"),
    ),
    Fault(
        "rank is stopped, another exits 3",
        _shell(_HELLO + '[ "$RANK" = 1 ] && exit 3; kill -STOP $$'),
        ((3, 1),),
    ),
    Fault("keeper is stopped", _shell(_GATED), ((3, 1),), _stops_keeper),
    Fault("agent is stopped", _shell(_GATED), ((3, 1),), _stops_agent),
    Fault(
        "Ctrl-C with a stopped rank",
        _shell(_HELLO + _WAIT),
        ((130, None),),
        _stops_rank_and_sends(signal.SIGINT),
    ),
    Fault(
        "SIGTERM with a stopped rank",
        _shell(_HELLO + _WAIT),
        ((143, None),),
        _stops_rank_and_sends(signal.SIGTERM),
    ),
)

_FAMILIES = (
    Fault(
        "child in its own session", _shell("setsid sleep 600 & " + _HELLO), ((0, None),)
    ),
    Fault("daemonised child", _python(_GREETING + _DAEMON), ((0, None),)),
    Fault(
        "daemonised child, rank exits 3",
        _python(_GREETING + _DAEMON + "sys.exit(3 if rank else 0)"),
        ((3, 1),),
    ),
    Fault(
        "child that forks away, SIGTERM",
        _python(_GREETING + _COMET),
        ((143, None),),
        _sends(signal.SIGTERM),
    ),
    Fault("fork storm, rank exits 3", _python(_GREETING + _STORM), ((3, 1),)),
    Fault(
        "child holds the output open",
        _shell(_ONE + "sleep 600 & exit 3"),
        ((3, 1),),
        options=("--grace", "200ms"),
    ),
)

_USER = (
    Fault("Ctrl-C", _shell(_WITH_SESSION), ((130, None),), _sends(signal.SIGINT)),
    Fault("Ctrl-C twice", _shell(_STUBBORN), ((130, None),), _interrupts_twice),
    Fault("SIGTERM", _shell(_WITH_SESSION), ((143, None),), _sends(signal.SIGTERM)),
    Fault("SIGHUP", _shell(_WITH_SESSION), ((129, None),), _sends(signal.SIGHUP)),
    Fault(
        "SIGQUIT shows stacks, SIGTERM ends",
        _shell(_WITH_SESSION),
        ((143, None),),
        _asks_then_ends,
    ),
    Fault(
        "time is over",
        _shell(_WITH_SESSION),
        ((124, ANY),),
        options=("--timeout", "700ms"),
    ),
    Fault(
        "terminal is closed",
        _shell(_WITH_SESSION),
        ((129, None),),
        _closes_output,
        on_terminal=True,
    ),
    Fault(
        "SIGTERM while starting",
        _shell(_WITH_SESSION),
        # The latter before Python has come to the launcher's own first line.
        ((143, ANY), (-signal.SIGTERM, ANY)),
        _sends(signal.SIGTERM),
        is_early=True,
    ),
)

_LAUNCHER = (
    Fault(
        "launcher SIGKILLed",
        _shell(_WITH_SESSION),
        ((-9, ANY),),
        _sends(signal.SIGKILL),
    ),
    Fault(
        "launcher SIGKILLed while starting",
        _shell(_WITH_SESSION),
        ((-9, ANY),),
        _sends(signal.SIGKILL),
        is_early=True,
    ),
    Fault("agent SIGKILLed", _shell(_WITH_SESSION), ((70, ANY),), _kills_agent),
    Fault(
        "agent of four SIGKILLed",
        _shell(_WITH_SESSION),
        ((70, ANY),),
        _kills_agent,
        size=4,
    ),
    Fault("keeper SIGKILLed", _shell(_WITH_SESSION), ((70, ANY),), _kills_keeper),
    Fault(
        "parent of the launcher SIGKILLed",
        _shell(_GATED),
        ((-9, 1),),
        _kills_parent,
        behind=_PARENT,
    ),
)

_RESTARTS = (
    Fault(
        "rank fails at each of three starts",
        _shell(_ONE + "exit 3"),
        ((3, 1),),
        options=("--max-restarts", "2"),
        epoch=2,
    ),
    Fault(
        "rank segfaults once",
        _shell(_FIRST_TIME_ONLY + _ONE + "kill -SEGV $$"),
        ((0, None),),
        options=("--max-restarts", "2"),
        epoch=1,
    ),
    Fault(
        "slow exit at each of two starts",
        _peers(_RAISE),
        ((1, 1),),
        options=("--max-restarts", "1"),
        epoch=1,
    ),
    Fault(
        "Ctrl-C after a restart",
        _shell(
            _HELLO
            + '[ "$RONDE_EPOCH" = 0 ] && [ "$RANK" = 1 ] && { '
            + _GATE
            + "exit 3; }; "
            + _WAIT
        ),
        ((130, None),),
        _interrupts_after_restart,
        options=("--max-restarts", "1"),
        epoch=1,
    ),
    Fault(
        "agent SIGKILLed, with a restart",
        _shell(_FIRST_TIME_ONLY + _WITH_SESSION),
        ((0, None),),
        _kills_agent,
        options=("--max-restarts", "1"),
        epoch=1,
    ),
)

_PLACES = (
    *(
        Fault(
            f"pidfd_open gives {name}",
            _shell("setsid sh -c 'sleep 600 & sleep 600' & " + _ONE + "exit 3"),
            ((3, 1),),
            behind=(sys.executable, "-c", _REFUSE, str(int(number))),
        )
        for name, number in (("ENOSYS", errno.ENOSYS), ("EPERM", errno.EPERM))
    ),
    Fault(
        "process number is recycled",
        _python(_RECYCLE),
        ((3, 1),),
        behind=_PIDS,
        is_possible=_can_choose_pids,
    ),
    Fault(
        "parent blocks SIGCHLD",
        _shell(_ONE + "exit 3"),
        ((3, 1),),
        behind=(sys.executable, "-I", "-S", "-c", _BLOCK),
    ),
    Fault(
        "SIGINT is ignored, SIGTERM ends",
        _shell(_HELLO + _WAIT),
        ((143, None),),
        _interrupts_then_ends,
        behind=_IGNORE,
    ),
    Fault("few open files", _shell(_ONE + "exit 3"), ((3, 1),), behind=_FEW_FILES),
    Fault(
        "lack of memory",
        _python(_PY_ONE + "bytearray(256 << 20)"),
        ((137, 1),),
        quote="for lack of memory",
        behind=_SMALL_MEMORY,
        is_possible=_can_limit_memory,
    ),
)

_OUTPUT = (
    Fault(
        "output is not read any more",
        _shell(_HELLO + _GATE + "while :; do echo more || exit 9; done"),
        ((141, None),),
        _closes_output,
    ),
    Fault(
        "output is read late",
        _shell(
            _HELLO + _ONE + _GATE + 'head -c 4000000 /dev/zero | tr "\\0" x & '
            'sleep 0.3; : > "$FOLDER/full"; wait; exit 3'
        ),
        ((3, 1),),
        _reads_late,
    ),
    Fault(
        "flood on stdout, rank exits 3",
        _shell(_ONE + "yes | head -c 4000000; exit 3"),
        ((3, 1),),
    ),
    Fault(
        "flood of another rank, rank exits 3",
        _shell('[ "$RANK" = 1 ] || exec yes; sleep 0.1; exit 3'),
        ((3, 1),),
    ),
    Fault(
        "flood on stderr, then a traceback",
        _python(
            _PY_ONE
            + "sys.stderr.write('noise\\n' * 300000)\nraise ValueError('the cause')"
        ),
        ((1, 1),),
        quote="|     ValueError: the cause",
    ),
    Fault(
        "half a line, no UTF-8",
        _shell(_ONE + "printf 'caf\\351 \\377' >&2; exit 3"),
        ((3, 1),),
        quote="|     caf",
    ),
    Fault(
        "disk of the logs is full",
        _python(_PY_ONE + "sys.stderr.write('x' * 400000 + '\\n')\nsys.exit(3)"),
        ((3, 1),),
        options=("--log-dir", "@/tmp"),
        behind=_SMALL_DISK,
        is_possible=_can_mount,
    ),
)

_NOTICE = "from ronde.world.environment import send_exit_notice as go; go()"

_FRONT_END = (
    Fault(
        "a wrapper goes on after a program that said goodbye",
        _shell(
            f"[ $RANK = 1 ] || {sys.executable} -c '{_NOTICE}'; "
            "trap 'echo got TERM >&2; exit 1' TERM; "
            f"{_HELLO} [ $RANK = 1 ] && {{ {_GATE} exit 3; }}; sleep 600 & wait"
        ),
        ((3, 1),),
        _opens_gate,
        quote="got TERM",
    ),
    Fault(
        "Horovod's API: slow exit 93, the other exits 7 in silence",
        [sys.executable, "-c", _HOROVOD],
        ((93, 1),),
        options=("--max-restarts", "1"),
        is_long=True,
    ),
)

FAULTS = (
    *(*_CODES, *_SIGNALS, *_PYTHON, *_SLOW, *_STOPPED, *_FAMILIES),
    *(*_USER, *_LAUNCHER, *_RESTARTS, *_PLACES, *_OUTPUT, *_FRONT_END),
)
