"""The report page in a real browser: every promise of the page, on data as a comparison gives it."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import itertools
import json
import math
import random
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import browser as web
from overtone import Link
from overtone.report import comparison, history, link_time, page, page_data, standings, table
from overtone.report.comparison import Comparison
from overtone.runs.config import Network, Simulation, Training
from overtone.runs.simulate import simulate
from overtone.tasks import Language, TaskOptions

pytestmark = pytest.mark.slow  # a browser of its own for each worker
HOSTILE = "</script><img src=x onerror=alert(1)>"
STEPS = list(range(0, 601, 50))
NAN = float("nan")


def run(
    label: str, seed: int, end: float, per_step: int, *, until: int = 600, status: str = "finished", top1: bool = False
) -> dict[str, Any]:
    """A run whose loss falls from 5.5 towards ``end``, sending ``per_step`` bytes a step in rounds of ten.

    ``until=-1``: it has just begun, and nothing is measured yet.
    """
    dice = random.Random(f"{label} {seed}")
    step = [s for s in STEPS if s <= until]
    loss = [end + (5.5 - end) * math.exp(-s / 90) + dice.gauss(0, 0.008) for s in step]
    if status == "diverged":
        loss = [x + max(0, s - 150) ** 2 / 4e3 for s, x in zip(step, loss, strict=True)]
        loss[-1] = NAN
    curve: dict[str, Any] = {
        "step": step, "loss": loss, "average": [x - 0.1 for x in loss], "bytes": [s * per_step for s in step],
        "received": [3 * s * per_step for s in step], "hops": [s // 10 * 2 * bool(per_step) for s in step],
        "seconds": [0.05 * s for s in step],
    }  # fmt: skip
    if top1:
        curve["top1"] = [1 - math.exp(-s / 200) + dice.gauss(0, 0.01) for s in step]
    rounds = list(range(10, until + 1, 20)) if per_step else []  # every other one: reports thin them
    return {
        "label": label, "seed": seed, "status": status, "simulated": True,
        "marks": [] if status == "finished" else [f"{status} at step {until} of 600"],
        "curve": curve,
        "train": {"step": step, "loss": [x - 0.1 for x in loss]},
        "rounds": {
            "step": rounds, "bytes": [10 * per_step for _ in rounds], "drift": [2 / math.sqrt(s) for s in rounds],
            "residual": [None for _ in rounds], "waiting": [0.01 for _ in rounds], "hidden": [0.0 for _ in rounds],
        },
        "rounds_done": max(0, until // 10) if per_step else 0,
        "spread_of_replicas": {"step": step, "value": [0.01 * math.sqrt(s) for s in step]} if per_step else None,
        "finish": {
            "rounds": until // 10 if per_step else 0, "rounds_finish": 3, "waiting_share": 0.2,
            "bytes": {"rounds": {"sent": until * per_step, "received": 3 * until * per_step, "waiting": 1.5}},
            "shares": {"inner steps": 0.9, "rounds": 0.1},
        } if status == "finished" else None,
        "config": {"method.every": 10, "method.keep": None, "data": HOSTILE, "training.steps": 600},
        "environment": {"versions": {"torch": "2.13.0"}, "host": "a-host-with-a-rather-long-name.example.internal"},
        "command": f"overtone simulate --method {label} --seed {seed} --every 10 --json runs/{label}-{seed}.json",
    }  # fmt: skip


def group(
    name: str, methods: list[tuple[Any, ...]], *, top1: bool = False, seeds: int = 2, note: str | None = None
) -> dict[str, Any]:
    runs: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for label, method, end, per_step, *how in methods:
        more = dict(how[0]) if how else {}
        mine = [run(label, seed, end + 0.02 * seed, per_step, top1=top1, **more) for seed in range(seeds)]
        ended = all(one["finish"] for one in mine)
        losses = [one["curve"]["loss"][-1] for one in mine if one["curve"]["loss"]]
        loss = sum(losses) / seeds if losses else None
        row = {
            "label": label, "method": method, "runs": list(range(len(runs), len(runs) + seeds)), "of": "loss",
            "seeds": list(range(seeds)), "loss": loss,
            "spread": 0.01 if seeds > 1 and losses else None,
            "metrics": {"top1": mine[0]["curve"]["top1"][-1]} if top1 else {},
            **{name: mine[0]["curve"][name][-1] if losses else None for name in ("bytes", "received")},
            **dict.fromkeys(("less_than_diloco", "less_than_ddp", "loss_vs_diloco", "gain_kept", "waiting")),
            "drift": 0.013 if per_step else 0.267, "rounds": mine[0]["rounds_done"],
            "reference": label == "diloco", "marks": list(mine[0]["marks"]),
            "has_diloco": True, "has_ddp": any(method == "ddp" for _, method, *_ in methods),
        }  # fmt: skip
        if ended and loss is not None:
            row |= {
                "less_than_diloco": 72e3 / per_step if per_step else math.inf,
                "less_than_ddp": (72e4 / per_step if per_step else math.inf) if row["has_ddp"] else None,
                "loss_vs_diloco": loss / 2.22 - 1,
                "gain_kept": (2.31 - loss) / 0.09,
                "waiting": 0.2 if per_step else None,
            }
        rows.append(row)
        if method == "published":
            row["marks"] = ["replica 0; no shared model"]
            rows.append({**row, "label": f"{label}, mean", "of": "average", "marks": ["mean of the replicas"]})
        runs += mine
    facts = {
        "data": "standard library",
        "model": "gpt-neox, 2 layers of 64",
        "parameters": 119424,
        "replicas": 4,
        "steps": 600,
        "units": 307200,
        "unit": "tokens",
    }
    link = {"up": 50.0, "down": 50.0, "latency": 20.0, "step_seconds": 0.1}
    return {"name": name, "note": note, "facts": facts, "link": link, "rows": rows, "runs": runs}


def example() -> dict[str, Any]:
    text = [
        ("alone", "alone", 2.311, 0),
        ("ddp", "ddp", 2.089, 717_000),
        ("diloco", "diloco", 2.218, 72_000),
        ("published", "published", 2.492, 2_200),
        ("decoupled", "decoupled", 2.204, 1_650),
        ("decoupled, keep 8", "decoupled", 2.262, 480),
        ("sparse_loco", "sparse_loco", 2.3, 9_000, {"status": "diverged"}),
        ("local_sgd", "local_sgd", 2.35, 72_000, {"until": 300, "status": "stopped"}),
        ("demo", "demo", 2.3, 20_000, {"until": 200, "status": "unfinished"}),
        ("alone, warmup 9", "alone", 2.3, 0, {"until": -1, "status": "unfinished"}),
        (HOSTILE, HOSTILE, 2.4, 5_000),
    ]
    image = [("alone", "alone", 1.2, 0), ("diloco", "diloco", 0.9, 40_000), ("decoupled", "decoupled", 0.91, 1_000)]
    series = [
        {
            "label": label,
            "x": [2, 4, 8, 16],
            "loss": [end + 0.01 * k for k in range(4)],
            "low": [end - 0.02] * 4,
            "high": [end + 0.05] * 3 + [None],
        }
        for label, end in (("diloco", 2.22), ("decoupled", 2.2))
    ]
    return {
        "title": "Loss against bytes <b>", "made": "2026-11-16 09:00 UTC", "version": "0.1.0",
        "command": "overtone compare --seeds 0 1",
        "legend": ["loss: nats per byte, after finish().", "bytes sent: by one replica over the whole run."],
        "groups": [
            group("standard library · 4 replicas · 600 steps", text),
            group("digits · 4 replicas", image, top1=True, seeds=1, note="Other data: compare within the group only."),
        ],
        "scaling": {"title": "More replicas", "note": "After the same steps.", "x": "replicas", "series": series},
    }  # fmt: skip


def crowded() -> dict[str, Any]:
    """Seven groups with the long names of a large comparison, the first of them with seventeen rows."""
    numbers = {
        "alone": [""], "ddp": [""], "demo": [""], "diloco": ["", ", outer lr 0.7, momentum 0.9", ", every 40"],
        "sparse_loco": [", outer lr 0.9, momentum 0.8", ", outer lr 1.0, momentum 0.0"],
        "published": [", outer lr 0.7, decay 0.9", ", outer lr 0.9, decay 0.8"],
        "decoupled": [", keep 512", ", keep 128", ", keep 128, transform none", ", keep 32", ", every 40, keep 32"],
    }  # fmt: skip
    labels = [(method + more, method) for method, variants in numbers.items() for more in variants]
    methods = [(label, method, 2 + 0.02 * i, i * 700) for i, (label, method) in enumerate(labels)]
    names = [f"the whole standard library of the language · {2**k} replicas · {2880 >> k} steps" for k in range(6)]
    few = [("alone", "alone", 2.3, 0), ("diloco", "diloco", 2.2, 72_000)]
    groups = [group("standard library · 4 replicas", methods, seeds=1), *(group(name, few) for name in names)]
    return {**example(), "groups": groups}


def written(folder: Path, data: dict[str, Any]) -> Path:
    path = folder / "page.html"
    path.write_text(page.html(data), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("page"), example())


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    if reason := web.missing():
        pytest.skip(reason)
    with web.browser() as running:
        yield running


@pytest.fixture
def visit(chromium: Any, file: Path) -> Iterator[Callable[..., web.Visit]]:
    """Opens the page. Whatever a test does with it, it must stay quiet and ask for nothing but itself."""
    visits: list[web.Visit] = []

    def open_page(of: Path = file, **how: Any) -> web.Visit:
        visits.append(web.Visit(chromium, of, **how))
        return visits[-1]

    yield open_page
    for one in visits:
        one.close()
        assert one.complaints == []
        assert [url for url in one.requests if not url.startswith(("file://", "blob:", "data:"))] == []


CURVES = "overtone.chart(document.getElementById('curves'))"
DATASETS = """(id) => overtone.chart(document.getElementById(id)).data.datasets
  .map(({label, main, level, seed, hidden, data}) => ({label, main, level, seed, hidden, data}))"""
NAMED = f"{CURVES}.named.map(({{ text, box }}) => ({{ text, ...box, width: {CURVES}.width }}))"
PIXELS = """(source) => {  // 32 bits each; of a copy, since reading a canvas twice makes the browser complain
  const { width, height } = source;
  const context = Object.assign(document.createElement("canvas"), { width, height }).getContext("2d");
  context.drawImage(source, 0, 0);
  return new Uint32Array(context.getImageData(0, 0, width, height).data.buffer);
}"""


def lines(visit: web.Visit) -> dict[str, dict[str, Any]]:
    """The large chart's lines by label, without single seeds."""
    return {one["label"]: one for one in visit.run(DATASETS, "curves") if one.get("main")}


