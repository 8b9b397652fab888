"""Configuration: files, flags and recipes say the same things in the same names."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from overtone.cli.arguments import parse
from overtone.cli.train import Train
from overtone.errors import ConfigError, OvertoneError
from overtone.methods import METHODS, OPTIONS, takes
from overtone.report import history
from overtone.runs import toml
from overtone.runs.config import MethodChoice, Run, Saving, Training
from overtone.runs.recipes import RECIPES
from overtone.tasks import Language, TaskOptions

ODD = Run(
    choice=MethodChoice("diloco", every=7, lr=0.5),
    replicas=3,
    out=Path('a "strange" dir'),
    task=TaskOptions(data="ü.txt", skew=0.25, language=Language(context=32)),
    training=Training(steps=11, inner="muon", compile=True, clip=float("inf")),
    saving=Saving(eval_every=4),
)


@pytest.mark.parametrize("config", [Run(), ODD, ODD.resolved(), *(recipe() for recipe in RECIPES.values())])
def test_a_file_says_all_there_is(config: Run, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(toml.toml(config))
    assert toml.load(file, Run()) == config


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1))
@example("\x7f")
@example("a\x1b[31m\r\n\t\x85\u2028\"\\'")
def test_what_is_written_can_be_read_back(name: str) -> None:
    """Whatever signs a path has: a run whose configuration cannot be read can be neither resumed nor exported."""
    config = Run(task=TaskOptions(data=name, model=name), out=Path(name))
    assert toml.updated(Run(), toml.parsed(toml.toml(config), "test"), "test") == config


def test_a_name_that_is_no_text_is_refused_before_it_is_written() -> None:
    with pytest.raises(ConfigError, match=r"data=a\\udcff: not UTF-8"):
        toml.toml(Run(task=TaskOptions(data="a\udcff")))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("stepz = 3", "stepz: unknown; did you mean steps?"),
        ("[trainin]\nsteps = 3", "table [trainin]: unknown; did you mean training?"),
        ("[method]\nsteps = 3", "[method]: steps: belongs to [training]"),
        ("[training]\nseed = 3", "[training]: seed: belongs to the top"),
        ('steps = "many"', 'steps = "many": must be a whole number'),
        ("steps = true", "steps = true: must be a whole number"),
        ("compile = 1", "compile = 1: must be true or false"),
        ('inner = "adam"', 'inner = "adam": must be adamw, muon, sgd'),
        ("out = 3", "out = 3: must be a path"),
        ("steps = 0", "steps=0: local steps of every replica, from 1"),
        ("skew = 2", "skew=2.0: the share of the samples"),
        ("steps = ", "not TOML"),
    ],
)
def test_a_mistake_in_a_file_is_named(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    with pytest.raises(OvertoneError) as caught:
        toml.load(file, Run())
    assert told in str(caught.value)


def parsed(*arguments: str) -> Run:
    flags = parse(["train", *arguments]).flags
    assert isinstance(flags, Train)
    return flags.settings


def test_without_flags_a_run_has_the_defaults() -> None:
    assert parsed() == Run()


def test_flags_win_over_the_file_and_the_file_over_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('batch = 5\nsteps = 50\n[method]\nmethod = "diloco"\n')
    run = parsed("--recipe", "mini-language", f"--config={file}", "--steps", "70")
    assert (run.training.steps, run.training.batch, run.choice.method) == (70, 5, "diloco")
    assert run.task.model == "gpt-neox-1m"
    assert run.choice.every == 10


def test_the_last_of_two_counts_and_a_resumed_run_stays_where_it_is(tmp_path: Path) -> None:
    for steps in (5, 6):
        (tmp_path / f"{steps}.toml").write_text(f"steps = {steps}")
    assert parsed("--config", str(tmp_path / "5.toml"), "--config", str(tmp_path / "6.toml")).training.steps == 6
    with pytest.raises(ConfigError, match="a resumed run stays where it is"):
        parsed("--resume", str(tmp_path), "--out", "elsewhere")


def test_a_replica_obeys_its_launcher_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.toml").write_text("every = 9")
    monkeypatch.setenv(toml.INHERITED, toml.toml(ODD))
    assert parsed("--resume", str(tmp_path)) == ODD
    monkeypatch.setenv(toml.INHERITED, toml.toml(Run()))
    assert parsed("--resume", str(tmp_path)).choice.every is None


def test_dashes_and_underscores_both_do(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("inner-lr = 0.5\nweight_decay = 0\n")
    training = toml.load(file, Run()).training
    assert (training.inner_lr, training.weight_decay) == (0.5, 0.0)


def test_every_key_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    """A key is a flag's name: what `--help` shows may be written into a file."""
    with pytest.raises(SystemExit):
        parsed("--help")
    helped = capsys.readouterr().out
    for key in toml.flat(Run()):
        assert f"--{key.replace('_', '-')}" in helped


