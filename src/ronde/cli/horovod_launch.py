"""``horovod.runner.launch``: horovodrun, called from Python."""

import argparse
import sys
from collections.abc import MutableMapping

from ronde.cli.horovodrun import read_horovod_options
from ronde.cli.run import make_run_parser
from ronde.horovod.launcher import run_job

__all__ = ["_run_elastic", "parse_args", "set_env_from_args"]

DISCOVER_HOSTS_FREQUENCY_SECS = 1.0


def parse_args() -> argparse.Namespace:
    """Parse this process's command line with horovodrun's options."""
    words = sys.argv[1:]
    options = make_run_parser().parse_args(words)
    options.words = words
    return options


def set_env_from_args(
    env: MutableMapping[str, str], args: argparse.Namespace
) -> MutableMapping[str, str]:
    """Add the variables that horovodrun's options set to ``env``."""
    env.update(read_horovod_options(args, env).env)
    return env


def _run_elastic(args: argparse.Namespace) -> None:
    """Run an elastic job.

    Raises:
        UsageError: An option is wrong; nothing was started.
        RuntimeError: The job failed.
    """
    words = [sys.executable, "-m", "ronde", "run"]
    if args.host_discovery_script is not None and args.discover_every is None:
        words += ["--discover-every", f"{DISCOVER_HOSTS_FREQUENCY_SECS}"]
    run_job([*words, *args.words])