def choose(visit: web.Visit, control: str, value: str) -> None:
    visit.page.locator(f"#{control} input[value='{value}']").check()


def inked(visit: web.Visit, canvas: str) -> int:
    """How many pixels of a canvas something was drawn on."""
    return int(visit.run(f"(selector) => ({PIXELS})(document.querySelector(selector)).filter(Boolean).length", canvas))


def column(visit: web.Visit, name: str) -> list[str]:
    if name == "method":  # without tags and marks
        return [label.strip() for label in visit.page.locator("#table tbody th .label").all_inner_texts()]
    heads = visit.page.locator("#table thead th").all_inner_texts()
    cells = visit.page.locator(f"#table tbody tr > :nth-child({heads.index(name) + 1})")
    return [cell.strip() for cell in cells.all_inner_texts()]


# Without a browser


def test_dark_has_every_colour_that_light_has() -> None:
    light, dark = (
        re.findall(r"^  (--[\w-]+): #\w{6};$", (Path(page.__file__).parent / name).read_text(), re.MULTILINE)
        for name in ("page.css", "dark.css")
    )
    assert light == dark
    assert len(light) > 20


def test_one_file_well_under_a_megabyte_without_its_data() -> None:
    text = page.html({**example(), "groups": [], "scaling": None})
    assert len(text.encode()) < 500_000
    assert "sourceMappingURL" not in text


