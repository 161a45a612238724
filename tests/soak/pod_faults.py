"""Start jobs of pods, break them at random, and count wrong ends.

Pods are containers of ``tests/containers``. A job has one fault that ends it, or some
that it survives and an end. What must hold: every pod ends in time and with the right
exit code, nothing of a job is left, all ranks of a world agree on it, and with restarts
or in an elastic job a lost pod is replaced. One line per job, with the seed that does
the same again: ``--seed N --faults 1``. The last line is JSON. Exits with 1 if anything
was wrong. Needs root.

    python -m tests.soak.pod_faults --faults 50 --seed 1 --jobs 2
"""

import argparse
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.containers.pods import PodNetwork, pod_network, why_not
from tests.soak.figures import reset_signals, show
from tests.soak.launch_faults import Tally
from tests.soak.pod_job import (
    ENDED,
    KILLED,
    LOST,
    PYTHON,
    RONDE_OF_ANOTHER_VERSION,
    SILENT,
    HangError,
    PodJob,
)

_OUTPUT_MB = 20  # of each rank
_START_S = 1.0  # of a pod, within which it is killed while it joins
_LATE_S = 40.0
_TOKEN_OF_OTHERS = "0123456789abcdef" * 2
_BAD = 93
_SHELL_KINDS = ("fixed", "restarts")
_ELASTIC = ("elastic", "training")
_SURVIVED = 4  # faults of one job, at most

# Faults that end a job


def _kill_head(job: PodJob) -> None:
    job.kill(0)
    job.end_with(LOST)


def _kill_node(job: PodJob) -> None:
    job.kill(*job.nodes())
    job.end_with(LOST)


def _end_pod(job: PodJob) -> None:
    job.pods[job.chance.randrange(3)].terminate()
    job.end_with(ENDED)


def _end_head(job: PodJob) -> None:
    job.pods[0].terminate()
    job.end_with(ENDED)


def _drain(job: PodJob) -> None:
    """End all pods, as the deletion of a job does."""
    pods = list(job.pods.values())
    for pod in job.chance.sample(pods, len(pods)):
        if job.is_living(pod):
            pod.terminate()
            time.sleep(job.chance.choice((0.0, 0.2)))
    job.end_with(ENDED)


def _exit(job: PodJob) -> None:
    code = job.chance.choice((1, 3, 42, 64, _BAD, 127, 255))
    job.act(job.chance.randrange(3), f"exit {code}")
    job.end_with(code)


def _exit_for_good(job: PodJob) -> None:
    """End with a code that causes no restart."""
    code = job.chance.choice((64, _BAD))
    job.act(job.chance.randrange(3), f"exit {code}")
    job.end_with(code)


def _kill_rank(job: PodJob) -> None:
    job.act(job.chance.randrange(3), "kill -9 $$")
    job.end_with(KILLED)


_FILL = "exec python -ISc 'x = [bytearray(1 << 20) for _ in range(4096)]'"


def _fill_memory(job: PodJob) -> None:
    """Let the kernel end a rank in a container that has a limit."""
    job.act(job.chance.randrange(3), _FILL)
    job.end_with(KILLED)


def _cut_node(job: PodJob) -> None:
    job.link(job.pods[job.nodes()[0]], "down")
    job.end_with(LOST)


def _cut_head(job: PodJob) -> None:
    job.link(job.pods[0], "down")
    job.end_with(LOST)


def _stop_node(job: PodJob) -> None:
    """Stop all processes of a pod until the others have ended."""
    pod = job.pods[job.nodes()[0]]
    job.freeze(pod)
    job.await_end(job.pods[0])
    job.thaw(pod)
    job.end_with(LOST)


def _replace_never(job: PodJob) -> None:
    job.kill(*job.nodes())
    job.await_line(job.pods[0], "no other node joined")
    job.end_with(LOST)


def _print(job: PodJob) -> None:
    """Print a lot on all ranks, through the head, and count it there."""
    line = "0" * 99
    print_it = f"yes {line} | head -c {_OUTPUT_MB}000000; exit 0"
    job.end_with(0)
    for rank in range(3):
        job.act(rank, print_it)
    job.await_end(job.pods[0])
    num = (job.folder / "out").read_text().count(line)
    if num != 3 * _OUTPUT_MB * 10_000:
        raise AssertionError(f"{num} lines of output have come")


# Faults while pods start


def _kill_while_starting(job: PodJob) -> None:
    """Kill a node before it has joined, or when it has; start another one."""
    for number in (0, 1):
        job.start(number)
    for _ in range(job.chance.choice((1, 2))):
        assert job.pods[1].init_pid
        time.sleep(job.chance.uniform(0, _START_S))
        job.kill(1)
        job.start(1)
    if job.chance.random() < 0.5:  # else both may join at once
        job.await_line(job.pods[1], "has joined")
    job.start(2)


