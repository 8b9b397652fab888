"""What a run's log tells, which runs may be compared, and what the table says of them."""

import csv
import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import overtone
from overtone.errors import ConfigError, RunLogError
from overtone.report import comparison, history, link_time, page_data, standings, table
from overtone.report.comparison import Comparison
from overtone.runs import toml
from overtone.runs.config import MethodChoice, Network, Simulation, Training
from overtone.runs.simulate import simulate
from overtone.sim.network import Link
from overtone.tasks import Language, TaskOptions

Tell = Callable[..., history.History]


@pytest.fixture
def tell(tmp_path: Path) -> Tell:
    """A finished run by its log alone: three validations, the last of which is this loss."""

    def write(method: str, loss: float, sent: int = 1000, *, seed: int = 0, ended: bool = True, **more: Any) -> Any:
        numbers, steps, received = more.pop("numbers", {}), more.pop("steps", 30), more.pop("received", 0)
        config = Simulation(choice=MethodChoice(method, **numbers), seed=seed, replicas=more.pop("replicas", 4))
        row = config.choice.build()
        start = {
            "event": "start", "step": 0, "time": 0.0, "format": 1, "folder": "runs/one", "simulated": True,
            "method": method, "numbers": row.numbers(),
            "consensus": row.consensus, "parameters": 1000, "steps": steps, "unit": "tokens", "units_per_step": 64,
            "data": {"name": "a text", "fingerprint": "f00"}, "config": toml.flat(config.resolved()),
            "environment": {
                "overtone": "0.1.0", "python": "3", "versions": {"torch": "2"}, "commit": "", "command": ["overtone"],
                "world": 1,
            },
            **more,
        }  # fmt: skip
        lines: list[dict[str, Any]] = [start]
        for step in (10, 20, 30):
            so_far = {
                "bytes_sent": sent * step // 30, "bytes_received": received * step // 30, "hops": step, "seconds": 1.0,
                "units": 0, "rounds": step // 10,
            }  # fmt: skip
            shown = 9 - step * (9 - loss) / 30
            speed = {"lr": 0.1, "units_per_second": 1.0, "seconds_left": 0.0, "waiting_share": 0.5}
            lines.append({"event": "train", "step": step, "time": 0.0, "loss": shown, **so_far, **speed})
            ends = {
                "rounds_finish": 0, "waiting_share": 0.5, "bytes": {}, "anchor_fingerprint": "f",
                "shares": {}, "seconds_starting": 0.0, "sample": "",
            } if step == 30 else {}  # fmt: skip
            lines.append(
                {
                    "event": "finish" if step == 30 else "eval",
                    "step": step,
                    "time": 0.0,
                    "metrics": {"loss": shown},
                    "drift": 0.1,
                    "metrics_average": {"loss": shown + 1},
                    **so_far,
                    **ends,
                }
            )
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        lines = lines if ended else lines[:-2]
        (folder / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return history.load(folder)

    return write


def one_group(*runs: history.History) -> standings.Group:
    (group,) = standings.groups(runs)
    return group


def test_words_of_a_foreign_log_do_no_harm(tell: Tell) -> None:
    """HTML, formulas and escape sequences in a log reach neither who reads the Markdown, nor a spreadsheet, nor a
    terminal; numbers stay numbers."""
    evil = "=cmd()<script>alert(1)</script>\x1b]0;x\x07"
    run = tell("decoupled", -2.0, data={"name": evil, "fingerprint": "f00"}, unit="@SUM(A1)")
    run.events[-1]["metrics"]["+evil"] = -1.5
    groups = standings.groups([run])
    assert "<script>" not in table.markdown(groups)
    assert "&lt;script&gt;" in table.markdown(groups)
    (row,) = csv.DictReader(io.StringIO(table.as_csv(groups)))
    assert float(row["loss"]) == -2.0
    assert float(row["'+evil"]) == -1.5
    assert not any(cell.startswith(("=", "+", "@")) for cell in (*row, *row.values()))
    console = Console(file=io.StringIO(), width=200)
    console.print(table.terminal(groups[0]))
    written = [table.as_csv(groups), table.markdown(groups), console.file.getvalue()]  # type: ignore[attr-defined]
    assert not any("\x1b" in text for text in written)


def test_gain_and_ratios(tell: Tell) -> None:
    group = one_group(tell("alone", 3.0, 0), tell("ddp", 1.9, 10_000), tell("diloco", 2.0), tell("decoupled", 2.1, 50))
    versus = {row.label: group.versus(row) for row in group.rows}
    assert versus["decoupled"].less_than_diloco == 20
    assert versus["decoupled"].less_than_ddp == 200
    assert versus["decoupled"].loss_vs_diloco == pytest.approx(0.05)
    assert versus["decoupled"].gain_kept == pytest.approx(0.9)
    assert versus["alone"].gain_kept == 0
    assert math.isinf(versus["alone"].less_than_diloco or 0)
    assert versus["ddp"].less_than_diloco == 0.1
    headers, body = table.cells(group)
    assert [line[0] for line in body] == ["alone", "ddp", "diloco", "decoupled"]
    assert body[3][headers.index("bytes vs DiLoCo")] == "20x fewer"
    assert body[1][headers.index("bytes vs DiLoCo")] == "10x more"
    assert body[0][headers.index("bytes vs DiLoCo")] == "nothing"


def test_rows_are_compared_on_the_seeds_that_both_have(tell: Tell) -> None:
    """A lucky second seed of the reference must not be held against a row that has only the first."""
    group = one_group(
        tell("alone", 3.0, 0), tell("alone", 3.0, 0, seed=1), tell("diloco", 2.0), tell("diloco", 1.0, seed=1),
        tell("decoupled", 2.0),
    )  # fmt: skip
    diloco, decoupled = (next(row for row in group.rows if row.method == name) for name in ("diloco", "decoupled"))
    assert (diloco.loss, diloco.spread, diloco.seeds) == (1.5, 1.0, [0, 1])
    assert decoupled.spread is None
    assert group.versus(decoupled).loss_vs_diloco == 0
    assert group.versus(decoupled).gain_kept == 1
    assert table.loss_words(diloco) == "1.500 ± 0.500"


def test_the_reference_is_the_best_of_the_most_talkative(tell: Tell) -> None:
    group = one_group(
        tell("diloco", 2.0, 400, numbers={"every": 10, "lr": 0.9}),
        tell("diloco", 2.1, 400, numbers={"every": 10, "lr": 0.7}),
        tell("diloco", 1.9, 100, numbers={"every": 40, "lr": 0.9}),
        tell("diloco", 1.8, 400, numbers={"every": 10, "lr": 0.9, "delay": 5}),
        tell("diloco", 2.2, 400, numbers={"every": 10, "lr": 0.9, "momentum": 0.5}),
    )
    assert group.diloco is not None
    assert group.diloco.label == "diloco"  # what most of them have goes without saying
    assert {row.label for row in group.rows} == {
        "diloco", "diloco, outer lr 0.7", "diloco, every 40", "diloco, delay 5", "diloco, momentum 0.5",
    }  # fmt: skip


def test_without_references_nothing_is_claimed(tell: Tell) -> None:
    group = one_group(tell("decoupled", 2.0), tell("alone", 3.0, 0))
    assert all(value is None for row in group.rows for value in vars(group.versus(row)).values())
    headers, _ = table.cells(group)
    assert "gain kept" not in headers
    worse = one_group(tell("alone", 2.0, 0), tell("diloco", 2.5), tell("decoupled", 2.2))
    assert all(worse.versus(row).gain_kept is None for row in worse.rows)  # DiLoCo gained nothing to keep


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"data": {"name": "b text"}}, "data (b text instead of a text)"),
        ({"data": {"name": "a text", "fingerprint": "bad"}}, "same name, other contents"),
        ({"parameters": 2000}, "parameters (2,000 instead of 1,000)"),
        ({"replicas": 8}, "replicas (8 instead of 4)"),
        ({"units_per_step": 128}, "units (15,360 instead of 7,680)"),
        ({"steps": 60}, "steps (60 instead of 30)"),
    ],
)
def test_what_may_not_be_compared_is_set_apart(tell: Tell, other: dict[str, Any], told: str) -> None:
    first, second = standings.groups([tell("diloco", 2.0), tell("decoupled", 1.0, **other)])
    assert told in (standings.difference(second, first) or "")
    assert second.versus(second.rows[0]).loss_vs_diloco is None
    assert first.name != second.name
    shown = page_data.data([first, second], title="t")
    assert told in shown["groups"][1]["note"]
    assert shown["groups"][0]["note"] is None
    assert told in table.markdown([first, second])


