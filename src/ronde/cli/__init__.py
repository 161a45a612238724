"""The commands: each turns its arguments into a library call and an exit code."""

from ronde.cli.entry import main
from ronde.lazy_exports import lazy_exports

__all__ = ["main"]
__getattr__ = lazy_exports(
    __name__,
    {
        "check": "judge_request read_check_request",
        "pods": "MachineFile PodName apply_pod find_pod",
        "run": "make_run_parser read_run_request",
        "top_screen": "JobScreen",
    },
)
