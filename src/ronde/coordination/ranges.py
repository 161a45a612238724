"""Sets of ranks: as bits of a number, as text, and in words."""


def bits_of(number: int) -> list[int]:
    """Return the places of the bits that are set, ascending."""
    places: list[int] = []
    while number:
        lowest = number & -number
        places.append(lowest.bit_length() - 1)
        number ^= lowest
    return places


def encode_ranks(ranks: int) -> str:
    """Write a set of ranks as ranges: ``0-63,70``."""
    parts: list[str] = []
    start = 0
    while ranks:
        skip = (ranks & -ranks).bit_length() - 1
        ranks >>= skip
        start += skip
        # The run of ones at the bottom ends where adding one carries to.
        run = (~ranks & (ranks + 1)).bit_length() - 1
        parts.append(str(start) if run == 1 else f"{start}-{start + run - 1}")
        ranks >>= run
        start += run
    return ",".join(parts)


def decode_ranks(text: str) -> int:
    """Read what ``encode_ranks`` wrote."""
    ranks = 0
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        num_ranks = int(last or first) - int(first) + 1
        ranks |= ((1 << num_ranks) - 1) << int(first)
    return ranks


def format_ranks(ranks: int) -> str:
    """Name a set of ranks in a message: ``rank 3``, ``ranks 0-63,70``."""
    return ("rank " if ranks.bit_count() == 1 else "ranks ") + encode_ranks(ranks)
