"""What matrices of nvidia-smi's say of pairs of devices, put together."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ronde.topology.probes.nvidia_smi_matrices import GPU_NAME, Matrix

_PEER = re.compile(r"OK|CNS|GNS|TNS|NS|DR|U")
_BONDED = re.compile(r"NV([0-9]+)")


class Pairs(NamedTuple):
    """What is told of pairs.

    Attributes:
        words: Path and access by the pair of names, each pair once, in the order of the
            columns; empty where not told.
        remarks: Where matrices contradict themselves or one another.
    """

    words: dict[tuple[str, str], tuple[str, str]]
    remarks: list[str]

    def bonds(self) -> Mapping[int, Mapping[int, int]]:
        """Return how many NVLinks join GPUs, by the numbers of both."""
        found: defaultdict[int, dict[int, int]] = defaultdict(dict)
        for names, (path, _) in self.words.items():
            gpus = [match for name in names if (match := GPU_NAME.fullmatch(name))]
            bonded = _BONDED.fullmatch(path)
            if bonded and len(gpus) == 2:
                a, b = (int(match[1]) for match in gpus)
                found[a][b] = found[b][a] = int(bonded[1])
        return found


def read_pairs(matrices: Iterable[Matrix]) -> Pairs:
    """Return what matrices say of each pair.

    One that leaves NVLinks out, as ``topo -mp`` does, contradicts no other.
    """
    pairs = Pairs({}, [])
    for matrix in matrices:
        for names, word in _pairs_of(matrix, pairs.remarks):
            back = names[1], names[0]
            pair = back if back in pairs.words else names
            path, peer = pairs.words.get(pair, ("", ""))
            if _PEER.fullmatch(word):
                peer = _settle(peer, word, pair, pairs.remarks)
            elif bool(_BONDED.fullmatch(path)) == bool(_BONDED.fullmatch(word)):
                path = _settle(path, word, pair, pairs.remarks)
            elif not _BONDED.fullmatch(path):
                path = word
            pairs.words[pair] = path, peer
    return pairs


def _pairs_of(
    matrix: Matrix, remarks: list[str]
) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield each pair and the word on it."""
    names = list(matrix.columns)
    for place, source in enumerate(names):
        for other in range(place + 1, len(names)):
            target = names[other]
            there, back = matrix.rows.get(source), matrix.rows.get(target)
            words = [
                word
                for word in (
                    there.words[other] if there else "",
                    back.words[place] if back else "",
                )
                if word
            ]
            if words:
                pair = source, target
                yield pair, _settle(words[0], words[-1], pair, remarks)


def _settle(first: str, second: str, pair: tuple[str, str], remarks: list[str]) -> str:
    """Return what was told first, and note where the second contradicts it."""
    if first and first != second:
        remarks.append(f"{pair[0]} and {pair[1]} are told {first} and {second}.")
    return first or second
