"""The mailbox: a thread that writes and reads the objects of a run while the replica trains.

It knows paths and bytes, not what they mean. It looks into the folder of the open round now and then, fetches what is
new there, and goes on to the next round when a commit has appeared. A store that fails for a while only delays it.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from overtone.errors import StoreError
from overtone.swarm.bucket import Bucket
from overtone.swarm.records import COMMIT, MOST_COMMIT, Process, folder_of

log = logging.getLogger(__name__)

LOOKS = 20  # into the folder of a round, in the usual time of a round
SOONEST, LATEST = 0.05, 10.0  # seconds between two looks
UNKNOWN = 0.25  # seconds between two looks, before the time of a round is known
LONGEST_BACKOFF = 30.0  # seconds until a store that failed is asked again
MOST_AHEAD = 8  # rounds that are fetched before the replica has absorbed them


@dataclass
class Folder:
    """What has been fetched of a round."""

    posts: dict[Process, bytes] = field(default_factory=dict)
    commit: bytes | None = None  # fetched last, so that all that it names is here


class Mailbox:
    """Carries objects between a replica and its bucket. All methods return at once."""

    def __init__(self, bucket: Bucket, index: int, most: int) -> None:
        self.bucket = bucket
        self._most = most  # bytes of an object: a larger one was put there by somebody else, and is not read
        self._fatal: Exception | None = None  # why the thread has ended
        self.trouble = ""  # why the store does not answer at present
        self.pace = 0.0  # the usual seconds of a round; 0 if they are not known
        self._random = random.Random()
        self._folders: dict[int, Folder] = {index: Folder()}
        self._index = index  # of the round that is looked into
        self._absorbed = index  # rounds that the replica has done with
        self._outgoing: deque[tuple[str, bytes]] = deque()
        self._wake = threading.Condition()
        self._open = True
        self._thread = threading.Thread(target=self._work, name="overtone mailbox", daemon=True)
        self._thread.start()

    # -- for the replica -------------------------------------------------------------------------------------------

    def send(self, path: str, data: bytes) -> None:
        """Write an object as soon as the store takes it. If another one is there by then, that one counts."""
        with self._wake:
            self._outgoing.append((path, data))
            self._wake.notify()

    def folder(self, index: int) -> Folder:
        """What has been fetched of a round so far: a copy."""
        if self._fatal is not None:
            raise StoreError(f"store {self.bucket.url}: the mailbox has failed: {self._fatal!r}") from self._fatal
        with self._wake:
            found = self._folders.get(index, Folder())
            return Folder(dict(found.posts), found.commit)

    def done_with(self, index: int) -> None:
        """Forget the rounds before this one."""
        with self._wake:
            self._absorbed = index
            self._folders = {number: one for number, one in self._folders.items() if number >= index}
            self._wake.notify()

    def flush(self, patience: float) -> bool:
        """Wait until everything is written. Returns False if that takes longer."""
        until = time.monotonic() + patience
        with self._wake:
            while self._outgoing and time.monotonic() < until:
                self._wake.wait(0.05)
            return not self._outgoing

    def close(self) -> None:
        """End the thread. What was not written yet is lost: `flush` first."""
        with self._wake:
            self._open = False
            self._wake.notify()
        self._thread.join()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        backoff = 0.0
        while self._open:
            try:
                self._write_all()
                moved = self._look()
            except StoreError as error:
                if not self.trouble:
                    log.warning("%s; the training goes on, and the store is asked again", error)
                self.trouble = str(error)
                backoff = min(LONGEST_BACKOFF, max(0.2, 2 * backoff))
                self._pause(backoff)
            except Exception as error:  # a mistake of ours: the replica must hear of it
                self._fatal = error
                return
            else:
                backoff, self.trouble = 0.0, ""
                if not moved:
                    self._pause(min(LATEST, max(SOONEST, self.pace / LOOKS)) if self.pace else UNKNOWN)

    def _write_all(self) -> None:
        while self._open:
            with self._wake:
                if not self._outgoing:
                    return
                path, data = self._outgoing[0]
            created = self.bucket.create(path, data)
            folder, _, name = path.rpartition("/")
            process = Process.parse(name)
            with self._wake:
                if created and process is not None and folder == folder_of(self._index):
                    self._folders[self._index].posts[process] = data  # it need not be fetched again
                self._outgoing.popleft()
                self._wake.notify_all()

    def _look(self) -> bool:
        """Look into the folder of the open round. Returns True if it has a commit: then the next one is open."""
        index = self._index
        if index >= self._absorbed + MOST_AHEAD:
            return False
        listed = self.bucket.names(folder_of(index))
        with self._wake:
            known = set(self._folders.setdefault(index, Folder()).posts)
        for name, size in listed.items():
            process = Process.parse(name)
            if process is None or process in known or size > self._most:
                continue
            raw = self.bucket.read(f"{folder_of(index)}/{name}")
            if raw is not None:
                with self._wake:
                    self._folders[index].posts[process] = raw
        if COMMIT not in listed:
            return False
        # One that is too large is handed over as an empty one, which nobody believes.
        commit = self.bucket.read(f"{folder_of(index)}/{COMMIT}") if listed[COMMIT] <= MOST_COMMIT else b""
        with self._wake:
            self._folders[index].commit = commit
            if commit is None:
                return False
            self._index = index + 1
            self._folders.setdefault(index + 1, Folder())
        return True

    def _pause(self, seconds: float) -> None:
        with self._wake:
            if self._open and not (self._outgoing and seconds <= LATEST and not self.trouble):
                self._wake.wait(seconds * self._random.uniform(0.8, 1.2))
