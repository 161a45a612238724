"""The programs of one rank, compiled once: training asks for the same in every step."""

from dataclasses import dataclass
from functools import lru_cache

from ronde.collectives.algorithms import ALGORITHMS
from ronde.collectives.engines.scheduled.program import Message, compile_program
from ronde.collectives.schedule import Chunks, Schedule

Program = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Programs:
    """What one rank does in each collective of an algorithm.

    Attributes:
        algorithm: Its name.
        rank: This process.
        size: Number of processes.
        piece_bytes: The longest message.
    """

    algorithm: str
    rank: int
    size: int
    piece_bytes: int

    def all_reduce(self, numel: int, element_bytes: int) -> Program:
        """Return the program for a vector of ``numel`` elements."""
        return _compiled(self, "all_reduce", (numel,), element_bytes)

    def reduce_scatter(self, sizes: tuple[int, ...], element_bytes: int) -> Program:
        """Return the program for chunks of ``sizes`` elements, one a rank."""
        return _compiled(self, "reduce_scatter", sizes, element_bytes)

    def all_gather(self, sizes: tuple[int, ...]) -> Program:
        """Return the program for chunks of ``sizes`` bytes, one a rank."""
        return _compiled(self, "all_gather", sizes, 1)

    def broadcast(self, num_bytes: int, root: int) -> Program:
        """Return the program for a vector of bytes."""
        return _compiled(self, "broadcast", (num_bytes, root), 1)

    def schedule_of(self, collective: str, extent: tuple[int, ...]) -> Schedule:
        """Return the schedule behind a program."""
        algorithm = ALGORITHMS[self.algorithm]
        if collective == "all_reduce":
            return algorithm.all_reduce(self.size, extent[0])
        if collective == "broadcast":
            return algorithm.broadcast(self.size, extent[0], extent[1])
        chunks = Chunks.of_sizes(extent)
        if collective == "all_gather":
            return algorithm.all_gather(chunks)
        return algorithm.reduce_scatter(chunks)


@lru_cache(maxsize=512)
def _compiled(
    programs: Programs, collective: str, extent: tuple[int, ...], element_bytes: int
) -> Program:
    schedule = programs.schedule_of(collective, extent)
    return compile_program(
        schedule, programs.rank, programs.piece_bytes // element_bytes
    )
