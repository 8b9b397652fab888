"""The mailbox: a thread that writes and reads the objects of a run while the replica trains.

It knows paths and bytes, not what they mean. It looks into the folder of the open round now and then, fetches what is
new there, and goes on to the next round when a commit has appeared. A store that fails for a while only delays it.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from overtone.errors import StoreError
from overtone.swarm.bucket import Bucket
from overtone.swarm.records import COMMIT, MOST_COMMIT, Process, folder_of

log = logging.getLogger(__name__)

LOOKS = 20  # into the folder of a round, in the usual time of a round
SOONEST, LATEST = 0.05, 10.0  # seconds between two looks
LATEST_FREE = 0.4  # into a storage that bills nothing: so they add less than a second to a round
UNKNOWN = 0.25  # seconds between two looks, before the time of a round is known
LONGEST_BACKOFF = 30.0  # seconds until a store that failed is asked again
MOST_FAILURES = 3  # to read an object of a round, before the others are read without it
MOST_AHEAD = 8  # rounds that are fetched before the replica has absorbed them


@dataclass
class Folder:
    """What has been fetched of a round."""

    posts: dict[Process, bytes] = field(default_factory=dict)
    commit: bytes | None = None  # fetched last, so that all that it names is here
    written: float = math.inf  # the moment when a post of this process was there
    listed: float = 0.0  # the moment when a commit was there
    refused: dict[Process, str] = field(default_factory=dict)  # posts that nobody believes, with the marks of a listing
    failures: Counter[str] = field(default_factory=Counter)  # how often an object could not be read, by name


@dataclass
class Outgoing:
    """An object that is to be written."""

    path: str
    data: bytes
    tries: int | None = None  # that are left before it is given up; None: it never is
    after: float = 0.0  # the moment of the next try
    backoff: float = 0.0  # seconds from the last try to that


class Mailbox:
    """Carries objects between a replica and its bucket. All methods return at once.

    ``most``: bytes of an object; a larger one was put there by somebody else, and is not read. ``believed`` says of
    an object whether somebody with the key has written it.
    """

    def __init__(self, bucket: Bucket, index: int, most: int, believed: Callable[[bytes], bool]) -> None:
        self.bucket = bucket
        self._latest = LATEST_FREE if bucket.is_free else LATEST
        self._most = most
        self._believed = believed
        self._fatal: Exception | None = None  # why the thread has ended
        self.trouble = ""  # why the store does not answer at present
        self.pace = 0.0  # the usual seconds of a round; 0 if they are not known
        self._random = random.Random()
        self._folders: dict[int, Folder] = {index: Folder()}
        self._index = index  # of the round that is looked into
        self._absorbed = index  # rounds that the replica has done with
        self._outgoing: list[Outgoing] = []
        self._wake = threading.Condition()
        self._open = True
        self._thread = threading.Thread(target=self._work, name="overtone mailbox", daemon=True)
        self._thread.start()

    # -- for the replica -------------------------------------------------------------------------------------------

    def send(self, path: str, data: bytes, tries: int | None = None) -> None:
        """Write an object as soon as the store takes it. If another one is there by then, that one counts. With
        ``tries``, it is written after all others, and given up if the store refuses it so many times."""
        with self._wake:
            self._outgoing.append(Outgoing(path, data, tries))
            self._wake.notify()

    def folder(self, index: int) -> Folder:
        """What has been fetched of a round so far: a copy."""
        if self._fatal is not None:
            raise StoreError(f"store {self.bucket.url}: the mailbox has failed: {self._fatal!r}") from self._fatal
        with self._wake:
            found = self._folders.get(index, Folder())
            return Folder(dict(found.posts), found.commit, found.written, found.listed)

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
            moved, trouble = False, ""
            # A store that takes nothing may still have something to read, and the other way round.
            for work in (self._write_all, self._look):
                try:
                    moved = work()
                except StoreError as error:
                    trouble = trouble or str(error)
                except Exception as error:  # a mistake of ours: the replica must hear of it
                    self._fatal = error
                    return
            if trouble and not self.trouble:
                log.warning("%s; the training goes on, and the store is asked again", trouble)
            self.trouble = trouble
            backoff = _longer(backoff) if trouble else 0.0
            if not moved:
                usual = min(self._latest, max(SOONEST, self.pace / LOOKS)) if self.pace else UNKNOWN
                self._pause(backoff or usual)

    def _write_all(self) -> bool:
        while self._open:
            with self._wake:
                due = self._due()
                if not due:
                    break
                # What may be given up comes last: it may be large, and nobody waits for it.
                one = min(due, key=lambda one: one.tries is not None)
            try:
                created = self._write(one)
            except StoreError as error:
                if one.tries is None:
                    raise
                one.tries -= 1
                if one.tries:
                    one.backoff = _longer(one.backoff)
                    one.after = time.monotonic() + one.backoff
                    continue
                log.warning("%s; it is given up", error)
                created = False
            folder, _, name = one.path.rpartition("/")
            process = Process.parse(name)
            with self._wake:
                if created and process is not None and folder == folder_of(self._index):
                    here = self._folders[self._index]
                    here.posts[process] = one.data  # it need not be fetched again
                    here.refused.pop(process, None)
                    here.written = time.monotonic()
                self._outgoing.remove(one)
                self._wake.notify_all()
        return False

    def _write(self, one: Outgoing) -> bool:
        """Write an object. What somebody without the key has put in its place before is deleted, unless it is a commit:
        two who delete that at the same time could delete the other one's, which somebody obeys already."""
        if self.bucket.create(one.path, one.data):
            return True
        if one.path.endswith(f"/{COMMIT}"):
            return False  # another one was faster, as most times
        if self._believed(self.bucket.read(one.path, max(self._most, len(one.data))) or b""):
            if Process.parse(one.path.rpartition("/")[2]) is not None:
                told = "another process has written it; does a copy of this one run?"
                log.warning("store %s: %s was there already, and %s", self.bucket.url, one.path, told)
            return False
        log.warning(
            "store %s: %s was there already, and cannot be believed: somebody without the key has put it there. It is "
            "deleted, and written anew; see who can write to the store",
            self.bucket.url,
            one.path,
        )
        self.bucket.remove(one.path)
        if not self.bucket.create(one.path, one.data):
            raise StoreError(f"store {self.bucket.url}: somebody without the key writes {one.path} again and again")
        return True

    def _look(self) -> bool:
        """Look into the folder of the open round. Returns True if it has a commit: then the next one is open."""
        index = self._index
        if index >= self._absorbed + MOST_AHEAD:
            return False
        listed, trouble = self.bucket.listed(folder_of(index)), None
        with self._wake:
            folder = self._folders.setdefault(index, Folder())
            if COMMIT in listed and not folder.listed:
                folder.listed = time.monotonic()
            known = set(folder.posts) - set(folder.refused)
        for name, (size, mark) in listed.items():
            process = Process.parse(name)
            if process is None or process in known or size > self._most or folder.refused.get(process) == mark:
                continue
            if folder.failures[name] >= MOST_FAILURES:
                continue
            try:
                raw = self.bucket.read(f"{folder_of(index)}/{name}", self._most)
            except StoreError as error:  # somebody may have put it there so that nobody can read it
                folder.failures[name] += 1
                trouble = error
                continue
            if raw is not None:
                believed = self._believed(raw)
                with self._wake:
                    folder.posts[process] = raw
                    folder.refused.pop(process, None)
                    if not believed:  # fetched again if it is replaced
                        folder.refused[process] = mark
        # One that is too large is handed over as an empty one, which nobody believes.
        commit = self.bucket.read(f"{folder_of(index)}/{COMMIT}", MOST_COMMIT) if COMMIT in listed else None
        with self._wake:
            folder.commit = commit
            if commit is not None:
                self._index = index + 1
                self._folders.setdefault(index + 1, Folder())
                return True
        if trouble is not None:
            raise trouble
        return False

    def _pause(self, seconds: float) -> None:
        with self._wake:
            if self._open and (self.trouble or not self._due()):
                self._wake.wait(seconds * self._random.uniform(0.8, 1.2))

    def _due(self) -> list[Outgoing]:
        return [one for one in self._outgoing if one.after <= time.monotonic()]


def _longer(backoff: float) -> float:
    """Seconds until a store that failed again is asked the next time."""
    return min(LONGEST_BACKOFF, max(0.2, 2 * backoff))
