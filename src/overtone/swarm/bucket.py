"""The bucket: objects by path, each written once. The only module that touches `obstore`.

Everything else relies on one promise of the storage: of all who create an object of the same path, exactly one wins.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from overtone.errors import StoreError, shortened
from overtone.ledger import Count

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")
log = logging.getLogger(__name__)

INSTALL = "pip install 'overtone[swarm]'"
KINDS = "a folder, s3://bucket/path, gs://bucket/path, az://account/container/path or memory://name"
PATIENCE = 60.0  # seconds until a request that fails again and again is given up
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0  # seconds between two tries
PAGE = 1000  # objects that a storage lists, or deletes, in one request
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://")
_memories: dict[str, ObjectStore] = {}  # by name: several buckets of one process may share one, as tests do


class Bucket:
    """One run's objects. Safe to use from several threads.

    `count` has the bytes up and down, and the requests, which the storage bills. A request that fails is repeated for
    ``patience`` seconds, if another try may help. Whoever has better things to do than to wait sets that to 0.
    """

    def __init__(self, url: str, *, new: bool = True) -> None:
        """``new``: the place may be a new one. Otherwise a folder that does not exist is refused, and not made."""
        self.url = url
        self.patience = PATIENCE
        self._counts: dict[str, Count] = {}
        self._lock = threading.Lock()
        self._store = _open(url, new)

    @property
    def is_free(self) -> bool:
        """True if nobody bills its requests: a folder, or memory."""
        from obstore import store

        return isinstance(self._store, store.LocalStore | store.MemoryStore)

    def create(self, path: str, data: bytes) -> bool:
        """Write an object that is not there yet. Returns False if another one is there.

        An answer can get lost on its way. So if an object is there, it is compared: it may be this one.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        def put() -> bool:
            try:
                obstore.put(self._store, path, data, mode="create")
            except (AlreadyExistsError, PreconditionError):
                return False
            return True

        won = self._ask("create", path, put)
        self._add(path, Count(sent=len(data)))
        if won:
            return True
        there = self.read(path, len(data))
        if there is None:
            raise StoreError(f"store {self.url}: cannot create {path}: a folder is in its place, or was; delete it")
        return there == data

    def read(self, path: str, most: int | None = None) -> bytes | None:
        """The bytes of an object; None if it is not there. One of more than ``most`` bytes was put there by somebody
        else: it is not fetched, and reads as an empty one, which nobody believes."""
        import obstore

        def get() -> bytes | None:
            try:
                found = obstore.get(self._store, path)
            except FileNotFoundError:
                return None
            return b"" if most is not None and found.meta["size"] > most else bytes(found.bytes())

        found = self._ask("read", path, get)
        self._add(path, Count(received=len(found or b"")))
        return found

    def names(self, folder: str) -> dict[str, int]:
        """The names of all objects directly in a folder, with their sizes."""
        return {name: size for name, (size, _) in self.listed(folder).items()}

    def listed(self, folder: str) -> dict[str, tuple[int, str]]:
        """The names of all objects directly in a folder, each with its size and a mark that another object of that name
        would not have."""
        import obstore

        listed = self._ask("list", folder, lambda: obstore.list_with_delimiter(self._store, f"{folder}/"))
        return {
            str(entry["path"]).rpartition("/")[2]: (int(entry["size"]), f"{entry['e_tag']} {entry['last_modified']}")
            for entry in listed["objects"]
        }

    def folders(self, folder: str) -> list[str]:
        """The names of all folders directly in a folder, in order."""
        import obstore

        listed = self._ask("list", folder, lambda: obstore.list_with_delimiter(self._store, f"{folder}/"))
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in listed["common_prefixes"])

    def sizes(self, folder: str = "") -> dict[str, int]:
        """The paths of all objects below a folder, however deep, with their sizes; by default of all that there are."""
        import obstore

        def walk() -> dict[str, int]:
            batches = obstore.list(self._store, folder or None, chunk_size=PAGE)
            return {str(entry["path"]): int(entry["size"]) for batch in batches for entry in batch}

        found = self._ask("list", folder, walk)
        self._add(folder, Count(requests=len(found) // PAGE))
        return found

    def remove(self, path: str) -> None:
        """Delete an object. If it is not there, nothing happens."""
        import obstore

        def delete() -> None:
            try:
                obstore.delete(self._store, path)
            except FileNotFoundError:
                return

        self._ask("delete", path, delete)

    def remove_all(self, paths: Sequence[str]) -> None:
        """Delete several objects, with few requests where the storage can do that."""
        import obstore

        def delete(some: Sequence[str]) -> None:
            with suppress(FileNotFoundError):  # of a folder only: it stops at the first that is not there
                obstore.delete(self._store, some)
                return
            for path in some:
                self.remove(path)

        for begin in range(0, len(paths), PAGE):
            some = paths[begin : begin + PAGE]
            self._ask("delete", f"{some[0]} and others", lambda some=some: delete(some))  # type: ignore[misc]

    def count(self, folder: str | None = None) -> Count:
        """Bytes and requests of the objects below a folder, or of one object that lies in none; by default of all."""
        total = Count()
        with self._lock:
            for name, one in self._counts.items():
                if folder in (None, name):
                    total.add(one)
        return total

    def _ask(self, what: str, path: str, request: Callable[[], T]) -> T:
        end, pause = time.monotonic() + self.patience, FIRST_PAUSE
        while True:
            self._add(path, Count(requests=1))
            try:
                return request()
            except Exception as error:  # obstore has errors of many kinds, and none of them may end a thread
                why = f"store {self.url}: cannot {what} {path}: {shortened(str(error).partition(chr(10))[0])}"
                if time.monotonic() + pause > end or _is_for_good(error):
                    raise StoreError(why) from error
            if pause == FIRST_PAUSE:
                log.warning("%s; it is asked again, for up to %.0f s", why, self.patience)
            time.sleep(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)

    def _add(self, path: str, count: Count) -> None:
        with self._lock:
            self._counts.setdefault(path.partition("/")[0], Count()).add(count)


def _is_for_good(error: Exception) -> bool:
    """Whether the same request would fail again, however often it is made."""
    from obstore import exceptions as ex

    kinds = (ex.InvalidPathError, ex.NotFoundError, ex.NotSupportedError, ex.PermissionDeniedError,
             ex.UnauthenticatedError, ex.UnknownConfigurationKeyError, FileNotFoundError, PermissionError)  # fmt: skip
    return isinstance(error, kinds)


def _open(url: str, new: bool) -> ObjectStore:
    try:
        from obstore import store
    except ImportError as error:
        raise StoreError(f"store {url}: needs obstore; {INSTALL}") from error
    if not url:
        raise StoreError(f"store: no place is given; give {KINDS}")
    if url.startswith("memory://"):
        return _memories.setdefault(url, store.MemoryStore())
    try:
        if url.startswith("file://") or not _SCHEME.match(url):
            path = Path(url.removeprefix("file://")).absolute()
            if not new and not path.is_dir():
                raise FileNotFoundError("no such folder")
            return store.LocalStore(path, mkdir=True)
        return store.from_url(url)
    except Exception as error:  # obstore raises errors of many kinds for a place that makes no sense
        why = shortened(str(error).partition("\n")[0])
        raise StoreError(f"store {url}: cannot be opened: {why}; give {KINDS}") from error
