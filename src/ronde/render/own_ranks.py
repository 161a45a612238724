"""The console of a command that starts ranks of its own: one voice, not many."""

from dataclasses import replace

from ronde.launch.frames import Output, Stream
from ronde.launch.verdict import RankEnd, Verdict
from ronde.render.console import Console
from ronde.render.tags import Place, Tag

MAX_TOLD_CODE = 7
"""Exit codes up to this one are the command's own: the rank has said why."""


class OwnRanksConsole(Console):
    """Shows ranks as if they were one process; a ``launch.sink.Sink``.

    A sentence that several ranks say is shown once, and a rank that ends with one of
    the command's own codes is not explained again.
    """

    def __init__(self) -> None:
        super().__init__(1, 2, tag=Tag(Place.NONE))
        self._said: dict[bytes, int] = {}

    def output(self, output: Output, now_s: float) -> None:
        """Take output of a rank, but what another one has said in the same words."""
        data = output.data
        is_sentence = data.startswith(b"ronde: ") and data.endswith(b"\n")
        is_shown = output.stream is not Stream.STDERR or not is_sentence
        if is_shown or self._said.setdefault(data, output.rank) == output.rank:
            super().output(output, now_s)

    def finished(self, verdict: Verdict) -> None:
        """Queue unfinished lines and why it failed, where no rank could say it."""
        cause = verdict.cause
        is_rank = isinstance(cause, RankEnd)
        is_told = cause is None or (is_rank and 0 <= cause.status <= MAX_TOLD_CODE)
        is_stopped = verdict.interrupted_by is not None
        if is_told or is_stopped:
            verdict = replace(verdict, cause=None, also_failed=(), interrupted_by=None)
        super().finished(verdict)
