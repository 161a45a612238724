"""``ronde why``: the ranks that hold up a job, and the reasons."""

import json
from collections.abc import Sequence

from ronde.arguments import CommandParser
from ronde.monitor.asking import take_picture
from ronde.monitor.verdict import judge
from ronde.plain_values import to_plain
from ronde.render.why import draw_stacks, draw_verdict

_HELP = """\
usage: ronde why [JOB] [--stacks] [--json]

Say which ranks hold up a running job, at which line, and why. The job goes on. Without
JOB, a job id or a part of it, it is your only job on this host.

options:
  --stacks    show the stack of each rank as well
  --json      print everything as one JSON object
  -h, --help  show this help and exit

Stacks need py-spy on each host: pip install 'ronde[monitor]'. Type the command on the
host of ronde run.
"""


def run(words: Sequence[str]) -> int:
    options = CommandParser("ronde why", _HELP, positionals={"job": "?"}).read(words)
    if options is None:
        return 0
    picture = take_picture(options.job)
    verdict = judge(picture.status, picture.looks)
    if options.json:
        plain = {
            "job": picture.status.job._asdict(),
            "verdict": to_plain(verdict),
            "looks": [to_plain(look) for look in picture.looks.values()],
            "silent_hosts": picture.silent,
        }
        print(json.dumps(plain))
        return 0
    print(draw_verdict(picture, verdict), end="")
    if options.stacks:
        print("\n" + draw_stacks([*picture.looks.values()]), end="")
    return 0
