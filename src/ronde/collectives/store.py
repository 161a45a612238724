"""The job's store, as a ``torch.distributed.Store``."""

import secrets
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, cast

from torch.distributed import PrefixStore, Store

from ronde.collectives.scope import AbortScope
from ronde.errors import CollectiveError, StoreError
from ronde.store.authentication import SharedKey, dial_network
from ronde.store.client import PlainConnection, StoreClient
from ronde.store.local_socket import dial
from ronde.store.protocol import Op
from ronde.world import RankInfo

_JOINED = "ronde/joined"
_MANY = 128  # addresses in one request: a reply has at most 16 MiB


class JobStore(Store):
    """The store of a job's ranks, with the behaviour of ``TCPStore``."""

    # Any number of threads may call at once, so ``clone()`` returns this object. It
    # must be kept alive: torch loses its Python methods when Python frees it. torch's
    # groups call it from their own threads, which take the interpreter's lock. Such a
    # call would hang or crash while the interpreter exits, so ``atexit`` closes groups
    # before. Gloo calls it only while it connects a group. NCCL's monitor calls it now
    # and then, which is untested for lack of a GPU.

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
        own: Any = self  # torch's stub lacks the timeout
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
        return self  # each call has its own connection

    # The names by which torch's C++ calls these two.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815


def clone_of(store: Store) -> Store:
    """Return a clone of a store, on which waits do not block calls on the original.

    A wait in a ``TCPStore`` blocks all other calls on its connection, so threads that
    connect at the same time need a clone each.
    """
    return cast("Any", store).clone()  # missing in torch's stub


def base_of(store: Store) -> Any:  # noqa: ANN401  torch's have no common type
    base: Any = store
    while isinstance(base, PrefixStore):
        base = base.underlying_store
    return base


def scope_of(store: Store) -> AbortScope:
    base = base_of(store)
    return base.scope if isinstance(base, JobStore) else AbortScope()


def get_all(store: Store, keys: list[str], limit: timedelta) -> list[bytes]:
    base = base_of(store)
    # A job's store applies its own timeout when it waits.
    if isinstance(base, JobStore) and cast("Any", base).timeout <= limit:
        try:
            return store.multi_get(keys)
        except StoreError:  # timed out, or the store is gone
            if cast("Any", base).timeout == limit:
                raise
    store.wait(keys, limit)
    return store.multi_get(keys)


class RendezvousStore(Store):
    """Prefetching store in which a Gloo group exchanges addresses.

    Gloo reads one rank's address after the other, twice. A read here fetches many
    addresses at once. The store must be kept alive, like ``JobStore``.
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
        value = self._known.pop(key, None)  # freed: Gloo reads it only once
        return self._store.get(key) if value is None else value


def store_at(
    path: str, timeout_s: float, address: str = "", scope: AbortScope | None = None
) -> JobStore:
    def connect(limit_s: float) -> PlainConnection:
        try:
            return PlainConnection(dial(path, limit_s))
        except (FileNotFoundError, PermissionError) as error:
            raise StoreError(
                f"cannot open the store's socket {path}: {error.strerror or error}; "
                "run the rank as the user of its launcher, and if it is in a "
                "container, share /tmp with its launcher"
            ) from error

    return JobStore(connect, timeout_s, address, scope)


def remote_store(
    address: str,
    port: int,
    key: SharedKey,
    timeout_s: float,
    scope: AbortScope | None = None,
) -> JobStore:
    return JobStore(
        partial(dial_network, address, port, key), timeout_s, address, scope
    )


def join(store: JobStore, info: RankInfo) -> bool:
    """Register this rank in a store; return False if it was registered before."""
    own = secrets.token_hex(8).encode()
    return store.compare_set(f"{_JOINED}/{info.rank}", b"", own) == own


def await_all(store: JobStore, info: RankInfo, timeout_s: float) -> None:
    keys = [f"{_JOINED}/{rank}" for rank in range(info.size)]
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except StoreError as error:
        absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise CollectiveError(
            f"{len(absent)} of {info.size} ranks did not join within {timeout_s:g} s: "
            f"{absent[:8]}. Check that they started; if they run elsewhere, set "
            "MASTER_ADDR and MASTER_PORT."
        ) from error
