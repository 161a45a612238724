"""Views of a running job, about one a second."""

from collections.abc import Generator
from contextlib import suppress

from ronde.launch.status import JobConnection
from ronde.monitor.view import JobWatcher, WatchedJob
from ronde.status.table import JobStatus


def watch_job(status: JobStatus) -> Generator[WatchedJob]:
    """Yield a view of a job about once a second, until the job is over.

    Rates exist from the third view on. Closing the generator does not affect the job.

    Raises:
        OSError: The job does not answer for 10 s, or belongs to another user.
        LaunchError: The job runs with another version of ronde.
    """
    watcher = JobWatcher(status)
    is_over = suppress(ConnectionError, FileNotFoundError)
    with is_over, JobConnection(status.socket) as job:
        for news in job:
            watcher.add(news)
            if isinstance(news, JobStatus):
                with suppress(ConnectionError):  # this is the last table
                    job.send({"ask": "usage"})
                yield watcher.view()