def test_data_cannot_end_its_script() -> None:
    strings = [HOSTILE, "<!-- <script>", "a\u2028b\u2029c", "{{style}}"]
    text = page.html({**example(), "legend": strings, "title": "<b>&"})
    data = text.split('id="data">')[1].split("</script>")[0]
    assert json.loads(data)["legend"] == strings
    assert not any(found in data for found in page.ESCAPES)
    assert "<title>&lt;b&gt;&amp;</title>" in text


def test_numbers_that_are_not_finite_become_null() -> None:
    text = page.html({**example(), "more": [NAN, (math.inf, {"x": -math.inf}), 1.5]})
    assert json.loads(text.split('id="data">')[1].split("</script>")[0])["more"] == [None, [None, {"x": None}], 1.5]


def test_vendored_file_is_the_one_its_note_names() -> None:
    vendor = Path(page.__file__).parent / "vendor"
    digest = hashlib.sha256((vendor / "chart.umd.min.js").read_bytes()).hexdigest()
    assert digest in (vendor / "README.md").read_text()


# The charts


def test_charts_are_drawn_with_a_line_for_every_row(visit: Callable[..., web.Visit]) -> None:
    seen = visit()
    rows = example()["groups"][0]["rows"]
    assert list(lines(seen)) == [row["label"] for row in rows if row["loss"] is not None]
    single = [one for one in seen.run(DATASETS, "curves") if one["label"] == "decoupled" and not one.get("main")]
    assert [one["seed"] for one in single] == [0, 1]
    assert inked(seen, "#curves") > 5_000
    assert [one["label"] for one in seen.run(DATASETS, "scaling") if one.get("main")] == ["diloco", "decoupled"]
    assert inked(seen, "#scaling") > 5_000
    summary = seen.page.locator("#curves-summary").text_content()
    assert "decoupled: 2.2" in summary
    assert "“Save as CSV” has all values" in summary


def test_bytes_are_on_a_logarithmic_axis(visit: Callable[..., web.Visit]) -> None:
    seen = visit()
    assert seen.run(f"{CURVES}.scales.x.type") == "logarithmic"
    drawn = lines(seen)
    assert all(point["x"] > 0 for one in drawn.values() for point in one["data"])
    row = next(row for row in example()["groups"][0]["rows"] if row["label"] == "decoupled")
    assert drawn["decoupled"]["data"][-1]["x"] == row["bytes"]
    assert drawn["decoupled"]["data"][-1]["y"] == pytest.approx(row["loss"])
    # What sends nothing is a level at its end, from one edge to the other.
    level = drawn["alone"]
    assert level["level"]
    assert len({point["y"] for point in level["data"]}) == 1
    assert level["data"][1]["x"] == max(point["x"] for one in drawn.values() for point in one["data"])


