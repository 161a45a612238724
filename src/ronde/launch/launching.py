"""A job from the user's wish to the verdict."""

from dataclasses import replace
from typing import NamedTuple

from ronde.launch.arranging import Wish, arrange
from ronde.launch.chronicle import Chronicle
from ronde.launch.controller import Arrangement, Controller, Restarts
from ronde.launch.hiring import Hiring
from ronde.launch.lineage import adopt_orphans
from ronde.launch.output_process import OutputProcess
from ronde.launch.signals import InterruptedStartError, interruption_code
from ronde.launch.sink import Sink, Unseen
from ronde.launch.start_progress import StartProgress
from ronde.launch.verdict import Verdict


class Undertaking(NamedTuple):
    """How a job is gone about.

    Attributes:
        name: Begins its id.
        restarts: When all ranks are started again.
        chronicle: Writes down what happens.
        is_verbose: Say how long each step of the start takes.
    """

    name: str
    restarts: Restarts
    chronicle: Chronicle
    is_verbose: bool = False


def launch(
    wish: Wish, sink: Sink, hiring: Hiring, signal_fd: int, job: Undertaking
) -> Verdict:
    """Run a job on all its hosts to its end, whatever that is.

    Guarantees that when it returns or raises, no process of the job is left on this
    host, but those that the kernel does not let die, which were named; on other hosts
    none is left either, at the latest when their agents' lease is over.

    Args:
        wish: What to run where.
        sink: Shows and writes all output, in a process of its own.
        hiring: How hosts get agents, which end here.
        signal_fd: From ``signals.caught_signals``: reads the user's signals.
        job: How to go about it.

    Raises:
        UsageError: The job cannot be started as it was asked for; nothing was started.
        LaunchError: An agent failed, or hosts cannot take part (HostError).
    """
    adopt_orphans()
    output = OutputProcess(sink, job.chronicle)
    progress = StartProgress(output.notice, is_verbose=job.is_verbose)
    controller = Controller(output, signal_fd, hiring, progress)
    try:
        try:
            arrangement = arrange(controller, wish, job.name)
            verdict = controller.run(arrangement, job.restarts)
        except InterruptedStartError as error:
            verdict = Verdict(
                interruption_code(error.number), None, (), (), error.number
            )
            output.finished(verdict)
        finally:
            controller.close()
    except BaseException:
        # What came before stands before the error.
        controller.write_out(is_hurried=True)
        raise
    unread = controller.write_out(is_hurried=verdict.interrupted_by is not None)
    if verdict.exit_code == 0 and unread:
        return replace(verdict, exit_code=128 + unread)
    return verdict


def rehearse(
    wish: Wish,
    hiring: Hiring,
    signal_fd: int,
    *,
    name: str,
    progress: StartProgress,
) -> Arrangement:
    """Return what ``launch`` would run where; start agents, but no rank.

    Args:
        wish: As for ``launch``.
        hiring: As for ``launch``.
        signal_fd: As for ``launch``.
        name: Begins the job's id.
        progress: Says what is waited for.

    Raises:
        UsageError: The job cannot be started so.
        LaunchError: An agent failed, or hosts cannot take part (HostError).
        InterruptedStartError: The user has ended it.
    """
    adopt_orphans()
    controller = Controller(Unseen(), signal_fd, hiring, progress)
    try:
        return arrange(controller, wish, name)
    finally:
        controller.close()
