"""``ronde ps``: the jobs of this user on this host, and the status of their ranks."""

import json
from collections.abc import Sequence

from ronde.arguments import CommandParser
from ronde.launch.status import find_sockets, list_jobs
from ronde.plain_values import to_plain
from ronde.render.jobs import draw_jobs
from ronde.units import counted

_HELP = """\
usage: ronde ps [--all] [--json]

List the jobs that you started on this host, and the status of each rank: its step, the
oldest collective that it is in, for how long, and the ranks that it waits for. If a job
has more than 32 ranks, show its hosts and the ranks to look at first.

options:
  --all       show all ranks
  --json      print everything as one JSON object
  -h, --help  show this help and exit

Ranks report after hvd.init() of ronde.torch, or after init_process_group("ronde"). Type
the command on the host of ronde run.
"""


def run(words: Sequence[str]) -> int:
    options = CommandParser("ronde ps", _HELP).read(words)
    if options is None:
        return 0
    before, jobs = set(find_sockets()), list_jobs()
    if options.json:
        plain = [
            {
                **job.job._asdict(),
                "version": job.version,
                "socket": str(job.socket),
                "workers": [to_plain(worker) for worker in job.workers],
                "awaited_ranks": job.find_awaited(),
            }
            for job in jobs
        ]
        print(json.dumps({"jobs": plain}))
        return 0
    print(draw_jobs(jobs, is_complete=options.all), end="")
    # Without the jobs that began or ended meanwhile.
    if silent := (before & set(find_sockets())) - {job.socket for job in jobs}:
        print(f"{counted(len(silent), 'more job')} did not answer.")
    return 0
