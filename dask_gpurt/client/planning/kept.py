"""Keep results of one kind: for this process in memory, and for others in the store."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

from dask_gpurt.client.planning.keys import digest_of
from dask_gpurt.client.planning.lru import LRU
from dask_gpurt.client.planning.store import Store

Value = TypeVar("Value")

#: Returns a key that is equal in all processes for equal results; None if there is none.
Content = Callable[[], Hashable | None]

#: How results are found: in memory, or in the store.
REUSED, LOADED = "reused", "loaded"


class Found(NamedTuple, Generic[Value]):
    """Hold a result that was sought.

    Attributes
    ----------
    value
        The result; None if there is none.
    how
        How it was found.
    digest
        What identifies it in the store.
    """

    value: Value | None
    how: str
    digest: bytes | None = None


class Generation(NamedTuple):
    """Identify the circumstances under which results are valid.

    Attributes
    ----------
    number
        Changes with the client and the settings, within this process.
    settings
        The settings, which other processes may have too.
    """

    number: int
    settings: tuple[str, ...]


class Kept(Generic[Value]):
    """Keep results of one kind by generation and key. Thread-safe.

    Parameters
    ----------
    kind
        The name of the kind.
    limit
        The most results in memory.
    store
        Returns the store; None if results are not kept for other processes.
    """

    def __init__(self, kind: str, limit: int, store: Callable[[], Store | None]):
        self._kind = kind
        self._memory: LRU[Value] = LRU(limit)
        self._store = store

    def get(self, generation: Generation, key: Hashable, content: Content) -> Found[Value]:
        """Find a result.

        Parameters
        ----------
        key
            Identifies the result in this process.
        content
            Returns what identifies it in all processes; None if nothing does.
        """
        found = self._memory.get((generation.number, key))
        if found is not None:
            return Found(found, REUSED)
        store = self._store()
        digest = None if store is None else self._digest(generation, content)
        if store is None or digest is None:
            return Found(None, LOADED)
        found = store.get(digest)
        if found is not None:
            self._memory.put((generation.number, key), found)
        return Found(found, LOADED, digest)

    def put(self, generation: Generation, key: Hashable, value: Value, sought: Found[Value]) -> None:
        """Keep a result that was not found, or is no longer valid."""
        self._memory.put((generation.number, key), value)
        if (store := self._store()) is not None and sought.digest is not None:
            store.put(sought.digest, value)

    def clear(self) -> None:
        """Drop the results in memory."""
        self._memory.clear()

    def _digest(self, generation: Generation, content: Content) -> bytes | None:
        # The address of an object in a setting may be that of another object in another process.
        if any(" at 0x" in setting for setting in generation.settings) or (found := content()) is None:
            return None
        return digest_of(self._kind, generation.settings, found)
