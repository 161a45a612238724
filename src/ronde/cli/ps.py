"""``ronde ps``: this user's jobs on this host, and what their ranks do now."""

import json
from collections.abc import Sequence

from ronde.arguments import CommandParser
from ronde.launch.status import find_sockets, list_jobs
from ronde.plain_values import to_plain
from ronde.render.jobs import draw_jobs
from ronde.units import counted

_HELP = """\
usage: ronde ps [--all] [--json]

List your jobs that were started on this host, and what each rank does now: its step,
the oldest collective that it is in, for how long, and the ranks that it waits for.
Of more than 32 ranks only hosts and the ranks to look at first are shown.

options:
  --all       show all ranks
  --json      print one JSON object with all that is known
  -h, --help  show this help and exit

Ranks report once they have called hvd.init() of ronde.torch or made a process group of
the backend ronde. Run the command on the host of ronde run.
"""


def run(words: Sequence[str]) -> int:
    options = CommandParser("ronde ps", _HELP).read(words)
    if options is None:
        return 0
    jobs = list_jobs()
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
    if silent := set(find_sockets()) - {job.socket for job in jobs}:
        print(f"{counted(len(silent), 'more job')} of yours did not answer.")
    return 0