def _start_head_late(job: PodJob) -> None:
    for number in (1, 2):
        job.start(number)
        job.await_line(job.pods[number], "waiting for the head node")
    job.start(0)


def _kill_waiting_head(job: PodJob) -> None:
    """Kill the head while nodes join; those that have joined end with it."""
    for number in (0, 1):
        job.start(number)
    assert job.pods[1].init_pid
    time.sleep(job.chance.uniform(0, 2 * _START_S))
    job.kill(0)
    node = job.pods[1]
    job.start(0)
    job.until(
        lambda: node.exit_code is not None or "train-1" in job.pods[0].errors(),
        "the node to join again or to end",
    )
    if node.exit_code is not None:
        job.expected[node] = (LOST,)
        job.start(1)
    job.start(2)


def _begin_among_strangers(job: PodJob) -> None:
    job.start(0)
    job.await_line(job.pods[0], "waiting for")
    _meet_strangers(job)
    for number in range(1, job.first_size):
        job.start(number)


def _meet_strangers(job: PodJob) -> None:
    """Send some strangers to the head's door, and see them refused."""
    address = job.pods[0].address
    network, chance = job.network, job.chance
    hold_s = str(chance.uniform(0.5, 4))
    silent = network.run_inside(PYTHON, "-c", SILENT, address, hold_s)
    token = job.write_token(f"other-{chance.random()}", _TOKEN_OF_OTHERS)
    liar = _join(job, "-m", "ronde", token=str(token))
    other = _join(job, "-c", RONDE_OF_ANOTHER_VERSION, token=str(job.token))
    for process, text in ((liar, "token differs"), (other, "speaks protocol")):
        _, errors = process.communicate(timeout=LONG_S)
        others = ("does not answer", "does not speak TLS")  # it is one of too many
        is_refused = any(each in errors for each in (text, *others))
        if process.returncode != LOST or not is_refused:
            raise AssertionError(f"stranger ended with {process.returncode}: {errors}")
    silent.communicate(timeout=LONG_S)


LONG_S = 90.0


def _join(job: PodJob, *words: str, token: str) -> "subprocess.Popen[str]":
    """Begin to join the head from the machine that has the pods."""
    own = ("run", "--agent", f"{job.pods[0].address}:29400", "--token-file", token)
    return job.network.run_inside(PYTHON, *words, *own, "--join-timeout", "3s")


# Faults that a job with restarts survives


def _replace(job: PodJob) -> None:
    _kill_some(job, 1)
    job.await_world(3)


def _replace_two(job: PodJob) -> None:
    _kill_some(job, 2)
    job.await_world(3)


def _kill_some(job: PodJob, num: int) -> None:
    """Kill nodes, and start others at once."""
    numbers = job.nodes(num)
    for number in numbers:
        job.kill(number)
    for number in numbers:
        job.start(number)


def _replace_late(job: PodJob) -> None:
    number = job.nodes()[0]
    job.kill(number)
    time.sleep(job.chance.choice((*[job.chance.uniform(1, 8)] * 9, _LATE_S)))
    job.start(number)
    job.await_world(3)


def _replace_twice(job: PodJob) -> None:
    """Kill also the pod that replaces one, while it joins."""
    number = job.nodes()[0]
    job.kill(number)
    again = job.start(number)
    assert again.init_pid
    time.sleep(job.chance.uniform(0, _START_S))
    job.kill(number)
    job.start(number)
    job.await_world(3)


def _replace_cut(job: PodJob) -> None:
    """Replace a pod that is only cut off: its ranks must end by themselves."""
    number = job.nodes()[0]
    old = job.pods[number]
    job.link(old, "down")
    job.start(number)
    job.expected[old] = (LOST,)
    job.await_world(3)
    job.await_end(old)


def _replace_stopped(job: PodJob) -> None:
    """Replace a pod whose processes are stopped; they go on later."""
    number = job.nodes()[0]
    old = job.pods[number]
    job.freeze(old)
    job.start(number)
    job.expected[old] = (LOST,)
    job.await_world(3)
    job.thaw(old)
    job.await_end(old)


def _restart_rank(job: PodJob) -> None:
    command = job.chance.choice(("exit 3", "exit 1", "kill -9 $$", _FILL))
    job.act(job.chance.randrange(3), command)
    job.await_world(3)


# Faults that an elastic job survives


def _shrink(job: PodJob) -> None:
    number = job.nodes()[0]
    job.kill(number)
    job.await_world(2)
    job.start(number)
    job.await_world(3)