def test_without_consensus_there_are_two_rows(tell: Tell) -> None:
    group = one_group(tell("published", 2.0), tell("diloco", 2.0))
    mine = {row.label: row for row in group.rows}
    assert mine["published"].loss == 2.0
    assert mine["published, mean"].loss == 3.0
    assert mine["published"].drift == 0.1
    assert any("no shared model" in text for text in mine["published"].caveats)
    assert not mine["diloco"].caveats


def test_what_went_wrong_is_marked_and_never_dropped(tell: Tell, tmp_path: Path) -> None:
    group = one_group(
        tell("alone", 3.0, 0), tell("ddp", math.nan), tell("diloco", 2.0, ended=False), tell("decoupled", 12.0)
    )
    caveats = {row.label: row.caveats for row in group.rows}
    assert caveats == {
        "alone": [],
        "ddp": ["diverged: its loss is not finite"],
        "diloco": ["unfinished at step 20 of 30"],
        "decoupled": ["diverged: it ended worse than it began"],
    }
    shown = page_data.data([group], title="t")
    assert [run["status"] for run in shown["groups"][0]["runs"]] == ["finished", "diverged", "unfinished", "diverged"]
    page_data.write(tmp_path / "page.html", [group], title="NaN")
    assert "NaN" not in (tmp_path / "page.html").read_text().split('id="data"')[1].split("</script>")[0].replace(
        '"title":"NaN"', ""
    )
    rows = list(csv.DictReader(io.StringIO((tmp_path / "page.csv").read_text())))
    assert len(rows) == 4
    assert rows[1]["marks"] == "diverged: its loss is not finite"


