"""Configuration: files, flags and recipes say the same things in the same names."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from overtone import commands, settings
from overtone.arguments import parse
from overtone.config import ConfigError, MethodChoice, Run, Saving, Training
from overtone.errors import OvertoneError
from overtone.recipes import RECIPES
from overtone.tasks import Language, TaskOptions

ODD = Run(
    choice=MethodChoice("diloco", every=7, outer_lr=0.5),
    replicas=3,
    out=Path('a "strange" dir'),
    task=TaskOptions(data="ü.txt", skew=0.25, language=Language(context=32)),
    training=Training(steps=11, inner="muon", compile=True, clip=float("inf")),
    saving=Saving(eval_every=4),
)


@pytest.mark.parametrize("config", [Run(), ODD, ODD.resolved(), *(recipe() for recipe in RECIPES.values())])
def test_a_file_says_all_there_is(config: Run, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(settings.toml(config))
    assert settings.load(file, Run()) == config


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1))
@example("\x7f")
@example("a\x1b[31m\r\n\t\x85\u2028\"\\'")
def test_what_is_written_can_be_read_back(name: str) -> None:
    """Whatever signs a path has: a run whose configuration cannot be read can be neither resumed nor exported."""
    config = Run(task=TaskOptions(data=name, model=name), out=Path(name))
    assert settings.updated(Run(), settings.parsed(settings.toml(config), "test"), "test") == config


def test_a_name_that_is_no_text_is_refused_before_it_is_written() -> None:
    with pytest.raises(ConfigError, match=r"data=a\\udcff: not UTF-8"):
        settings.toml(Run(task=TaskOptions(data="a\udcff")))


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
        settings.load(file, Run())
    assert told in str(caught.value)


def parsed(*arguments: str) -> Run:
    command = parse(["train", *arguments])
    assert isinstance(command, commands.Train)
    return command.settings


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
    monkeypatch.setenv(settings.TOLD, settings.toml(ODD))
    assert parsed("--resume", str(tmp_path)) == ODD
    monkeypatch.setenv(settings.TOLD, settings.toml(Run()))
    assert parsed("--resume", str(tmp_path)).choice.every is None


def test_dashes_and_underscores_both_do(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("inner-lr = 0.5\nweight_decay = 0\n")
    training = settings.load(file, Run()).training
    assert (training.inner_lr, training.weight_decay) == (0.5, 0.0)


def test_every_key_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    """A key is a flag's name: what `--help` shows may be written into a file."""
    with pytest.raises(SystemExit):
        parsed("--help")
    helped = capsys.readouterr().out
    for key in settings.flat(Run()):
        assert f"--{key.replace('_', '-')}" in helped


def test_no_two_groups_share_a_key() -> None:
    def names(config: Any) -> list[str]:
        values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
        return [n for name, v in values.items() for n in (names(v) if dataclasses.is_dataclass(v) else [name])]

    found = names(Run())
    assert len(found) == len(set(found))


def test_an_unknown_recipe_lists_them() -> None:
    with pytest.raises(ConfigError, match="there are paper-language, paper-image, mini-language, mini-image"):
        parsed("--recipe", "paper")


@pytest.mark.parametrize("name", RECIPES)
def test_a_dry_run_tells_what_a_recipe_costs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    commands.run(parse(["train", "--recipe", name, "--dry-run"]))
    shown = capsys.readouterr().out
    for word in ("parameters", "sent a round", "memory", "alone", "ddp", "diloco", "published", "decoupled"):
        assert word in shown
    million = {"paper-language": "162,322,944", "paper-image": "25,557,032"}
    assert million.get(name, "") in shown


def test_the_memory_of_a_dry_run_is_the_replica_s_own() -> None:
    import torch

    from overtone import METHODS, Replica, plan
    from overtone.optimisers import build

    for row in METHODS.values():
        model = torch.nn.Sequential(torch.nn.Linear(80, 96), torch.nn.Linear(96, 7))
        inner = build(model, Training())
        replica = Replica(model, inner, row())
        model(torch.randn(3, 80)).sum().backward()
        inner.step()
        tensors = [*model.parameters(), *(p.grad for p in model.parameters()), *replica.state.values()]
        tensors += replica.signal.state()
        tensors += [t for state in inner.state.values() for name, t in state.items() if name != "step"]
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        assert plan.memory(row(), shapes, "adamw") == sum(4 * t.numel() for t in tensors if t is not None)