def test_no_two_groups_share_a_key() -> None:
    def names(config: Any) -> list[str]:
        values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
        return [n for name, v in values.items() for n in (names(v) if dataclasses.is_dataclass(v) else [name])]

    found = names(Run())
    assert len(found) == len(set(found))


# -- the options of methods ------------------------------------------------------------------------------------------


def test_every_option_of_every_method_is_a_flag_with_a_help_text() -> None:
    taken = {option for name in METHODS for option in takes(name)}
    assert taken == set(OPTIONS), "methods.py has one sentence for each option"
    fields = {field.name: field for field in dataclasses.fields(MethodChoice)}
    assert set(fields) == taken | {"method"}
    for option, sentence in OPTIONS.items():
        help_text = fields[option].metadata["help"]
        assert help_text.startswith(sentence)
        defaults = help_text.removeprefix(sentence)
        for name in METHODS:
            if option not in takes(name):
                assert f" {name} " not in defaults, (option, name)
                continue
            value = takes(name)[option]
            assert f" {name} {'as said' if value is None else value}" in defaults, (option, name)


@pytest.mark.parametrize("name", METHODS)
def test_an_option_that_is_left_out_stays_at_the_method_s_default(name: str) -> None:
    assert MethodChoice(name).build() == METHODS[name]()
    every_option = {option: default for option, default in takes(name).items() if option != "method"}
    assert MethodChoice(name, **every_option).build() == METHODS[name]()


def test_a_flag_has_the_name_of_the_option() -> None:
    run = parsed("--chunk", "32", "--lr=0.5", "--inner-lr", "0.25")
    assert (run.choice.options(), run.training.inner_lr) == ({"chunk": 32, "lr": 0.5}, 0.25)
    with pytest.raises(OvertoneError, match="chunk=32: diloco has no such option; it takes every, lr, momentum"):
        MethodChoice("diloco", chunk=32).build()
    with pytest.raises(TypeError, match="chnk"):
        MethodChoice("diloco", chnk=32)


def test_a_former_name_still_means_the_same(tmp_path: Path) -> None:
    """Files, flags and logs of earlier versions say outer_lr for lr."""
    file = tmp_path / "config.toml"
    for text in ("[method]\nouter_lr = 0.5", "outer-lr = 0.5", "lr = 0.5"):
        file.write_text(text)
        assert toml.load(file, Run()).choice == MethodChoice(lr=0.5)
    for flags in (("--outer-lr", "0.5"), ("--outer-lr=0.5",), ("--outer_lr=0.5",), ("--lr", "0.5")):
        assert parsed(*flags).choice == MethodChoice(lr=0.5)
    file.write_text("[method]\nlr = 0.5\nouter_lr = 0.7")
    with pytest.raises(ConfigError, match=r"\[method\]: outer_lr: given twice; lr is enough"):
        toml.load(file, Run())


def test_the_log_of_an_earlier_version_is_read_with_the_present_names(tmp_path: Path) -> None:
    logs = Path(__file__).parent.parent / "benchmarks" / "results" / "paper" / "kjv"
    old = history.load(logs / "diloco-outer_lr-0.9-momentum-0.8-seed0")
    assert "outer_lr" in old.start["config"]
    assert (old.config["lr"], old.numbers["outer lr"]) == (0.9, 0.9)
    assert "outer_lr" not in old.config.keys() | old.numbers.keys()
    assert "--lr 0.9 --momentum 0.8" in old.command()


def test_an_unknown_recipe_lists_them() -> None:
    with pytest.raises(ConfigError, match="there are paper-language, paper-image, mini-language, mini-image"):
        parsed("--recipe", "paper")


@pytest.mark.parametrize("name", RECIPES)
def test_a_dry_run_tells_what_a_recipe_costs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    run, flags = parse(["train", "--recipe", name, "--dry-run"])
    run(flags)
    shown = capsys.readouterr().out
    for word in ("parameters", "sent a round", "memory", "alone", "ddp", "diloco", "published", "decoupled"):
        assert word in shown
    million = {"paper-language": "162,322,944", "paper-image": "25,557,032"}
    assert million.get(name, "") in shown


def test_the_memory_of_a_dry_run_is_the_replica_s_own() -> None:
    import torch

    from overtone import METHODS, Replica
    from overtone.cli import plan
    from overtone.runs.optimizers import build

    for row in METHODS.values():
        model = torch.nn.Sequential(torch.nn.Linear(80, 96), torch.nn.Linear(96, 7))
        inner = build(model, Training())
        replica = Replica(model, inner, row())
        model(torch.randn(3, 80)).sum().backward()
        inner.step()
        tensors = [*model.parameters(), *(p.grad for p in model.parameters()), *replica.state.tensors.values()]
        tensors += replica.exchanger.signal.state()
        tensors += [t for state in inner.state.values() for name, t in state.items() if name != "step"]
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        assert plan.memory(row(), shapes, "adamw") == sum(4 * t.numel() for t in tensors if t is not None)