def test_bytes_received_have_an_axis_of_their_own(visit: Callable[..., web.Visit]) -> None:
    seen = visit()
    choose(seen, "axes", "received")
    assert seen.run(f"{CURVES}.scales.x.type") == "logarithmic"
    row = next(row for row in example()["groups"][0]["rows"] if row["label"] == "decoupled")
    assert lines(seen)["decoupled"]["data"][-1]["x"] == row["received"] == 3 * row["bytes"]
    assert lines(seen)["alone"]["level"]
    assert "Dashed level: alone, which receives nothing." in seen.page.locator("#curves-hint").inner_text()
    assert "bytes received by one replica" in seen.page.locator("#curves-title").inner_text()
    assert "after 2.97 MB received" in seen.page.locator("#curves-summary").text_content()


def test_each_axis_shows_its_own_numbers(visit: Callable[..., web.Visit]) -> None:
    seen = visit()
    ends = {}
    for axis in ("steps", "wall", "link"):
        choose(seen, "axes", axis)
        assert seen.run(f"{CURVES}.scales.x.type") == "linear"
        ends[axis] = lines(seen)["diloco"]["data"][-1]["x"]
        assert inked(seen, "#curves") > 5_000
    assert ends["steps"] == 600
    assert ends["wall"] == pytest.approx(30)  # seconds
    assert "time on a link of 50 Mbit/s, 20 ms" in seen.page.locator("#curves-title").inner_text()
    seen.page.check("#log")
    assert seen.run(f"{CURVES}.scales.x.type") == "logarithmic"


def test_the_start_does_not_squash_the_end_unless_asked(visit: Callable[..., web.Visit]) -> None:
    seen = visit()
    top = f"{CURVES}.scales.y.max"
    assert seen.run(top) < 3.5
    seen.page.check("#whole")
    assert seen.run(top) > 40


@pytest.mark.parametrize(
    ("label", "last"),
    [("sparse_loco", 550), ("local_sgd", 300), ("demo", 200)],  # diverged (NaN at 600), stopped, unfinished
)
def test_a_run_that_did_not_finish_ends_with_a_cross_in_sight(
    visit: Callable[..., web.Visit], label: str, last: int
) -> None:
    seen = visit()
    style, inside, value, step = seen.run(
        """(label) => {
          const chart = overtone.chart(document.getElementById("curves"));
          const index = chart.data.datasets.findIndex((one) => one.label === label);
          const end = chart.getDatasetMeta(index).data.at(-1);
          const inside = end.y > chart.chartArea.top && end.y < chart.chartArea.bottom;
          const { value, step } = chart.data.datasets[index].data.at(-1);
          return [end.options.pointStyle, inside, value, step];
        }""",
        label,
    )
    assert (style, inside, step) == ("crossRot", True, last)
    assert value > 30 if label == "sparse_loco" else value < 5


def test_a_seed_that_did_not_finish_is_left_out_of_the_mean(visit: Callable[..., web.Visit], tmp_path: Path) -> None:
    data = example()
    whole = data["groups"][0]["runs"][8]["curve"]["loss"]
    data["groups"][0]["runs"][9] = run("decoupled", 1, 4.0, 1_650, until=300, status="unfinished")
    seen = visit(of=written(tmp_path, data))
    assert [point["y"] for point in lines(seen)["decoupled"]["data"]] == pytest.approx(whole[1:])  # 0 bytes: no place
    assert seen.page.locator("#table tr.broken", has_text="decoupled unfinished").count() == 1
    assert column(seen, "time on link")[5] == "62.9 s"  # of the seed that finished


def test_hover_and_tap_tell_the_numbers(visit: Callable[..., web.Visit]) -> None:
    spot = """() => {
      const chart = overtone.chart(document.getElementById("curves"));
      const index = chart.data.datasets.findIndex((one) => one.label === "decoupled");
      return {x: chart.getDatasetMeta(index).data.at(-1).x, y: chart.getDatasetMeta(index).data.at(-1).y};
    }"""
    told = f"[{CURVES}.tooltip.title, {CURVES}.tooltip.body[0]?.lines]"
    for touch in (False, True):
        seen = visit(touch=touch)
        canvas = seen.page.locator("#curves")
        canvas.tap(position=seen.run(spot)) if touch else canvas.hover(position=seen.run(spot))
        seen.page.wait_for_function(f"() => {CURVES}.tooltip.opacity")
        title, said = seen.run(told)
        assert title == ["decoupled"]
        assert [line.split("  ")[0] for line in said] == [
            "loss",
            "step",
            "sent",
            "received",
            "wall-clock",
            "on the link",
        ]
        assert said[2] == "sent  990 kB"


