"""Looks at the signal: what they see of planted signals, that they change nothing, and what is written and drawn."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import browser as web
import overtone
from forked import shared
from overtone import Cluster, Method, Replica
from overtone.coding.chunks import slabs_of
from overtone.coding.spectrum import energy_of_strongest, gaussian_share, over_places, strongest_only, tensors_of
from overtone.coding.transforms import DCT
from overtone.errors import ConfigError, NotALogError
from overtone.exchange.probe import Probe
from overtone.exchange.spectrum import STRONGEST, Spectrum
from overtone.report import compare, comparison, spectrum_data
from overtone.report.comparison import Comparison
from overtone.runs import log as runlog
from overtone.runs import spectrum
from overtone.runs.config import MethodChoice, Run, Saving, Simulation, Training
from overtone.runs.open_run import open_run
from overtone.runs.simulate import simulate
from overtone.tasks import Language, TaskOptions
from running import Trial, warm_starter
from scenario import METHODS, backward, batches, build

DRIFTING = {name: method for name, method in METHODS.items() if method.signal.keeps_start}
TASK = TaskOptions(valid_samples=8, language=Language(width=64, layers=1, heads=2, context=16))
EVERY = 1000  # rounds; as many as there are


def watch(replica: Replica, rounds: Any = range(EVERY)) -> list[Spectrum]:
    """Look at these rounds of a replica; the records appear in the list."""
    records: list[Spectrum] = []
    shapes = {name: p.shape for name, p in replica.parameters.trainable.items()}
    exchanger = replica.exchanger
    exchanger.probe = Probe(
        replica.method, exchanger.layout, shapes, replica.device, rounds=rounds, write=records.append
    )
    return records


# -- sums --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", STRONGEST)
def test_the_reference_is_the_share_of_sampled_gaussian_values(count: int) -> None:
    values = torch.randn(400, 4096, generator=torch.Generator().manual_seed(count))
    sampled = energy_of_strongest(values, [count]).sum() / values.double().square().sum()
    # The formula is for many values. The strongest 8 of 4096 have 1.5 % less, the others agree within 0.5 %.
    assert gaussian_share(count / 4096) == pytest.approx(float(sampled), rel=0.02 if count == 8 else 0.005)


def test_the_reference_of_all_values_is_all_energy() -> None:
    assert gaussian_share(1.0) == pytest.approx(1.0)
    assert gaussian_share(1e-9) < 1e-6


def test_the_strongest_of_each_chunk_are_found() -> None:
    coeffs = torch.tensor([[3.0, -4.0, 0.0, 1.0], [1.0, 1.0, 5.0, 2.0]])
    assert energy_of_strongest(coeffs, [1, 3, 4]).flatten().tolist() == pytest.approx([16, 26, 26, 25, 30, 31])
    assert strongest_only(coeffs, 2).tolist() == [[9, 16, 0, 0], [0, 0, 25, 4]]


def test_units_and_places_are_those_of_their_tensors() -> None:
    """A tensor of two and a half chunks in each direction, one that fills a chunk, and two plain ones."""
    shapes = [(5, 5), (3,), (2, 2), (4,)]
    owners, energy = [], torch.zeros(len(shapes), 8, 8)
    for slab in slabs_of(shapes, 2, 0):
        owners += tensors_of(slab, torch.device("cpu")).tolist() * (1 if slab.plain else slab.area)
        if not slab.plain:
            energy += over_places(torch.ones(slab.chunks, slab.area), slab, [(5, 5), (1, 3), (2, 2), (1, 4)])
    assert [owners.count(tensor) for tensor in range(4)] == [25, 3, 4, 4]
    assert energy.sum((1, 2)).tolist() == [25, 0, 4, 0]
    # Five rows in eight bands: rows 0 to 4 lie in the bands 0, 1, 3, 4 and 6.
    assert [band for band in range(8) if energy[0, band].any()] == [0, 1, 3, 4, 6]


# -- planted signals ---------------------------------------------------------------------------------------------------


def planted(grads: Callable[[int, int], Tensor], method: Method, replicas: int = 1, rounds: int = 1) -> list[Spectrum]:
    """Records of a model of two matrices and a bias. The drift of the first matrix is ``grads(rank, round)``; the
    second one moves at random."""

    def still(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, bias=False))
        return model, torch.optim.SGD(model.parameters(), lr=1.0)

    cluster = Cluster(still, method, replicas=replicas)
    records, dice = watch(cluster.replicas[0]), torch.Generator().manual_seed(3)
    for index in range(rounds):
        for replica in cluster.turns():
            first, bias, second = replica.parameters.exchanged
            first.grad = grads(replica.transport.rank, index)
            bias.grad = torch.ones(64)
            second.grad = torch.randn(64, 64, generator=dice)
        cluster.step()
    return records


def test_a_planted_wave_is_found_in_its_band() -> None:
    wave = torch.zeros(1, 64, 64)
    wave[0, 20, 5] = 7.0  # the frequencies down and across
    values = DCT.inverse(wave)[0]
    (record,) = planted(lambda *_: values, overtone.decoupled(every=1, keep=128))
    layer, bias, other = record["layers"]
    for of in ("drift", "owed"):
        assert layer["energy"][of]["dct"] == pytest.approx([1.0] * 4, abs=1e-4)
        assert layer["energy"][of]["none"][0] < 0.01  # a wave is everywhere
        # Noise is noise in every basis.
        assert other["energy"][of]["dct"] == pytest.approx(other["gaussian"], rel=0.05)
        assert other["energy"][of]["none"] == pytest.approx(other["gaussian"], rel=0.05)
    grid = torch.tensor(layer["frequencies"]).view(8, 8)
    assert float(grid[20 // 8, 5 // 8]) == pytest.approx(1.0, abs=1e-4)
    assert torch.tensor(other["frequencies"]).max() < 0.05
    assert layer["drift"] == pytest.approx(7.0, rel=1e-4)
    assert bias == {"name": "0.bias", "shape": [64], "drift": 8.0, "residual": bias["residual"]}
    assert record["whole"]["drift"] == pytest.approx(math.hypot(7, 8, other["drift"]), rel=1e-4)


def test_a_look_at_a_basis_that_turns_sees_what_it_selects_from() -> None:
    """What all replicas say alike is heard alike; a wave is noise in the basis of any round."""
    wave = DCT.inverse(
        torch.zeros(1, 64, 64).index_put((torch.tensor(0), torch.tensor(20), torch.tensor(5)), torch.tensor(7.0))
    )
    method = overtone.decoupled(every=1, keep=128, transform="turning", exchange="gathered")
    _, record = planted(lambda *_: wave[0], method, replicas=3, rounds=2)
    layer, _, other = record["layers"]
    assert record["basis"] == "hadamard"
    assert layer["agreement"] == pytest.approx(1.0, abs=1e-4)
    assert other["agreement"] < 0.6
    assert layer["energy"]["owed"]["hadamard"] == pytest.approx(layer["gaussian"], rel=0.1)


def test_planted_values_are_found_in_their_rows_and_columns() -> None:
    values = torch.zeros(64, 64)
    values[40:48, 8:16] = 1.0
    (record,) = planted(lambda *_: values, overtone.sparse_loco(every=1, keep=64))
    layer = record["layers"][0]
    assert layer["energy"]["owed"]["none"] == pytest.approx([8 / 64, 32 / 64, 1, 1])
    assert torch.tensor(layer["places"]).view(8, 8)[5, 1] == 1.0
    assert record["basis"] == "none"


def apart(rank: int, index: int) -> Tensor:
    """128 values at places that no other replica has."""
    values = torch.zeros(64, 64)
    values[2 * rank : 2 * rank + 2] = 0.5
    return values


EQUAL_OR_APART = {
    "gathered": overtone.decoupled(every=1, keep=128, transform="none", exchange="gathered"),
    "sharded": overtone.decoupled(every=1, keep=128, transform="none", exchange="sharded", keep_down=512),
    "sparse_loco": overtone.sparse_loco(every=1, keep=128),
    "diloco": overtone.diloco(every=1),
}


@pytest.mark.parametrize("method", EQUAL_OR_APART.values(), ids=EQUAL_OR_APART)
def test_agreement_is_one_among_equals_and_one_over_k_among_strangers(method: Method) -> None:
    (alike,) = planted(lambda *_: apart(0, 0), method, replicas=4)
    assert alike["layers"][0]["agreement"] == pytest.approx(1.0, abs=0.01)  # one bit is a rounded mean
    (strange,) = planted(apart, method, replicas=4)
    assert strange["layers"][0]["agreement"] == pytest.approx(0.25, abs=0.003)
    assert strange["replicas"] == 4


def test_a_round_that_repeats_and_one_that_does_not() -> None:
    """Rounds 0 and 1 are alike, round 2 is the opposite of round 1, round 3 moves other values, and round 4 those of
    round 2 again: only the round before counts."""
    method = overtone.decoupled(every=1, keep=128, bits=32, transform="none")
    places = [(0, 1.0), (0, 1.0), (0, -1.0), (5, 1.0), (0, 1.0)]
    records = planted(lambda _, index: places[index][1] * apart(places[index][0], 0), method, rounds=5)
    layers = [record["layers"][0] for record in records]
    assert "cosine" not in layers[0]
    assert "repeated" not in layers[0]
    assert [layer["cosine"] for layer in layers[1:]] == pytest.approx([1.0, -1.0, 0.0, 0.0])
    assert [layer["repeated"] for layer in layers[1:]] == [1.0, 1.0, 0.0, 0.0]


def test_a_round_that_was_refused_is_not_compared_with() -> None:
    replica = Replica(*build(0), overtone.decoupled(every=1), overtone.Solo())
    records, stream = watch(replica), batches(0)
    for refused in (False, True, False, False):
        backward(replica, next(stream))
        if not refused:
            replica.step()
            continue
        replica.local_step()
        replica.exchanger.refuse(replica.exchanger.start(replica._inner_step))
    assert [record["round"] for record in records] == [0, 1, 2]
    assert ["cosine" in record["whole"] for record in records] == [False, False, True]


def test_memory_is_free_between_looks() -> None:
    method = overtone.decoupled(every=1, keep=128)
    cluster = Cluster(build, method, replicas=2)
    first, streams = cluster.replicas[0], [batches(rank) for rank in range(2)]
    records, held = watch(first, rounds={2, 5, 6}), []
    for _ in range(8):
        for replica in cluster.turns():
            backward(replica, next(streams[replica.transport.rank]))
        cluster.step()
        held.append(first.exchanger.probe.memory is not None)  # type: ignore[union-attr]
    assert [record["round"] for record in records] == [2, 5, 6]
    assert all("cosine" in record["whole"] for record in records)
    # After rounds 1, 4 and 5 the next round is one to look at. At all other times the memory is free.
    assert [index for index, here in enumerate(held) if here] == [1, 4, 5]


# -- every method ------------------------------------------------------------------------------------------------------


def trained(method: Method, looks: bool) -> tuple[Cluster, list[Spectrum], list[overtone.Round]]:
    cluster = Cluster(build, method, replicas=3)
    records = watch(cluster.replicas[0]) if looks else []
    streams = [batches(rank) for rank in range(3)]
    rounds = []
    for _ in range(11):  # the last round has fewer steps, and `finish` makes it
        for replica in cluster.turns():
            backward(replica, next(streams[replica.transport.rank]))
        rounds += cluster.step()[:1]
    rounds += cluster.finish()[0]
    return cluster, records, rounds


@pytest.mark.parametrize("method", DRIFTING.values(), ids=DRIFTING)
def test_every_method_that_exchanges_drift_can_be_looked_at(method: Method) -> None:
    plain, _, _ = trained(method, looks=False)
    looked, records, rounds = trained(method, looks=True)
    for mine, theirs in zip(plain.replicas, looked.replicas, strict=True):
        assert mine.fingerprint == theirs.fingerprint
        assert mine.transport.ledger.sent == theirs.transport.ledger.sent
        for a, b in zip(mine.parameters.tensors, theirs.parameters.tensors, strict=True):
            assert torch.equal(a, b)
    # Draining messages are no rounds.
    assert [record["round"] for record in records] == [0, 1, 2, 3]
    assert [record["step"] for record in records] == [3, 6, 9, 11]
    for record, done in zip(records, rounds, strict=False):
        whole = record["whole"]
        assert whole["drift"] == pytest.approx(done.drift_norm, rel=1e-4)
        assert whole.get("residual", 0.0) == pytest.approx(done.residual_norm, rel=1e-4)
        squares = sum(layer["drift"] ** 2 for layer in record["layers"])
        assert math.sqrt(squares) == pytest.approx(done.drift_norm, rel=1e-3)
        assert sum(whole["frequencies"]) == pytest.approx(1.0, abs=1e-3)
        assert sum(whole["places"]) == pytest.approx(1.0, abs=1e-3)
        for energy in whole["energy"].values():
            assert all(list(line) == sorted(line) for line in energy.values())
    dense = method.codec.lossless
    assert set(records[1]["whole"]["energy"]) == ({"drift"} if dense else {"drift", "owed"})
    assert ("repeated" in records[1]["whole"]) is not dense
    assert ("agreement" in records[1]["whole"]) is not method.rule.over_senders
    still = next(layer for layer in records[1]["layers"] if layer["name"] == "unused")
    assert still["drift"] == 0.0


# -- whole runs --------------------------------------------------------------------------------------------------------


def configured(folder: Path, **choice: Any) -> Simulation:
    return Simulation(
        choice=MethodChoice("decoupled", **{"every": 4, **choice}),
        replicas=2,
        out=folder,
        task=TASK,
        training=Training(steps=24, batch=4),
        spectrum=3,
    )


def test_looks_are_spread_from_the_first_to_the_last_round() -> None:
    assert spectrum.chosen(steps=100, every=10, looks=4) == {0, 3, 6, 9}
    assert spectrum.chosen(steps=101, every=10, looks=2) == {0, 10}
    assert spectrum.chosen(steps=100, every=10, looks=1) == {9}
    assert spectrum.chosen(steps=30, every=10, looks=10**9) == {0, 1, 2}
    assert len(spectrum.chosen(steps=1000, every=10, looks=24)) == 24


@pytest.mark.parametrize("choice", [{}, {"exchange": "sharded"}, {"delay": 3}], ids=["gathered", "sharded", "delayed"])
def test_a_simulation_writes_records_and_ends_with_the_same_bits(choice: dict[str, Any], tmp_path: Path) -> None:
    looked = simulate(configured(tmp_path / "looked", **choice))
    plain = simulate(replace(configured(tmp_path / "plain", **choice), spectrum=0))
    assert looked["anchor_fingerprint"] == plain["anchor_fingerprint"]
    assert looked["bytes_sent"] == plain["bytes_sent"]
    assert not (tmp_path / "plain" / spectrum.NAME).exists()
    records = spectrum.read(tmp_path / "looked")
    assert [record["round"] for record in records] == [0, 2, 5]
    rounds = {event["index"]: event for event in runlog.read(tmp_path / "looked") if event["event"] == "round"}
    for record in records:
        done = rounds[record["round"]]
        assert record["whole"]["drift"] == pytest.approx(done["drift_norm"], rel=1e-4)
        assert record["whole"]["residual"] == pytest.approx(done["residual_norm"], rel=1e-4)


@pytest.mark.slow
def test_real_replicas_see_what_virtual_ones_do(tmp_path: Path) -> None:
    """The same records, to the last digit; and each round once, though the run was stopped and resumed in between."""
    flags = ("--width", "64", "--layers", "1", "--heads", "2", "--context", "16", "--valid-samples", "8",
             "--batch", "4", "--steps", "24", "--every", "4", "--checkpoint-every", "6")  # fmt: skip
    real = Trial(warm_starter(), tmp_path / "real", (*flags, "--spectrum", "3")).finished()
    plain = real.on(folder=tmp_path / "plain", flags=flags).finished()
    assert real.raw("finish")[0]["anchor_fingerprint"] == plain.raw("finish")[0]["anchor_fingerprint"]
    simulate(configured(tmp_path / "virtual"))
    assert (real.folder / spectrum.NAME).read_text() == (tmp_path / "virtual" / spectrum.NAME).read_text()
    assert not (plain.folder / spectrum.NAME).exists()


@pytest.mark.parametrize("died_at", [12, 18])
def test_a_resumed_run_has_each_round_once(died_at: int, tmp_path: Path) -> None:
    """Six rounds, all looked at. A checkpoint lies at each sixth step; the process dies before the next is written."""
    config = Run(
        choice=MethodChoice(every=4), replicas=1, out=tmp_path / "whole", task=TASK,
        training=Training(steps=24, batch=4), saving=Saving(checkpoint_every=6, spectrum=6),
    )  # fmt: skip
    open_run(config, overtone.Solo(), resume=False).run()
    cut = replace(config, out=tmp_path / "cut")
    session = open_run(cut, overtone.Solo(), resume=False)
    save = session._save

    def dying() -> None:
        if session.replica.steps == died_at:
            session.writer.wait()
            session.lock.close()
            raise KeyboardInterrupt
        save()

    session._save = dying  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        session.run()
    file = tmp_path / "cut" / spectrum.NAME
    assert len(file.read_text().splitlines()) == died_at // 4
    with file.open("a") as torn:  # killed in the middle of a line
        torn.write('{"format": 1, "rou')
    open_run(cut, overtone.Solo(), resume=True).run()
    whole, resumed = (spectrum.read(tmp_path / name) for name in ("whole", "cut"))
    assert [record["round"] for record in resumed] == list(range(6))
    assert [record["whole"]["energy"] for record in resumed] == [record["whole"]["energy"] for record in whole]
    # Only the first round after the checkpoint has nothing to compare with.
    alone = [record["round"] for record in resumed if "cosine" not in record["whole"]]
    assert alone == [0, (died_at - 6) // 4]


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "told"),
    [("alone", "alone exchanges nothing"), ("ddp", "ddp exchanges gradients"), ("demo", "gradients")],
)
def test_methods_without_drift_are_refused(method: str, told: str, tmp_path: Path) -> None:
    choice = MethodChoice(method)
    with pytest.raises(ConfigError, match=f"spectrum=3: .*{told}, and only a drift can be looked at; leave it out"):
        simulate(replace(configured(tmp_path / "run"), choice=choice))
    with pytest.raises(ConfigError, match="spectrum=3"):
        open_run(Run(choice=choice, saving=Saving(spectrum=3)), overtone.Solo(), resume=False)
    assert not (tmp_path / "run").exists()


def test_looks_need_a_directory() -> None:
    with pytest.raises(ConfigError, match="spectrum=3: there is no directory for its records; give one with --out"):
        simulate(replace(configured(Path("unused")), out=None))


def test_a_comparison_looks_at_the_methods_that_exchange_drift(tmp_path: Path) -> None:
    asked = Comparison(methods=("alone", "ddp", "diloco", "decoupled:spectrum=5"), spectrum=3)
    for processes in (False, True):
        found = comparison.cells(replace(asked, processes=processes), tmp_path)
        looks = [c.config.saving.spectrum if isinstance(c.config, Run) else c.config.spectrum for c in found]
        assert looks == [0, 0, 3, 5]
    with pytest.raises(ConfigError, match="spectrum=3: none of alone, ddp exchanges drift"):
        comparison.cells(replace(asked, methods=("alone", "ddp")), tmp_path)
    with pytest.raises(ConfigError, match="spectrum=3: ddp exchanges gradients"):
        comparison.cells(replace(asked, methods=("decoupled", "ddp:spectrum=3")), tmp_path)


def test_a_comparison_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    """Its logs do not name the option, so it was at its default."""
    asked = Comparison(methods=("decoupled",), every=4, task=TASK, training=Training(steps=8, batch=4))
    (cell,) = comparison.cells(asked, tmp_path)
    assert isinstance(cell.config, Simulation)
    simulate(cell.config)
    first, *others = (cell.folder / runlog.NAME).read_text().splitlines()
    event = json.loads(first)
    assert event["config"].pop("spectrum") == 0
    (cell.folder / runlog.NAME).write_text("\n".join([json.dumps(event), *others]) + "\n")
    states = compare.make([cell], workers=1, watch=lambda _: None)
    assert states[cell.folder].state == "kept"
    other = replace(cell, config=replace(cell.config, spectrum=3))
    with pytest.raises(ConfigError, match="was run with spectrum=0, and 3 is asked for now"):
        compare.make([other], workers=1, watch=lambda _: None)


def test_a_directory_without_records_says_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(NotALogError, match=r"has no records of the signal .*; make the run again with --spectrum 24"):
        spectrum.read(tmp_path)
    (tmp_path / spectrum.NAME).write_text('{"format": 1')  # the first line is being written
    with pytest.raises(NotALogError, match="has no record yet"):
        spectrum.read(tmp_path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run with three records."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    simulate(configured(folder))
    return folder


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda _: None, "line 2: not a record of a look"),
        (lambda record: record | {"format": 9}, "line 2: a record of format 9; overtone .* reads format 1"),
        (lambda record: record | {"round": "2"}, "line 2: a damaged record .*round is not what it should be"),
        (lambda record: {k: v for k, v in record.items() if k != "whole"}, r"line 2: a damaged record .*'whole'"),
        (lambda record: record | {"strongest": [8]}, "line 2: a damaged record .*energy is not"),
        (lambda record: record | {"whole": record["whole"] | {"drift": "1"}}, "line 2: .*drift is not"),
        (lambda record: record | {"whole": record["whole"] | {"places": [1]}}, "line 2: .*places is not"),
        (lambda record: record | {"layers": [{}]}, "line 2: a damaged record"),
        (lambda record: record | {"layers": 3}, "line 2: a damaged record"),
    ],
)
def test_a_damaged_record_is_named(run: Path, damage: Any, told: str, tmp_path: Path) -> None:
    lines = (run / spectrum.NAME).read_text().splitlines()
    lines[1] = json.dumps(damage(json.loads(lines[1])))
    (tmp_path / spectrum.NAME).write_text("\n".join(lines) + "\n")
    with pytest.raises(NotALogError, match=told):
        spectrum.read(tmp_path)


# -- the page ----------------------------------------------------------------------------------------------------------


def test_the_page_has_the_records_of_all_runs(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "runs" / "other"
    simulate(replace(configured(other), choice=MethodChoice("diloco", every=4)))
    simulate(replace(configured(tmp_path / "runs" / "plain"), spectrum=0))  # left out: it has no records
    found = spectrum_data.find([run, tmp_path / "runs", run])
    assert [one.path for one in found] == [run, other]
    data = spectrum_data.data(found, "title")
    assert [(one["label"], one["basis"], len(one["records"])) for one in data["runs"]] == [
        ("decoupled", "hadamard", 3),  # of the turning basis, with its signs
        ("diloco", None, 3),
    ]
    seen = data["runs"][0]["records"][2]["whole"]["cosine"]
    assert seen == pytest.approx(spectrum.read(run)[2]["whole"]["cosine"], rel=0.01)
    with pytest.raises(NotALogError, match="plain: has no records of the signal"):
        spectrum_data.find([run, tmp_path / "runs" / "plain"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("spectrum {run} --out page.pdf", "out page.pdf: a page ends in .html"),
        ("spectrum {run} --out none/page.html", "there is no directory none; create it first"),
        ("spectrum nowhere", "nowhere: no such file or directory"),
        ("spectrum --out page.html", "runs: give at least one"),
        ("simulate --method ddp --spectrum 4 --out here", "spectrum=4: ddp exchanges gradients"),
        ("train --method alone --spectrum 4 --out here", "spectrum=4: alone exchanges nothing"),
        ("simulate --spectrum 4", "spectrum=4: there is no directory for its records; give one with --out"),
    ],
)
def test_a_wrong_command_line_ends_in_one_line(run: Path, words: str, told: str, tmp_path: Path) -> None:
    status, _, said = shared().run([word.format(run=run) for word in words.split()], {}, tmp_path)
    assert status == 2
    assert told in said
    assert said.count("\n") == 1
    assert not (tmp_path / "here").exists()


SHOWN = """(id) => overtone.chart(document.getElementById(id)).data.datasets.map(({label, data}) => ({label, data}))"""


@pytest.mark.slow
@pytest.mark.parametrize("colours", ["light", "dark"])
def test_the_page_shows_what_was_recorded(run: Path, colours: str, tmp_path: Path) -> None:
    if reason := web.missing():
        pytest.skip(reason)
    file = tmp_path / "page.html"
    status, printed, _ = shared().run(["spectrum", str(run), "--out", str(file), "--title", "<b>"], {}, tmp_path)
    assert (status, f"page: {file}" in printed) == (0, True)
    records = spectrum.read(run)
    with web.browser() as chromium:
        visit = web.Visit(chromium, file, colours=colours)
        page = visit.page
        assert page.locator("h1").inner_text() == "<b>"
        lines = {one["label"]: one["data"] for one in visit.run(SHOWN, "energy")}
        assert list(lines) == ["no transform", "DCT", "Hadamard", "Gaussian"]
        index = STRONGEST.index(128)
        wanted = [record["whole"]["energy"]["owed"]["dct"][index] for record in records]
        assert [point["y"] for point in lines["DCT"]] == pytest.approx(wanted, rel=0.01)
        assert [point["x"] for point in lines["DCT"]] == [record["step"] for record in records]
        # Another number of strongest values, another vector, another layer.
        page.locator("#strongest input[value='8']").check()
        page.locator("#of input[value='drift']").check()
        name = next(layer["name"] for layer in records[0]["layers"] if "energy" in layer)
        page.locator("#layer").select_option(name)
        layers = [next(layer for layer in record["layers"] if layer["name"] == name) for record in records]
        lines = {one["label"]: one["data"] for one in visit.run(SHOWN, "energy")}
        wanted = [layer["energy"]["drift"]["none"][0] for layer in layers]
        assert [point["y"] for point in lines["no transform"]] == pytest.approx(wanted, rel=0.01)
        assert name in page.locator("#energy-title").inner_text()
        # The level of agreement is 1 / K, and the first round has no round before it.
        drawn = {one["label"]: one["data"] for one in visit.run(SHOWN, "chart-agreement")}
        assert [point["y"] for point in drawn["1 / replicas"]] == [0.5] * 3
        drawn = {one["label"]: one["data"] for one in visit.run(SHOWN, "chart-cosine")}
        first, *later = [point["y"] for point in drawn[name]]
        assert first is None
        assert later == pytest.approx([layer["cosine"] for layer in layers[1:]], rel=0.01)
        # The grids and the table follow the round.
        chunked = sum("energy" in layer for layer in records[0]["layers"])
        assert page.locator("#maps figure").count() == chunked + 1
        page.locator("#at").fill("0")
        assert "step 4 (round 0)" in page.locator("#at-words").inner_text()
        strongest = max(layers[0]["frequencies"])
        told = page.locator(f"#maps figcaption[title='{name}'] + .map").get_attribute("aria-label")
        assert f"{100 * strongest:.1f}%" in str(told)
        assert page.locator("#table tbody tr").count() == len(records[0]["layers"]) + 1
        assert page.locator("#table tbody tr.chosen").inner_text().startswith(name)
        # A click on a grid chooses its layer.
        page.locator("#maps figure").first.click()
        assert page.locator("#layer").input_value() == "all layers"
        assert visit.run("document.documentElement.scrollWidth") <= 1280
        assert visit.complaints == []
        assert [url for url in visit.requests if not url.startswith(("file://", "blob:", "data:"))] == []
        visit.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["diloco", "published"])
def test_a_page_leaves_out_what_a_method_has_not(name: str, tmp_path: Path) -> None:
    if reason := web.missing():
        pytest.skip(reason)
    simulate(replace(configured(tmp_path / "run"), choice=MethodChoice(name, every=4)))
    file = tmp_path / "page.html"
    spectrum_data.write(file, spectrum_data.find([tmp_path / "run"]), "title")
    with web.browser() as chromium:
        visit = web.Visit(chromium, file, width=390)
        charts = visit.run("[...document.querySelectorAll('canvas')].map(({id}) => id)")
        dense = name == "diloco"
        assert ("chart-agreement" in charts) is dense
        assert ("chart-repeated" in charts) is not dense
        assert "chart-residual" not in charts
        assert visit.page.locator("#of").is_hidden() is dense
        assert ("sends every value" in visit.page.locator("#energy-hint").inner_text()) is dense
        assert visit.run("document.documentElement.scrollWidth") <= 390
        assert visit.complaints == []
        visit.close()
