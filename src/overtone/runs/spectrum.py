"""The looks at the signal of a run: which rounds, and the file of their records. docs/spectrum.md explains them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from overtone.coding.spectrum import BANDS
from overtone.errors import ConfigError, NotALogError, RunLogError, shortened
from overtone.exchange.probe import Probe
from overtone.exchange.spectrum import FORMAT, Seen, Spectrum
from overtone.methods import Method
from overtone.replica import Replica
from overtone.runs.directory import write_whole
from overtone.version import __version__

NAME = "spectrum.jsonl"


def refuse_unfit(looks: int, method: Method) -> None:
    """Refuse looks at a method that exchanges no drift."""
    if looks and not method.signal.keeps_start:
        what = "nothing" if method.every is None else "gradients"
        raise ConfigError(
            f"spectrum={looks}: {method.name} exchanges {what}, and only a drift can be looked at; leave it out, or "
            "choose a method that exchanges drift, such as decoupled or diloco"
        )


def chosen(steps: int, every: int, looks: int) -> frozenset[int]:
    """The rounds to look at, evenly spread from the first to the last round of a run. A single look is at the last."""
    last = -(-steps // every) - 1
    if looks > last:
        return frozenset(range(last + 1))
    return frozenset({round(last * i / (looks - 1)) for i in range(looks)} if looks > 1 else {last})


def attach(replica: Replica, folder: Path, *, steps: int, looks: int) -> None:
    """Look at so many rounds of this replica, and write the records into the run's directory.

    Records of rounds that a resumed run has lost are removed: it makes these rounds again.
    """
    file = folder / NAME
    if file.exists():
        kept = [line for line in file.read_text().splitlines(keepends=True) if _index(line) < replica.rounds]
        write_whole(file, "".join(kept))
    method, exchanger = replica.method, replica.exchanger
    if looks and method.every is not None:
        exchanger.probe = Probe(
            method,
            exchanger.layout,
            {name: p.shape for name, p in replica.parameters.trainable.items()},
            replica.device,
            rounds=chosen(steps, method.every, looks),
            write=lambda record: _append(file, record),
        )


def _index(line: str) -> float:
    """The round of a record; infinite for a line that a kill has cut off, so that it counts as lost."""
    try:
        return int(json.loads(line)["round"])
    except (ValueError, TypeError, LookupError):
        return float("inf")


def _append(file: Path, record: Spectrum) -> None:
    try:
        with file.open("a") as out:
            out.write(json.dumps(record) + "\n")
    except OSError as error:
        raise RunLogError(f"{file}: {error.strerror}; free some space and go on with --resume") from error


# -- reading -----------------------------------------------------------------------------------------------------------


def read(folder: Path) -> list[Spectrum]:
    """The records of a run, by round. A directory without records and a damaged record are refused."""
    file = folder / NAME
    try:
        text = file.read_bytes().decode()
    except FileNotFoundError:
        raise NotALogError(
            f"{folder}: has no records of the signal (no {NAME}); make the run again with --spectrum 24"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise NotALogError(f"{file}: cannot be read ({shortened(error)}); make the run again") from error
    # The last line may be cut off: the run was killed while it wrote the line, or is writing it now.
    whole = text.split("\n")[:-1]
    found = [_checked(line, f"{file}: line {number}") for number, line in enumerate(whole, 1)]
    if not found:
        raise NotALogError(f"{file}: has no record yet; wait for the first round that is looked at")
    return found


def _checked(line: str, where: str) -> Spectrum:
    """The record in this line, if it has all that a page needs."""
    try:
        record = json.loads(line)
        version = record["format"]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise NotALogError(f"{where}: not a record of a look ({shortened(error)}); make the run again") from error
    if version != FORMAT:
        raise NotALogError(
            f"{where}: a record of format {shortened(version)}; overtone {__version__} reads format {FORMAT}. Use the "
            "version of overtone that wrote it, or make the run again"
        )
    try:
        _check(record)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise NotALogError(f"{where}: a damaged record ({shortened(error)}); make the run again") from error
    return cast(Spectrum, record)


def _check(record: Mapping[str, Any]) -> None:
    for name in ("round", "step", "replicas", "keep"):
        _expect(type(record[name]) is int and record[name] >= 0, name)
    strongest = record["strongest"]
    _expect(strongest and all(type(count) is int for count in strongest), "strongest")
    for seen in (record["whole"], *record["layers"]):
        _check_seen(seen, len(strongest))
    for layer in record["layers"]:
        _expect(isinstance(layer["name"], str), "name")
        _expect(all(type(side) is int for side in layer["shape"]), "shape")


def _check_seen(seen: Seen, counts: int) -> None:
    _expect(_is_number(seen["drift"]), "drift")
    for name in ("residual", "agreement", "cosine", "repeated"):
        _expect(_is_number(seen.get(name)), name)
    if "energy" not in seen:
        return
    for lines in (seen["gaussian"], *(line for energy in seen["energy"].values() for line in energy.values())):
        _expect(len(lines) == counts and all(map(_is_number, lines)), "energy")
    for name, grid in (("frequencies", seen["frequencies"]), ("places", seen["places"])):
        _expect(len(grid) == BANDS**2 and all(map(_is_number, grid)), name)


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _expect(holds: object, name: str) -> None:
    if not holds:
        raise ValueError(f"{name} is not what it should be")