@pytest.mark.parametrize("width", [700, 1280, 1600])
def test_names_beside_lines_do_not_touch(visit: Callable[..., web.Visit], tmp_path: Path, width: int) -> None:
    seen = visit(of=written(tmp_path, crowded()), width=width)
    for axis in ("bytes", "steps", "wall", "link"):
        choose(seen, "axes", axis)
        named = seen.run(NAMED)
        assert {"diloco", "ddp"} <= {one["text"] for one in named}
        assert len(named) >= (17 if axis == "steps" else 9)
        for one in named:
            assert len(one["text"]) <= 28
            assert one["x"] >= 0
            assert one["x"] + one["w"] <= one["width"]
        for a, b in itertools.combinations(named, 2):
            apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"] or abs(a["y"] - b["y"]) >= a["h"] - 0.01
            assert apart, (axis, a, b)
    box = seen.page.locator("#lines")
    assert box.evaluate("(list) => list.scrollHeight > list.clientHeight && list.clientHeight < 400")


# What the reader chooses


def seconds(point: dict[str, Any], up: float, down: float, latency: float, step_seconds: float) -> float:
    """Local steps, then as overtone.Link counts."""
    link = Link(bandwidth=up * 1e6, latency=latency / 1e3, download=down * 1e6)
    return point["step"] * step_seconds + link.seconds(point["bytes"], point["received"], point["hops"])


def test_the_link_changes_times_at_once(visit: Callable[..., web.Visit]) -> None:
    seen = visit()
    choose(seen, "axes", "link")
    run = next(run for run in example()["groups"][0]["runs"] if run["label"] == "decoupled")
    end = {name: run["curve"][name][-1] for name in ("step", "bytes", "received", "hops")}

    def shown() -> float:
        return float(lines(seen)["decoupled"]["data"][-1]["link"])

    assert shown() == pytest.approx(seconds(end, 50, 50, 20, 0.1))
    before = column(seen, "time on link")
    seen.page.fill("#up", "0.5")
    seen.page.fill("#down", "0.25")
    seen.page.fill("#latency", "300")
    seen.page.fill("#step-seconds", "0.25")
    expected = seconds(end, 0.5, 0.25, 300, 0.25)
    assert shown() == pytest.approx(expected)
    assert lines(seen)["decoupled"]["data"][-1]["x"] * 3600 == pytest.approx(expected)  # ddp takes hours here
    assert column(seen, "time on link") != before
    assert column(seen, "time on link")[column(seen, "method").index("decoupled")] == f"{expected / 60:.3g} min"

    seen.page.fill("#up", "0")  # refused, and nothing changes
    assert seen.page.get_attribute("#up", "aria-invalid") == "true"
    assert shown() == pytest.approx(expected)

    seen.page.click("text=1 Gbit/s, 1 ms")
    assert [seen.page.input_value(f"#{field}") for field in ("up", "down")] == ["1000", "1000"]
    assert shown() == pytest.approx(seconds(end, 1000, 1000, 1, 0.25))
    assert seen.page.get_attribute("#up", "aria-invalid") == "false"
    seen.page.click("text=20 up, 200 down, 20 ms")
    assert shown() == pytest.approx(seconds(end, 20, 200, 20, 0.25))
    assert "time on a link of 20 Mbit/s up and 200 Mbit/s down, 20 ms" in seen.page.inner_text("#curves-title")


def test_lines_are_switched_with_mouse_and_keyboard(visit: Callable[..., web.Visit]) -> None:
    seen = visit()
    boxes = seen.page.locator("#lines input")
    boxes.nth(1).uncheck()
    boxes.nth(2).focus()
    seen.page.keyboard.press("Space")
    assert [label for label, one in lines(seen).items() if one["hidden"]] == ["ddp", "diloco"]
    choose(seen, "axes", "steps")
    assert [label for label, one in lines(seen).items() if one["hidden"]] == ["ddp", "diloco"]
    seen.page.click("#all-off")
    assert all(one["hidden"] for one in lines(seen).values())
    choose(seen, "axes", "bytes")  # an axis with nothing on it
    seen.page.click("#all-on")
    assert not any(one["hidden"] for one in lines(seen).values())
    assert boxes.nth(1).is_checked()


def test_groups_change_everything_below(visit: Callable[..., web.Visit]) -> None:
    seen = visit()
    assert not seen.page.locator("#note").is_visible()
    assert not seen.page.locator("#measures").is_visible()
    choose(seen, "groups", "1")
    assert "compare within the group only" in seen.page.locator("#note").inner_text()
    assert list(lines(seen)) == ["alone", "diloco", "decoupled"]
    assert column(seen, "method") == ["alone", "diloco", "decoupled"]
    assert column(seen, "spread") == ["one seed"] * 3
    assert len(column(seen, "top1")) == 3
    assert seen.page.locator("#runs details").count() == 3
    choose(seen, "measures", "top1")
    assert lines(seen)["decoupled"]["data"][-1]["y"] == pytest.approx(
        example()["groups"][1]["runs"][2]["curve"]["top1"][-1]
    )
    choose(seen, "groups", "0")  # which has no top1
    assert "Validation loss" in seen.page.locator("#curves-title").inner_text()


