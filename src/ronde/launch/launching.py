"""A job from the user's wish to the verdict."""

from typing import NamedTuple

from ronde.launch.arranging import Wish, arrange
from ronde.launch.chronicle import Chronicle
from ronde.launch.controller import Arrangement, Controller, Restarts
from ronde.launch.gathering import InterruptedStartError
from ronde.launch.hiring import Hiring
from ronde.launch.lineage import adopt_orphans
from ronde.launch.sink import Sink, Unseen
from ronde.launch.verdict import Verdict


class Undertaking(NamedTuple):
    """How a job is gone about.

    Attributes:
        name: Begins its id.
        restarts: When all ranks are started again.
        chronicle: Takes note of what happens.
    """

    name: str
    restarts: Restarts
    chronicle: Chronicle


def launch(
    wish: Wish, sink: Sink, hiring: Hiring, signal_fd: int, job: Undertaking
) -> Verdict:
    """Run a job on all its hosts to its end, whatever that is.

    Guarantees that when it returns or raises, no process of the job is left on this
    host, but those that the kernel does not let die, which were named; on other hosts
    none is left either, at the latest when their agents' lease is over.

    Args:
        wish: What to run where.
        sink: Gets all output.
        hiring: How hosts get agents, which end here.
        signal_fd: From ``signals.caught_signals``: reads the user's signals.
        job: How to go about it.

    Raises:
        UsageError: The job cannot be started as it was asked for; nothing was started.
        LaunchError: An agent failed, or hosts cannot take part (HostError).
    """
    adopt_orphans()
    controller = Controller(sink, signal_fd, hiring)
    try:
        arrangement = arrange(controller, wish, job.name)
        verdict = controller.run(arrangement, job.restarts, job.chronicle)
    except InterruptedStartError as error:
        verdict = Verdict(128 + error.number, None, (), (), error.number)
        sink.finished(verdict)
    finally:
        controller.close()
    return controller.write_out(verdict)


def rehearse(wish: Wish, hiring: Hiring, signal_fd: int, *, name: str) -> Arrangement:
    """Return what ``launch`` would run where; start agents, but no rank.

    Args:
        wish: As for ``launch``.
        hiring: As for ``launch``.
        signal_fd: As for ``launch``.
        name: Begins the job's id.

    Raises:
        UsageError: The job cannot be started so.
        LaunchError: An agent failed, or hosts cannot take part (HostError).
        InterruptedStartError: The user has ended it.
    """
    adopt_orphans()
    controller = Controller(Unseen(), signal_fd, hiring)
    try:
        return arrange(controller, wish, name)
    finally:
        controller.close()
