"""The end of a program that streams: it waits for files that only native code still holds."""

from __future__ import annotations

import io
import threading
import weakref
from pathlib import Path

import pytest

from overtone.tasks.text import exit_guard

fragments = pytest.importorskip("pyarrow.dataset").ParquetFileFormat()  # of which each holds its file in C++ only


def held(file: io.IOBase) -> bool:
    number = id(file)  # a closure over the file itself would be a Python object that refers to it
    return number in map(id, exit_guard.orphaned_files())


def test_a_closed_file_that_only_native_code_holds_is_an_orphan(tmp_path: Path) -> None:
    (tmp_path / "some").write_bytes(b"words")
    file = (tmp_path / "some").open("rb")
    native = fragments.make_fragment(file)
    assert not held(file)  # being read
    file.close()
    assert held(file)
    kept = [file]
    assert not held(file)  # somebody's, and no concern of ours
    kept.clear()
    seen = weakref.ref(file)
    del file, native
    assert seen() is None


def test_bytes_in_memory_are_orphans_without_being_closed() -> None:
    file = io.BytesIO(b"words")
    native = fragments.make_fragment(file)
    assert held(file)
    del native


def test_a_detached_file_is_passed_over(tmp_path: Path) -> None:
    wrapper = (tmp_path / "some").open("w")
    wrapper.detach().close()
    assert not held(wrapper)


def test_the_end_waits_until_they_are_gone(tmp_path: Path) -> None:
    (tmp_path / "some").write_bytes(b"words")
    file = (tmp_path / "some").open("rb")
    native = [fragments.make_fragment(file)]
    file.close()
    seen = weakref.ref(file)
    del file
    looked = threading.Event()

    def let_go() -> None:
        looked.wait()
        native.clear()

    def remaining() -> list[io.IOBase]:
        found = [each for each in exit_guard.orphaned_files() if each is seen()]
        looked.set()
        return found

    thread = threading.Thread(target=let_go)
    thread.start()
    assert exit_guard.wait(remaining)
    assert looked.is_set()
    assert seen() is None
    thread.join()


def test_the_end_does_not_wait_for_ever() -> None:
    assert not exit_guard.wait(lambda: ["a file"], patience=0.02)