# The table


def test_every_column_sorts_both_ways_and_what_is_missing_stays_last(visit: Callable[..., web.Visit]) -> None:
    seen = visit()
    rows = {row["label"]: row for row in example()["groups"][0]["rows"]}
    raw = {
        "loss": "loss", "loss vs DiLoCo": "loss_vs_diloco", "gain kept": "gain_kept", "bytes sent": "bytes",
        "bytes received": "received", "bytes vs DiLoCo": "less_than_diloco", "bytes vs DDP": "less_than_ddp",
        "drift": "drift", "rounds": "rounds", "waiting": "waiting",
    }  # fmt: skip
    for name in seen.page.locator("#table thead th").all_inner_texts():
        for direction in ("ascending", "descending"):
            head = seen.page.locator("#table thead button").get_by_text(name, exact=True)
            head.press("Enter")
            assert head.locator("xpath=..").get_attribute("aria-sort") == direction
            labels = column(seen, "method")
            assert sorted(labels) == sorted(rows)  # nothing is hidden
            if name in raw:
                values = [rows[label][raw[name]] for label in labels]
                known = [value for value in values if value is not None and math.isfinite(value)]
                assert known == sorted(known, reverse=direction == "descending")
                assert values[: len(known)] == known


def test_cells_read_as_in_the_terminal(visit: Callable[..., web.Visit]) -> None:
    seen = visit()
    assert column(seen, "bytes sent")[:3] == ["0 B", "430 MB", "43.2 MB"]
    assert column(seen, "bytes received")[:3] == ["0 B", "1.29 GB", "130 MB"]
    assert column(seen, "bytes vs DiLoCo")[:5] == ["nothing", "9.96x more", "1x", "32.7x fewer", "32.7x fewer"]
    assert column(seen, "bytes vs DDP")[6:8] == ["1,500x fewer", ""]  # decoupled, keep 8; a run that diverged
    assert column(seen, "gain kept")[2] == "98%"
    assert column(seen, "spread")[0] == "±0.0050"  # half of what lies between the seeds
    marks = seen.page.locator("#table tbody tr").nth(3).locator(".marks").inner_text()
    assert marks == "replica 0; no shared model"
    for value, words in ((43.46, "43.5x fewer"), (0.1, "10x more"), (1.0002, "1x"), (3960.4, "3,960x fewer")):
        assert seen.run("overtone.fewer", value) == words == table.ratio(value)


def test_bytes_received_are_left_out_where_all_rows_sent_as_many(
    visit: Callable[..., web.Visit], tmp_path: Path
) -> None:
    data = example()
    for row in data["groups"][0]["rows"]:
        row["received"] = row["bytes"]
    headers = visit(of=written(tmp_path, data)).page.locator("#table thead th").all_inner_texts()
    assert "bytes sent" in headers
    assert "bytes received" not in headers


def test_what_did_not_finish_is_marked_and_not_compared(visit: Callable[..., web.Visit]) -> None:
    seen = visit()
    broken = seen.page.locator("#table tr.broken")
    tags = [tag.inner_text() for tag in broken.locator(".tag").all()]
    assert tags == ["diverged", "stopped", "unfinished", "unfinished"]
    for name in ("loss vs DiLoCo", "gain kept", "bytes vs DiLoCo", "bytes vs DDP", "time on link", "waiting"):
        assert column(seen, name)[7:11] == [""] * 4
    assert column(seen, "bytes sent")[9:11] == ["4 MB", ""]  # nothing measured yet is not nothing sent
    assert column(seen, "bytes vs DDP")[0] == "nothing"
    choose(seen, "groups", "1")  # where nobody ran DDP
    assert column(seen, "bytes vs DiLoCo")[0] == "nothing"
    assert "bytes vs DDP" not in seen.page.locator("#table thead th").all_inner_texts()


def test_a_link_that_is_not_told_is_the_usual_one(visit: Callable[..., web.Visit], tmp_path: Path) -> None:
    data = example()
    data["groups"][0]["link"] = {"up": math.inf, "latency": None}
    seen = visit(of=written(tmp_path, data))
    assert [seen.page.input_value(f"#{field}") for field in ("up", "down", "latency", "step-seconds")] == [
        "50",
        "50",
        "20",
        "0.1",
    ]


# Runs


