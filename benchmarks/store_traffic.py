"""How fast ranks without torch exchange through the store of ``ronde run``.

    ronde run -n 64 -- python benchmarks/store_traffic.py

Each round every rank sets a key of its own, waits for those of all and gets them: three
requests a rank, as a process group or a segment of shared memory needs them. Rank 0
writes a line of JSON: the median of the rounds, and how many requests a second that is.
"""

import json
import os
import statistics
import time

from ronde.store.client import PlainConnection, StoreClient
from ronde.store.local_socket import dial
from ronde.store.protocol import Op

NUM_ROUNDS = 15
VALUE = b"x" * 200
LIMIT_S = 120.0


def main() -> None:
    """Take part in all rounds; tell on rank 0."""
    environ = os.environ  # noqa: TID251  a program of its own
    path, rank, size = (
        environ["RONDE_STORE"],
        int(environ["RANK"]),
        environ["WORLD_SIZE"],
    )
    store = StoreClient(lambda limit_s: PlainConnection(dial(path, limit_s)))
    seconds: list[float] = []
    for number in range(NUM_ROUNDS + 1):
        keys = [f"{number}/{other}" for other in range(int(size))]
        started = time.perf_counter()
        store.ask(Op.SET, [keys[rank], VALUE], LIMIT_S)
        store.ask(Op.WAIT, keys, LIMIT_S)
        if store.ask(Op.GET, keys, LIMIT_S) != (VALUE,) * len(keys):
            raise SystemExit("all ranks must get what the others have set")
        seconds.append(time.perf_counter() - started)
    if rank == 0:
        # The first round waits for the last rank to start.
        median_s = statistics.median(seconds[1:])
        told = {"ranks": int(size), "round_ms": round(1e3 * median_s, 2)}
        told["requests_per_s"] = round(3 * int(size) / median_s)
        print(json.dumps(told))


if __name__ == "__main__":
    main()