def _leave(job: PodJob) -> None:
    """End a node with notice, and have it come back."""
    number = job.nodes()[0]
    job.pods[number].terminate()
    job.expected[job.pods[number]] = (ENDED,)
    job.await_world(2)
    job.await_end(job.pods[number])
    job.start(number)
    job.await_world(3)


def _grow_and_shrink(job: PodJob) -> None:
    """Go from 3 pods to 5, and to 2."""
    for number in (3, 4):
        job.start(number)
    job.settle(5)
    for number in job.nodes(3):
        if job.chance.random() < 0.5:
            job.kill(number)
        else:
            job.pods[number].terminate()
            job.expected[job.pods[number]] = (ENDED,)
    job.settle(2)
    for pod in job.all:
        if not job.is_living(pod):
            job.await_end(pod)


class Fault(NamedTuple):
    """A fault, and the kinds of jobs that it may come to."""

    act: Callable[[PodJob], None]
    kinds: Sequence[str]
    is_long: bool = False


STARTS = {
    "node killed while joining": Fault(_kill_while_starting, ("fixed", "restarts")),
    "head late": Fault(_start_head_late, ("fixed", "restarts", "elastic")),
    "head killed while nodes join": Fault(_kill_waiting_head, ("fixed",)),
    "strangers before the start": Fault(_begin_among_strangers, ("fixed", "restarts")),
}
"""Faults of a start."""
SURVIVED = {
    "node replaced at once": Fault(_replace, ("restarts",)),
    "two nodes replaced": Fault(_replace_two, ("restarts",)),
    "node replaced late": Fault(_replace_late, ("restarts",), is_long=True),
    "node replaced twice": Fault(_replace_twice, ("restarts",)),
    "cut node replaced": Fault(_replace_cut, ("restarts", *_ELASTIC), is_long=True),
    "stopped node replaced": Fault(
        _replace_stopped, ("restarts", "elastic"), is_long=True
    ),
    "rank fails, all start again": Fault(_restart_rank, ("restarts",)),
    "node killed, comes back": Fault(_shrink, _ELASTIC),
    "node ends with notice, comes back": Fault(_leave, _ELASTIC),
    "3 pods, 5, 2": Fault(_grow_and_shrink, ("growing",)),
    "strangers at the door": Fault(_meet_strangers, ("restarts", "elastic")),
}
"""Faults that a job survives."""
ENDS = {
    "head killed": Fault(_kill_head, ("fixed", "restarts", *_ELASTIC, "growing")),
    "node killed": Fault(_kill_node, ("fixed",)),
    "SIGTERM to a pod": Fault(_end_pod, _SHELL_KINDS),
    "SIGTERM to the head": Fault(_end_head, (*_ELASTIC, "growing")),
    "drain of all": Fault(_drain, ("fixed", "restarts", *_ELASTIC)),
    "exit code of a rank": Fault(_exit, ("fixed",)),
    "exit code without restart": Fault(_exit_for_good, ("restarts",)),
    "rank killed": Fault(_kill_rank, ("fixed",)),
    "rank out of memory": Fault(_fill_memory, ("fixed",)),
    "node cut off": Fault(_cut_node, ("fixed",), is_long=True),
    "head cut off": Fault(_cut_head, ("fixed",), is_long=True),
    "node stopped": Fault(_stop_node, ("fixed",), is_long=True),
    "never replaced": Fault(_replace_never, ("impatient",)),
    "60 MB of output": Fault(_print, ("printing",)),
}
"""Faults that end a job."""
FAULTS = STARTS | SURVIVED | ENDS
_SHARES = {"fixed": 8, "restarts": 5, "impatient": 1, "printing": 1, "elastic": 3}
_SHARES |= {"growing": 1}
_TRAINING = {"training": 1}


class Plan(NamedTuple):
    """A kind of job, and the faults that come to it in turn."""

    kind: str
    faults: Sequence[str]


def make_plan(chance: random.Random, most: int, *, is_quick: bool) -> Plan:
    """Draw a kind of job, and at most so many faults for it."""
    shares = _SHARES if is_quick else _SHARES | _TRAINING
    [kind] = chance.choices(list(shares), list(shares.values()))

    def possible(faults: dict[str, Fault]) -> list[str]:
        found = [name for name, fault in faults.items() if kind in fault.kinds]
        return [n for n in found if not (is_quick and faults[n].is_long)]

    starts, survived, ends = map(possible, (STARTS, SURVIVED, ENDS))
    if not survived:
        may_start = starts and chance.random() < 0.2
        return Plan(kind, [chance.choice(starts if may_start else ends)])
    drawn = chance.choices(survived, k=chance.randint(1, _SURVIVED))
    if kind == "growing":
        drawn = drawn[:1]
    if starts and chance.random() < 0.3:
        drawn.insert(0, chance.choice(starts))
    if ends and chance.random() < 0.5:
        drawn.append(chance.choice(ends))
    return Plan(kind, drawn[:most])


