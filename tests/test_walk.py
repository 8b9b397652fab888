"""How far a reader has to walk to follow one round: the functions and files that it passes.

PYTHONPATH=tests python tests/test_walk.py        # prints the walk
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

import overtone
import worlds
from overtone import Replica
from overtone.world import watchdog

ROOT = os.path.dirname(overtone.__file__)
MOST_CHANGES = 67  # of file, in the order in which functions are first called
COMPREHENSIONS = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")


def walk() -> list[tuple[str, str]]:
    """(file, function) in the order of first call: one `decoupled` round over gloo, from `Replica.step` to its end."""
    watchdog.SOON = 1e9  # a peer that is late on a busy machine is another story
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    inner = torch.optim.AdamW(model.parameters())
    replica = Replica(model, inner, overtone.decoupled(every=3))
    passed: dict[tuple[str, str], None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        name = code.co_qualname
        if event == "call" and code.co_filename.startswith(ROOT) and not name.endswith(COMPREHENSIONS):
            passed.setdefault((os.path.relpath(code.co_filename, ROOT), name))

    for step in range(3):
        model(torch.randn(8, 64)).square().mean().backward()
        if step == 2:
            sys.setprofile(note)
        record = replica.step()
        sys.setprofile(None)
        inner.zero_grad()
    assert record is not None
    return list(passed)


def changes(passed: list[tuple[str, str]]) -> int:
    return sum(before != after for (before, _), (after, _) in itertools.pairwise(passed))


@pytest.mark.slow
def test_a_round_can_be_followed(tmp_path: Path) -> None:
    for result in worlds.run(walk, size=2, folder=tmp_path):
        passed = [(file, name) for file, name in result["value"]]
        assert ("exchange/round.py", "Exchanger.finish") in passed
        assert changes(passed) <= MOST_CHANGES, passed


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        passed = [(file, name) for file, name in worlds.run(walk, size=2, folder=Path(folder))[0]["value"]]
    last = ""
    for file, name in passed:
        print(f"{'' if file == last else file:28} {name}")
        last = file
    files = len({file for file, _ in passed})
    print(f"{len(passed)} functions in {files} files, {changes(passed)} changes of file")
