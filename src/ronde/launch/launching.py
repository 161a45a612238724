"""A job from the user's wish to the verdict."""

from ronde.launch.arranging import Wish, arrange
from ronde.launch.controller import Controller, Restarts
from ronde.launch.gathering import InterruptedStartError
from ronde.launch.hiring import Hiring
from ronde.launch.lineage import adopt_orphans
from ronde.launch.sink import Sink
from ronde.launch.verdict import Verdict


def launch(
    wish: Wish,
    sink: Sink,
    hiring: Hiring,
    signal_fd: int,
    *,
    name: str,
    restarts: Restarts | None = None,
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
        name: Begins the job's id.
        restarts: When all ranks are started again; None for never.

    Raises:
        UsageError: The job cannot be started as it was asked for; nothing was started.
        LaunchError: An agent failed, or hosts cannot take part (HostError).
    """
    adopt_orphans()
    controller = Controller(sink, signal_fd, hiring)
    try:
        arrangement = arrange(controller, wish, name)
        verdict = controller.run(arrangement, restarts or Restarts())
    except InterruptedStartError as error:
        return Verdict(128 + error.number, None, (), (), error.number)
    finally:
        controller.close()
    return controller.write_out(verdict)