@dataclass(slots=True)
class Result:
    """The faults of one job: their seconds, and all that was wrong."""

    seed: int
    plan: Plan
    seconds: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    wrong: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    took_s: float = 0.0
    num_pods: int = 0
    num_replaced: int = 0


def run_one(network: PodNetwork, seed: int, plan: Plan, *, is_told: bool) -> Result:
    """Run one job, with its faults; judge it."""
    result = Result(seed, plan)
    chance = random.Random(f"{seed} {plan}")
    begun_s = time.monotonic()
    job = PodJob(network, plan.kind, f"job{seed}", chance)
    name = "start"
    try:
        if plan.faults[0] not in STARTS:
            job.start_all()
            job.await_world(3)
        for name in plan.faults:
            fault_s, num = time.monotonic(), len(job.all)
            FAULTS[name].act(job)
            if name in STARTS:
                job.await_world(3)
            if name in ENDS:
                _await_ends(job)
            if name in SURVIVED and plan.kind != "growing":
                result.num_replaced += len(job.all) - num
            result.seconds.setdefault(name, []).append(time.monotonic() - fault_s)
        if name not in ENDS:
            job.finish()
        problems = job.problems()
    except (AssertionError, HangError, OSError, subprocess.SubprocessError) as error:
        problems = [repr(error), *job.wrong_worlds()]
        result.seconds.setdefault(name, []).append(time.monotonic() - fault_s)
    if problems:
        result.wrong[name] = [f"seed {seed} {plan}: {'; '.join(problems)}"]
        if is_told:
            print(job.describe(), file=sys.stderr, flush=True)
    job.close()
    result.took_s = time.monotonic() - begun_s
    result.num_pods = len(job.all)
    return result


def _await_ends(job: PodJob) -> None:
    for pod in job.all:
        job.await_end(pod)


def main() -> int:
    """Run all jobs and print the table; return the exit code."""
    reset_signals()
    parser = argparse.ArgumentParser(description="Break jobs of pods.")
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="so many at a time")
    parser.add_argument("--only", metavar="NAME", choices=FAULTS, help="this fault")
    parser.add_argument("--kind", metavar="KIND", help="of jobs, with --only")
    parser.add_argument(
        "--quick", action="store_true", help="leave out what takes long"
    )
    options = parser.parse_args()
    if reason := why_not():
        print(f"pod_faults: {reason}", file=sys.stderr)
        return 2
    plans = make_plans(options)
    results: list[Result] = []

    def run(seed: int, plan: Plan) -> None:
        result = run_one(network, seed, plan, is_told=True)
        results.append(result)
        wrong = result.wrong or "nothing wrong"
        print(
            f"seed {seed}: {plan.kind}: {', '.join(plan.faults)}: "
            f"{result.took_s:.1f} s; {wrong}",
            file=sys.stderr, flush=True,
        )  # fmt: skip

    with pod_network() as network, ThreadPoolExecutor(options.jobs) as pool:
        for future in [pool.submit(run, *each) for each in plans.items()]:
            future.result()
    tallies = {name: Tally() for name in (*FAULTS, "start")}
    for result in results:
        for name, seconds in result.seconds.items():
            tallies[name].seconds += seconds
        for name, wrong in result.wrong.items():
            tallies[name].wrong += wrong
    used = {n: t for n, t in tallies.items() if t.seconds or t.wrong}
    is_good = show(
        "pod_faults",
        {name: tally.seconds for name, tally in used.items()},
        {name: tally.wrong for name, tally in used.items()},
        jobs=len(results),
        pods=sum(result.num_pods for result in results),
        replaced=sum(result.num_replaced for result in results),
    )
    return 0 if is_good else 1


def make_plans(options: argparse.Namespace) -> dict[int, Plan]:
    """Return the plan of each seed, for as many faults as are wanted."""
    plans: dict[int, Plan] = {}
    num, seed = 0, options.seed
    while num < options.faults:
        if options.only:
            kind = options.kind or FAULTS[options.only].kinds[0]
            plan = Plan(kind, [options.only])
        else:
            plan = make_plan(random.Random(seed), _SURVIVED + 2, is_quick=options.quick)
        plans[seed] = plan
        num += len(plan.faults)
        seed += 1
    return plans


if __name__ == "__main__":
    sys.exit(main())
