"""``ronde why``: the ranks that hold up a job, and the reasons."""

import json
from collections.abc import Sequence
from pathlib import Path

from ronde.arguments import CommandParser
from ronde.errors import LaunchError
from ronde.launch.status import list_jobs
from ronde.monitor.asking import choose_job, inspect_workers, observe_job
from ronde.monitor.verdict import explain_hang
from ronde.plain_values import to_plain
from ronde.render.why import draw_dumps, draw_hang, draw_slow, draw_stacks
from ronde.status.table import JobStatus

_HELP = """\
usage: ronde why [JOB] [--stacks] [--json]
       ronde why --slow [JOB] [--json]
       ronde why FILE ... [--json]

Say which ranks hold up a running job, at which line, and why. The job goes on. Without
JOB, a part of the job's id or command, it is your only job on this host. FILEs are the
dumps of torch's flight recorder, one for each rank, of a job that has ended.

options:
  --slow      watch a job that makes steps for 4 s; say which ranks and hosts cost
              how much of a step: own code, input, GC, tokens, CPU, GPU or network
  --stacks    show the stack of each rank as well
  --json      print everything as one JSON object
  -h, --help  show this help and exit

Type the command on the host of ronde run. With py-spy on each host (pip install
'ronde[monitor]') it also shows the stack of a stopped rank, and disturbs no rank.
"""


def run(words: Sequence[str]) -> int:
    parser = CommandParser("ronde why", _HELP, positionals={"jobs": "*"})
    options = parser.read(words)
    if options is None:
        return 0
    names: list[str] = list(filter(None, options.jobs))
    # A dump's name ends with its rank; train.py is a job's command.
    dumps = [n for n in names if n[-1].isdecimal() and ("/" in n or Path(n).exists())]
    if len(names) > 1 or dumps:
        return _judge_files(names, is_json=options.json)
    try:
        job = choose_job(list_jobs(), names[0] if names else None)
        if options.slow:
            return _judge_speed(job, is_json=options.json)
        inspected = inspect_workers(job)
    except OSError as error:
        raise LaunchError(f"the job ended or does not answer: {error}.") from None
    verdict = explain_hang(inspected.status, inspected.inspections)
    if options.json:
        plain = {
            "job": inspected.status.job._asdict(),
            "verdict": to_plain(verdict),
            "inspections": [*map(to_plain, inspected.inspections.values())],
            "kernel_lines": to_plain(inspected.kernel_lines),
            "silent_hosts": inspected.silent,
            "usages": {n: to_plain(each) for n, each in inspected.usages.items()},
        }
        print(json.dumps(plain))
        return 0
    print(draw_hang(inspected, verdict), end="")
    if options.stacks:
        print("\n" + draw_stacks([*inspected.inspections.values()]), end="")
    return 0


def _judge_speed(job: JobStatus, *, is_json: bool) -> int:
    # Imported late: most questions are about a hang.
    from ronde.monitor.slow import explain_slow

    seen = observe_job(job)
    faults = explain_slow(seen)
    if is_json:
        plain = {"faults": to_plain(faults), "view": to_plain(seen.view)}
        print(json.dumps(plain))
    else:
        print(draw_slow(seen.view, faults), end="")
    return 0


def _judge_files(paths: Sequence[str], *, is_json: bool) -> int:
    # Imported late: a running job needs no pickle.
    from ronde.monitor.flight import explain_dumps, read_dumps

    dumps = read_dumps(paths)
    verdict = explain_dumps(dumps)
    if is_json:
        print(json.dumps({"verdict": to_plain(verdict)}))
    else:
        print(draw_dumps(verdict, len(dumps)), end="")
    return 0