def test_claims_are_of_finished_runs_only(tell: Tell) -> None:
    """A run cut off early has sent little, and proves nothing by it. Nor is it a reference."""
    group = one_group(
        tell("alone", 3.0, 0), tell("diloco", 2.0), tell("diloco", 1.0, seed=1, ended=False),
        tell("decoupled", 2.1, 50, ended=False), tell("ddp", 1.9, ended=False),
    )  # fmt: skip
    rows = {row.method: row for row in group.rows}
    assert all(value is None for value in vars(group.versus(rows["decoupled"])).values())
    assert group.ddp is None
    assert (rows["diloco"].loss, rows["diloco"].spread, rows["diloco"].bytes) == (2.0, None, 1000)
    assert rows["decoupled"].loss is not None
    assert rows["decoupled"].caveats == ["unfinished at step 20 of 30"]


def test_a_reference_that_diverged_is_none(tell: Tell) -> None:
    group = one_group(tell("diloco", math.nan, numbers={"lr": 0.7}), tell("diloco", 2.0), tell("decoupled", 2.0))
    assert group.diloco is not None
    assert group.diloco.loss == 2.0
    lucky = one_group(tell("diloco", 1.0, numbers={"lr": 0.8}), tell("diloco", 2.0), tell("diloco", 2.0, seed=1))
    assert lucky.diloco is not None
    assert lucky.diloco.seeds == [0, 1]  # two seeds against one lucky one


def test_the_same_run_twice_is_shown_twice(tell: Tell) -> None:
    group = one_group(tell("diloco", 2.0), tell("diloco", 2.0), tell("decoupled", 2.1))
    assert {row.label: row.seeds for row in group.rows} == {"diloco": [0], "diloco, again (2)": [0], "decoupled": [0]}


def test_another_number_of_replicas_on_the_way(tell: Tell) -> None:
    run, folded = tell("diloco", 2.0), tell("diloco", 2.0, folded=True, from_replicas=2)
    events = [{**event, **({"event": "resume"} if event["event"] == "start" else {})} for event in folded.events]
    first, second = standings.groups([run, history.History(folded.path, events)])
    assert "other replicas for a part of it" in (standings.difference(second, first) or "")
    assert second.rows[0].caveats == ["had 2 replicas up to step 0"]


def test_words_from_a_log_are_no_markup(tell: Tell) -> None:
    run = tell("diloco", 2.0, ended=False)
    stopped = history.History(run.path, [*run.events, {"event": "fail", "step": 20, "why": "[/tmp/x] is gone"}])
    console = Console(file=io.StringIO(), width=200)
    console.print(table.terminal(one_group(stopped)))
    assert isinstance(console.file, io.StringIO)
    assert "stopped at step 20 of 30: [/tmp/x] is gone" in console.file.getvalue()


