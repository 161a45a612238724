"""What happened to a job, as records for ``--record``."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ronde.errors import UsageError
from ronde.launch.job import RankPlan
from ronde.launch.sink import Generation
from ronde.launch.verdict import LostHost, Verdict
from ronde.topology.machine import UNKNOWN_NODE

_DEVICES = "CUDA_VISIBLE_DEVICES"


class Chronicle:
    """Appends a job's records to a file; one without a file does nothing.

    A record that cannot be written is told once, and the job goes on without.

    Args:
        path: The file, or empty.
        notice: Takes one sentence for the user.
    """

    def __init__(self, path: str, notice: Callable[[str], None]) -> None:
        self._path = path
        self._notice = notice
        self._began_at_s = 0.0
        self._generation: Generation | None = None

    def planned(
        self, job_id: str, argv: Sequence[str], places: Sequence[tuple[str, RankPlan]]
    ) -> None:
        """Record the job and what each rank has.

        Args:
            job_id: Name of the job.
            argv: What is run.
            places: The host and plan of each rank, by rank. Of a rank's environment
                only the GPUs are recorded: the rest may hold secrets.

        Raises:
            UsageError: The file cannot be written.
        """
        if not self._path:
            return
        plan = [_describe_place(host, plan) for host, plan in places]
        values = {"job_id": job_id, "argv": list(argv), "size": len(plan)}
        hosts = list(dict.fromkeys(host for host, _ in places))
        try:
            self._append([("job", {**values, "hosts": hosts, "plan": plan})])
        except OSError as error:
            raise UsageError(
                f"--record must be a file that can be written, got {self._path!r} "
                f"({error.strerror}). Name another."
            ) from None

    def began(self, generation: Generation, timings: Mapping[str, float]) -> None:
        """Record that all ranks of a generation run.

        Args:
            generation: Which.
            timings: How long each step of the start took, in seconds, by name:
                ``agents_s``, ``ready_s``, ``ranks_s``.
        """
        self._generation = generation
        self._began_at_s = time.monotonic()
        values = {
            "job_id": generation.job_id,
            "epoch": generation.epoch,
            "hosts": list(generation.hosts),
            "timings": {name: round(value, 6) for name, value in timings.items()},
        }
        self._try_append([("generation", values)])

    def ended(self, verdict: Verdict) -> None:
        """Record how the ranks of the generation that began last ended, and why."""
        generation, self._generation = self._generation, None
        if generation is None or not self._path:
            return
        # Most jobs start without a record, and at once.
        from ronde.launch.report import describe_end, describe_lost, describe_verdict

        which = {"job_id": generation.job_id, "epoch": generation.epoch}
        lost = [
            each
            for each in (verdict.cause, *verdict.also_lost)
            if isinstance(each, LostHost)
        ]
        ran_s = round(time.monotonic() - self._began_at_s, 6)
        self._try_append(
            [
                *(("rank_end", which | describe_end(end)) for end in verdict.ends),
                *(("host_lost", which | describe_lost(host)) for host in lost),
                (
                    "generation_end",
                    which | {"ran_s": ran_s} | describe_verdict(verdict),
                ),
            ]
        )

    def _try_append(self, entries: Sequence[tuple[str, Mapping[str, object]]]) -> None:
        try:
            self._append(entries)
        except OSError as error:
            self._notice(f"--record {self._path} is not written on: {error.strerror}")
            self._path = ""

    def _append(self, entries: Sequence[tuple[str, Mapping[str, object]]]) -> None:
        if not self._path:
            return
        from ronde.records import Machine, Record, append_record

        machine = Machine.here()
        for kind, values in entries:
            record = Record(kind, values, machine=machine)
            # Commands may hold secrets.
            append_record(Path(self._path), record, is_private=True)


def _describe_place(host: str, plan: RankPlan) -> dict[str, object]:
    is_known = plan.memory_node != UNKNOWN_NODE
    return {
        "rank": plan.rank,
        "host": host,
        "cpus": list(plan.cpus),
        "memory_node": plan.memory_node if is_known else None,
        "gpus": plan.env.get(_DEVICES),
    }