def test_a_run_opens_to_charts_numbers_and_its_command(visit: Callable[..., web.Visit]) -> None:
    seen = visit()
    run = seen.page.locator("#runs details").nth(8)
    assert run.locator("canvas").count() == 0  # nothing is drawn before somebody looks
    run.locator("summary").click()
    run.locator("canvas").first.wait_for()
    assert run.locator("figcaption").all_inner_texts() == [
        "bytes sent per round",
        "drift of a round, norm",
        "seconds of a round standing still",
        "drift between replicas",
        "training loss",
    ]  # fmt: skip; no residual: it is null throughout
    assert all(inked(seen, f"#runs details:nth-child(9) figure:nth-child({i}) canvas") > 300 for i in range(1, 6))
    text = run.inner_text()
    assert "method.every" in text
    assert "method.keep" not in text  # null
    assert "versions.torch" in text
    times = dict(
        row.split("\t") for row in run.locator("section", has_text="Where the time went").inner_text().split("\n")[1:]
    )
    assert times["standing still for others, virtual time"] == "20.0%"
    assert times["of it, inner steps"] == "90.0%"
    assert run.locator("tr", has_text="rounds").first.inner_text().split() == ["rounds", "60"]  # of which 30 are drawn
    assert run.locator("code").inner_text() == example()["groups"][0]["runs"][8]["command"]
    run.get_by_role("button", name="Copy").click()
    run.get_by_role("button", name="Copied").or_(run.get_by_role("button", name="Selected")).wait_for()


# Out of the page


def test_the_picture_is_a_png_with_a_ground(visit: Callable[..., web.Visit]) -> None:
    for colours, ground in (("light", [255, 255, 255, 255]), ("dark", [27, 30, 36, 255])):
        seen = visit(colours=colours, width=380)
        with seen.page.expect_download() as waiting:
            seen.page.click("#picture")
        picture = Path(waiting.value.path()).read_bytes()
        assert waiting.value.suggested_filename == "overtone-loss-bytes.png"
        assert picture.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = struct.unpack(">II", picture[16:24])
        assert width == 2400
        assert 1240 < height < 1500  # and as much as the legend needs
        corner, different = seen.run(
            f"""async (encoded) => {{
              const image = new Image();
              image.src = `data:image/png;base64,${{encoded}}`;
              await image.decode();
              const pixels = ({PIXELS})(image);
              return [[...new Uint8Array(pixels.buffer, 0, 4)], new Set(pixels.filter((_, i) => i % 97 === 0)).size];
            }}""",
            base64.b64encode(picture).decode(),
        )
        assert corner == ground
        assert different > 20


def test_the_chart_as_csv(visit: Callable[..., web.Visit]) -> None:
    seen = visit()
    with seen.page.expect_download() as waiting:
        seen.page.click("#csv")
    saved = list(csv.DictReader(io.StringIO(Path(waiting.value.path()).read_text())))
    rows = example()["groups"][0]["rows"]
    assert {row["line"] for row in saved} == {row["label"] for row in rows if row["loss"] is not None}
    last = [row for row in saved if row["line"] == "diloco" and row["seed"] == "1"][-1]
    assert float(last["loss"]) == example()["groups"][0]["runs"][5]["curve"]["loss"][-1]
    assert int(last["bytes_sent"]) == 600 * 72_000


# Whoever reads it, wherever


def test_hostile_strings_are_only_text(visit: Callable[..., web.Visit]) -> None:
    seen = visit(before="window.alert = () => console.error('alert')")
    seen.page.locator("#runs details").last.locator("summary").click()
    assert seen.page.locator("img").count() == 0
    assert HOSTILE in column(seen, "method")
    assert HOSTILE[:8] in [one["text"][:8] for one in seen.run(NAMED)]
    assert HOSTILE in seen.page.locator("#lines").inner_text()
    assert HOSTILE in seen.page.locator("#runs details").last.locator("td").all_inner_texts()
    assert seen.page.locator("h1").inner_text() == seen.page.title() == "Loss against bytes <b>"


def test_light_and_dark(visit: Callable[..., web.Visit]) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    line = f"{CURVES}.data.datasets.find((one) => one.label === 'diloco').borderColor"
    light, dark = visit(), visit(colours="dark")
    assert light.run(ground) != dark.run(ground)
    assert light.run(line) != dark.run(line)
    light.page.click("#theme")
    assert light.run(ground) == dark.run(ground)
    assert light.run(line) == dark.run(line)
    light.page.reload()  # the choice is remembered
    light.page.wait_for_function("() => window.overtone")
    assert light.run(ground) == dark.run(ground)


def test_without_storage_the_theme_still_changes(visit: Callable[..., web.Visit]) -> None:
    seen = visit(before="Object.defineProperty(window, 'localStorage', {get() { throw new Error('closed'); }})")
    before = seen.run("getComputedStyle(document.body).backgroundColor")
    seen.page.click("#theme")
    assert seen.run("getComputedStyle(document.body).backgroundColor") != before