@pytest.mark.parametrize(
    ("fewer", "told"), [(None, ""), (math.inf, "nothing"), (1.0, "1x"), (43.54, "43.5x fewer"), (0.1, "10x more"),
                        (3959.7, "3,960x fewer")]
)  # fmt: skip
def test_ratios_in_words(fewer: float | None, told: str) -> None:
    assert table.ratio(fewer) == told


def test_the_report_overwrites_no_stranger(tell: Tell, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    groups = standings.groups([tell("diloco", 2.0)])
    with pytest.raises(ConfigError, match=r"README\.md is there already"):
        page_data.write(tmp_path / "README.html", groups, title="t")
    with pytest.raises(ConfigError, match=r"ends in \.html"):
        page_data.write(tmp_path / "page.md", groups, title="t")
    for _ in range(2):
        page_data.write(tmp_path / "page.html", groups, title="t")
    assert (tmp_path / "README.md").read_text() == "mine"


def test_several_sizes_make_a_scaling_chart(tell: Tell) -> None:
    runs = [
        tell(method, 2.0 + k / 100, replicas=k, steps=240 // k, numbers={"every": 10}, seed=seed)
        for method in ("diloco", "decoupled")
        for k in (2, 4, 8)
        for seed in (0, 1)
    ]
    scaling = page_data.data(standings.groups(runs), title="t")["scaling"]
    assert [series["x"] for series in scaling["series"]] == [[2, 4, 8], [2, 4, 8]]
    assert [series["label"] for series in scaling["series"]] == ["diloco", "decoupled"]
    other = tell("decoupled", 9.0, replicas=4, steps=60, numbers={"every": 10, "transform": "none"})
    with_other = page_data.data(standings.groups([*runs, other]), title="t")["scaling"]
    assert with_other["series"] == scaling["series"]  # another setting at one size says nothing about sizes
    assert page_data.data(standings.groups(runs[:2]), title="t")["scaling"] is None


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda _: None, "holds no run"),
        (lambda folder: (folder / "run.jsonl").write_text(""), "no beginning"),
        (lambda folder: (folder / "run.jsonl").write_text('{"event": "start", "step": 0}\n'), "make the run again"),
        (
            lambda folder: (folder / "run.jsonl").write_text('{"a": 1}\n{"event": "x", "step": 1}\n'),
            "the log has no beginning",
        ),
    ],
)
def test_what_is_no_run(make: Callable[[Path], None], told: str, tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(RunLogError, match=told):
        [history.load(path) for path in history.find([tmp_path])]
    with pytest.raises(RunLogError, match="no such file"):
        history.find([tmp_path / "nowhere"])


def test_bytes_received_count_where_they_are_more(tell: Tell) -> None:
    group = one_group(tell("diloco", 2.0, 1000, received=1000), tell("decoupled", 2.1, 50, received=200))
    decoupled = next(row for row in group.rows if row.method == "decoupled")
    assert (decoupled.bytes, decoupled.received) == (50, 200)
    assert group.versus(decoupled).less_than_diloco == 5
    headers, body = table.cells(group)
    assert [line[headers.index("bytes received")] for line in body] == ["1 kB", "200 B"]
    equal = one_group(tell("diloco", 2.0, 1000, received=1000), tell("alone", 3.0, 0))
    assert "bytes received" not in table.cells(equal)[0]
    assert "| bytes received |" in table.markdown([equal])
    assert [row["bytes_received"] for row in csv.DictReader(io.StringIO(table.as_csv([equal])))] == ["0", "1000"]


def test_labels_name_exchange_and_delay(tell: Tell) -> None:
    """A method lists neither where they say nothing; the rows are in one group whatever they say."""

    def labels(*numbers: dict[str, Any]) -> list[str]:
        return standings.labels([tell("decoupled", 2.0, numbers=one) for one in numbers])

    sharded, delayed = {"exchange": "sharded"}, {"delay": 5}
    assert labels({}, delayed, sharded) == ["decoupled", "decoupled, delay 5", "decoupled, exchange sharded"]
    assert labels({}, delayed) == ["decoupled", "decoupled, delay 5"]
    assert labels({}, delayed, {**delayed, "keep": 8})[:2] == ["decoupled", "decoupled, delay 5"]
    assert labels(delayed, {**delayed, "keep": 8}) == ["decoupled, keep 56", "decoupled, keep 8"]
    assert labels({}, {}, {"exchange": "gathered"})[2] == "decoupled, exchange gathered"
    assert labels({"exchange": "gathered"}, {**sharded, "keep_down": 512}) == [
        "decoupled, exchange gathered", "decoupled, exchange sharded, keep down 512",
    ]  # fmt: skip
    assert labels(sharded, {**sharded, "keep_down": 512}) == [
        "decoupled, default keep down", "decoupled, keep down 512",
    ]  # fmt: skip
    before = tell("diloco", 2.0)  # of a version without delays, or with one that is 0
    group = one_group(before, tell("diloco", 2.0, seed=1), tell("diloco", 2.0, numbers={"delay": 2}))
    assert {row.label: row.seeds for row in group.rows} == {"diloco": [0, 1], "diloco, delay 2": [0]}


@pytest.mark.parametrize(("seconds", "told"), [(None, ""), (0.25, "0.25 s"), (119, "119 s"), (120, "2 min"),
                                               (5e5, "5.79 days")])  # fmt: skip
def test_times_in_words(seconds: float | None, told: str) -> None:
    assert table.duration(seconds) == told


DELAYED = (  # rounds at steps 4, 8 and 12; the last is in flight at the end, which comes at once or a step later
    "diloco:delay=1", "diloco:delay=3", "decoupled:delay=4", "published:delay=2", "decoupled:exchange=sharded",
    "decoupled:exchange=sharded,delay=3",
)  # fmt: skip
STORED = (  # with messages of 48 kB, which are long beside a commit
    "decoupled:exchange=store,keep=2048,bits=32", "decoupled:exchange=store,keep=2048,bits=32,delay=3",
)  # fmt: skip


@pytest.mark.parametrize(("bandwidth", "latency", "steps"), [(1000.0, 0.1, 12), (0.02, 20.0, 13)])
@pytest.mark.parametrize("name", [*overtone.METHODS, *DELAYED, *STORED])
def test_time_on_a_link_follows_from_the_log(
    name: str, bandwidth: float, latency: float, steps: int, tmp_path: Path
) -> None:
    """The page's formula is the simulator's clock: every method, whatever its exchanges, on a link that is so fast that
    local steps hide a round, and on one that is so slow that they do not. What is sent takes twice as long here.

    In a store it is so within 2 %: a replica waits for the longest message and for the commit, whoever writes them, and
    a log knows what replica 0 has written."""
    rel = 0.02 if name in STORED else 1e-6
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog; " * 1000)
    task = TaskOptions(data=str(text), valid_samples=8, language=Language(width=32, layers=1, heads=2))
    network = Network(bandwidth=bandwidth, up=bandwidth / 2, latency=latency)
    asked = Comparison(replicas=3, task=task, training=Training(steps=steps, batch=2), every=4, network=network)
    config = comparison.configured(asked, name, 0, tmp_path / "run")
    assert isinstance(config, Simulation)
    simulate(replace(config, eval_every=1))
    run = history.load(tmp_path / "run")
    link = Link(bandwidth=bandwidth * 1e6 / 2, latency=latency / 1e3, download=bandwidth * 1e6)
    for point in run.evals:
        passed = link_time.seconds(run, point, link, network.step_seconds)
        assert passed == pytest.approx(point["simulated_seconds"], rel=rel), point["step"]
    assert len(run.evals) == steps
    assert run.finish is not None
    # What is called waiting is the time in which the replica stood still, and nothing else.
    ends = run.finish["simulated_seconds"]
    waited = run.finish["waiting_share"] * ends
    assert waited == pytest.approx(ends - steps * network.step_seconds, rel=rel, abs=1e-6)
    (group,) = standings.groups([run])
    assert group.seconds(group.rows[0]) == pytest.approx(ends, rel=rel)
    hidden, waited = (sum(event[key] for event in run.exchanged) for key in ("seconds_hidden", "seconds_waiting"))
    assert (hidden > 0) == bool(run.delay)
    assert (waited > 0) == (run.method != "alone")
    if run.delay:  # on the fast link, only for the round that the end cut short
        assert [event["seconds_waiting"] > 0 for event in run.exchanged] == [bandwidth < 1, bandwidth < 1, True]


def test_the_committed_table_is_what_the_committed_logs_say() -> None:
    results = Path(__file__).parent.parent / "benchmarks" / "results"
    found = standings.groups(history.load(path) for path in history.find([results / "paper"]))
    said, committed = (
        [set(line.items()) for line in csv.DictReader(io.StringIO(text))]
        for text in (table.as_csv(found), (results / "paper.csv").read_text())
    )
    assert len(said) == len(committed)
    assert all(line in committed for line in said)
