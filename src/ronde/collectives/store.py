"""The job's store as one of torch's."""

import secrets
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

from torch.distributed import PrefixStore, Store

from ronde.collectives.scope import AbortScope
from ronde.errors import CollectiveError, StoreError
from ronde.store.authentication import SharedKey, dial_network
from ronde.store.client import PlainConnection, StoreClient
from ronde.store.local_socket import dial
from ronde.store.protocol import Op
from ronde.world import RankInfo

_PLACE = "ronde/place"
_MANY = 128  # places that are asked for at once: a reply is at most 16 MiB long


class JobStore(Store):
    """What the ranks of a job meet in; means what ``TCPStore`` means."""

    # Any number of threads may call at once, so that ``clone()`` is this very object.
    # It must be kept: torch forgets what it was when Python drops it.
    # torch's groups call it from threads of their own, which take the interpreter's
    # lock. One that still asks when the interpreter ends would hang or crash there:
    # groups are closed before, by ``atexit``. Gloo asks only while a group is being
    # made; NCCL has a monitor that asks now and then, which could not be tried without
    # a GPU.

    def __init__(
        self,
        connect: Callable[[float], PlainConnection],
        timeout_s: float,
        address: str,
        scope: AbortScope | None = None,
    ) -> None:
        super().__init__()
        self.set_timeout(timedelta(seconds=timeout_s))
        self.address = address
        self.scope = scope or AbortScope()
        self._client = StoreClient(connect)
        self.scope.add(self._client.end)

    def _ask(
        self, op: Op, *fields: str | bytes, timeout: timedelta | None = None
    ) -> tuple[bytes, ...]:
        own: Any = self  # torch's stub does not know its timeout
        limit_s = (timeout or own.timeout).total_seconds()
        return self._client.ask(op, fields, limit_s)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(Op.SET, key, value)

    def get(self, key: str) -> bytes:
        return self._ask(Op.GET, key)[0]

    def add(self, key: str, value: int) -> int:
        return int(self._ask(Op.ADD, key, str(value))[0])

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        return self._ask(Op.COMPARE_SET, key, expected_value, desired_value)[0]

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(Op.CHECK, *keys) == (b"1",)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        if keys:
            self._ask(Op.WAIT, *keys, timeout=timeout)

    def delete_key(self, key: str) -> bool:
        return self._ask(Op.DELETE, key) == (b"1",)

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(Op.APPEND, key, value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [*self._ask(Op.GET, *keys)] if keys else []

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        pairs = zip(keys, values, strict=True)
        self._ask(Op.SET, *(field for pair in pairs for field in pair))

    def num_keys(self) -> int:
        return int(self._ask(Op.COUNT)[0])

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> "JobStore":
        return self  # each call has a connection of its own

    # torch's C++ asks for these two by other names than Python has them.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815


def clone_of(store: Store) -> Store:
    """Return the same with a connection of its own.

    Whoever waits in a store blocks all others on its connection: threads that connect
    at the same time have a clone each.
    """
    return cast("Any", store).clone()  # torch's stub does not know it


def base_of(store: Store) -> Any:  # noqa: ANN401  torch's have no common type
    """Return the store below all prefixes."""
    base: Any = store
    while isinstance(base, PrefixStore):
        base = base.underlying_store
    return base


def scope_of(store: Store) -> AbortScope:
    """Return the scope of what meets in a store."""
    base = base_of(store)
    return base.scope if isinstance(base, JobStore) else AbortScope()


def get_all(store: Store, keys: list[str], limit: timedelta) -> list[bytes]:
    """Return the values of keys once all are there."""
    base = base_of(store)
    # A job's store waits by itself, but for as long as it has been given.
    if isinstance(base, JobStore) and cast("Any", base).timeout <= limit:
        try:
            return store.multi_get(keys)
        except StoreError:  # late, or gone
            if cast("Any", base).timeout == limit:
                raise
    store.wait(keys, limit)
    return store.multi_get(keys)


class RendezvousStore(Store):
    """Where a group's ranks tell each other their places, each under its number.

    Gloo asks for one rank after the other, twice. Here the first to be asked for brings
    all. It must be kept, like ``JobStore``.
    """

    def __init__(self, store: Store, size: int) -> None:
        super().__init__()
        self._store, self._size = store, size
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, cast("str", value))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit = timeout or cast("Any", self).timeout
        for key in keys:
            if key not in self._known:
                own = key.rpartition("/")[2]
                first = int(own) // _MANY * _MANY
                numbers = range(first, min(first + _MANY, self._size))
                asked = [f"{key.removesuffix(own)}{number}" for number in numbers]
                values = get_all(self._store, asked, limit)
                self._known.update(zip(asked, values, strict=True))

    def get(self, key: str) -> bytes:
        value = self._known.pop(key, None)  # Gloo asks once, and they are many
        return self._store.get(key) if value is None else value


def store_at(
    path: str, timeout_s: float, address: str = "", scope: AbortScope | None = None
) -> JobStore:
    def connect(limit_s: float) -> PlainConnection:
        try:
            return PlainConnection(dial(path, limit_s))
        except (FileNotFoundError, PermissionError) as error:
            raise StoreError(
                f"the store's socket {path} must be within reach of the rank, but: "
                f"{error.strerror or error}; run the rank as the user of its launcher, "
                "and where it is in a container, share /tmp with its launcher"
            ) from error

    return JobStore(connect, timeout_s, address, scope)


def store_beyond(
    address: str,
    port: int,
    key: SharedKey,
    timeout_s: float,
    scope: AbortScope | None = None,
) -> JobStore:
    def connect(limit_s: float) -> PlainConnection:
        return dial_network(address, port, key, limit_s)

    return JobStore(connect, timeout_s, address, scope)


def join(store: JobStore, info: RankInfo) -> bool:
    """Take this rank's place in a store; False if it is an earlier program's."""
    own = secrets.token_hex(8).encode()
    return store.compare_set(f"{_PLACE}/{info.rank}", b"", own) == own


def await_all(store: JobStore, info: RankInfo, timeout_s: float) -> None:
    places = [f"{_PLACE}/{rank}" for rank in range(info.size)]
    try:
        store.wait(places, timedelta(seconds=timeout_s))
    except StoreError as error:
        absent = [rank for rank, key in enumerate(places) if not store.check([key])]
        raise CollectiveError(
            f"{info.size} ranks must meet within {timeout_s:g} s, got no word from "
            f"ranks {absent[:8]} ({len(absent)} in all). See whether they "
            "started; if they run elsewhere, set MASTER_ADDR and MASTER_PORT."
        ) from error