def test_paper_is_light(visit: Callable[..., web.Visit]) -> None:
    seen = visit(colours="dark")
    scheme = "getComputedStyle(document.documentElement).colorScheme"
    seen.run("dispatchEvent(new Event('beforeprint'))")
    assert seen.run(scheme) == "light"
    seen.run("dispatchEvent(new Event('afterprint'))")
    assert seen.run(scheme) == "dark"


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 380])
def test_nothing_is_wider_than_the_screen(visit: Callable[..., web.Visit], tmp_path: Path, width: int) -> None:
    seen = visit(width=width)
    for index in range(2):
        choose(seen, "groups", str(index))
        seen.page.locator("#runs details").last.locator("summary").click()
        seen.page.locator("#runs canvas").first.wait_for()
        for axis in ("bytes", "received", "steps", "wall", "link"):
            choose(seen, "axes", axis)
            assert seen.run("document.scrollingElement.scrollWidth <= innerWidth")
    for axis in ("bytes", "steps"):
        crowd = visit(of=written(tmp_path, crowded()), width=width)
        choose(crowd, "groups", "6")
        choose(crowd, "axes", axis)
        assert crowd.run("document.scrollingElement.scrollWidth <= innerWidth")
    # The table scrolls by itself, its first column stays.
    region = seen.page.locator("#table").locator("xpath=..")
    region.evaluate("(box) => box.scrollLeft = 300")
    assert region.evaluate("(box) => box.scrollLeft") > 0
    left = region.evaluate("(box) => box.getBoundingClientRect().left")
    assert seen.page.locator("#table tbody th").first.evaluate(
        "(cell) => cell.getBoundingClientRect().left"
    ) == pytest.approx(left)


# From logs to lines


LABELS = {  # by the entry of a comparison
    "alone": "alone", "diloco": "diloco", "diloco:delay=2": "diloco, delay 2", "published": "published",
    "decoupled": "decoupled, exchange auto", "decoupled:exchange=sharded": "decoupled, exchange sharded",
    "decoupled:delay=3": "decoupled, delay 3, exchange auto", "decoupled:exchange=store": "decoupled, exchange store",
    "decoupled:exchange=store,delay=3": "decoupled, delay 3, exchange store",
}  # fmt: skip


@pytest.mark.parametrize("bandwidth", [1000.0, 0.02])
def test_a_page_of_real_runs(visit: Callable[..., web.Visit], tmp_path: Path, bandwidth: float) -> None:
    """What a simulation logs is what the page draws, and its clock on the link is the simulator's. In a store that is
    nearly so, where tests/test_standings.py says why: there the page says what the report says."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog; " * 1000)
    task = TaskOptions(data=str(text), valid_samples=8, language=Language(width=32, layers=1, heads=2))
    network = Network(bandwidth=bandwidth, up=bandwidth / 2)
    asked = Comparison(
        replicas=3, task=task, training=Training(steps=13, batch=2), every=4, eval_every=1, network=network
    )
    logs = {}
    for name, label in LABELS.items():
        config = comparison.configured(asked, name, 0, tmp_path / label)
        assert isinstance(config, Simulation)
        simulate(config)
        logs[label] = history.load(tmp_path / label)
    page_data.write(tmp_path / "page.html", standings.groups(logs.values()), title="t")
    seen = visit(of=tmp_path / "page.html")
    assert {*column(seen, "method")} == {*LABELS.values(), "published, mean"}
    assert "bytes received" in seen.page.locator("#table thead th").all_inner_texts()  # more than sent, in a store
    assert seen.page.locator("tr.broken").count() == 0
    assert inked(seen, "#curves") > 2_000
    choose(seen, "axes", "link")
    drawn = lines(seen)
    for label, log in logs.items():
        for point, event in zip(drawn[label]["data"], log.evals, strict=True):
            passed = link_time.seconds(log, event, network.link, network.step_seconds)
            assert point["link"] == pytest.approx(passed, rel=1e-6)
            if not log.in_store:
                assert passed == pytest.approx(event["simulated_seconds"], rel=1e-6)
            assert point["x"] * (60 if bandwidth < 1 else 1) == pytest.approx(point["link"])  # the axis' own unit
            assert point["value"] == pytest.approx(event["metrics"]["loss"])
    delayed = seen.page.locator("#runs details").last
    delayed.locator("summary").click()
    delayed.locator("canvas").first.wait_for()
    assert "seconds of a round behind training" in delayed.locator("figcaption").all_inner_texts()
    assert "per round, behind training, virtual time" in delayed.inner_text()


@pytest.mark.parametrize("width", [380, 1280])
def test_the_papers_page(visit: Callable[..., web.Visit], width: int) -> None:
    """The one that is committed: six groups, seventeen rows, and nothing sticks out."""
    paper = Path(__file__).parent.parent / "benchmarks" / "results" / "paper.html"
    seen = visit(paper, width=width)
    names = seen.page.locator("#groups label")
    assert names.count() == 6
    for number in range(6):
        names.nth(number).click()
        assert seen.run("() => document.scrollingElement.scrollWidth <= innerWidth")
    assert seen.page.locator("#scaling-section").is_visible()
    assert paper.stat().st_size < 1_000_000
