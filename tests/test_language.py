"""The language task: its models, its data in every form, and what it reports."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the libraries are imported

import datasets
import pytest
import tokenizers
import torch
import transformers

from overtone.errors import TaskError, visible
from overtone.tasks import Language, TaskOptions, load_task
from overtone.tasks.text import stream, tokenizer
from overtone.tasks.text.byte_model import ByteTransformer, ModelSize
from overtone.tasks.text.hf_models import PRESETS, nearest_first
from overtone.tasks.text.task import LanguageTask
from overtone.tasks.text.tokenizer import Document, SubwordTokenizer, split_at_lines

datasets.disable_progress_bars()

WORDS = ("the", "sea", "a", "boat", "wind", "of", "under", "grey", "light", "comes", "slowly", "élan", "über", "海")


def prose(words: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) + ("\n" if i % 9 == 8 else "") for i in range(words))


def language(
    data: object = None, *, model: str | None = None, samples: int = 16, skew: float = 0.0, **numbers: object
) -> LanguageTask:
    made = load_task(
        TaskOptions(
            model=model,
            data=None if data is None else str(data),
            valid_samples=samples,
            skew=skew,
            language=Language(**{"context": 16, **numbers}),
        ),
        to_train=data != "none",
    )
    assert isinstance(made, LanguageTask)
    return made


@pytest.fixture
def poem(tmp_path: Path) -> Path:
    path = tmp_path / "poem.txt"
    path.write_text(prose(4000))
    return path


def trained_tokenizer(path: Path, special: list[str]) -> Path:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([prose(2000, 9)], trainer)
    tokenizer.enable_truncation(8)  # as files for single sentences have it; it must not cut a text
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module")
def subwords(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_tokenizer(tmp_path_factory.mktemp("tokens") / "own.json", ["<|endoftext|>"])


@pytest.fixture(scope="module")
def endless_subwords(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_tokenizer(tmp_path_factory.mktemp("tokens") / "endless.json", [])


def refused(*parts: str, data: object = None, **options: object) -> None:
    with pytest.raises(TaskError) as caught:
        language(data, **options)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


# ------------------------------------------------------------------------------------------------ models


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_as_many_parameters_as_its_name_says(name: str) -> None:
    made = language("none", model=name)
    with torch.device("meta"):
        model = made.model()
    count = sum(p.numel() for p in model.parameters())
    units = {"m": 1e6, "b": 1e9}
    last = name.split("-")[-1]
    said = {"gpt2": 124e6, "medium": 355e6}.get(last) or float(last[:-1]) * units[last[-1]]
    assert abs(count / said - 1) < 0.2
    assert abs(count / PRESETS[name].parameters - 1) < 0.02
    if last == "1m":
        assert count < 1e6
    assert made.architecture.vocab_size == PRESETS[name].vocab_size
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert model.config._attn_implementation == "sdpa"  # type: ignore[union-attr]


@pytest.mark.slow
def test_the_byte_preset_needs_torch_alone() -> None:
    code = """
import sys
for name in ("transformers", "tokenizers", "datasets"):
    sys.modules[name] = None  # as if it were not installed
from pathlib import Path
from overtone.tasks import Language, TaskError, TaskOptions, load_task
task = load_task(TaskOptions(data=sys.argv[1]))
model = task.model()
task.loss(model, task.feed(0, 1, batch=2, seed=0, skew=0.0).next()).backward()
for options in (TaskOptions(model="gpt2-1m", data="none"), TaskOptions(data="hub:x"),
                TaskOptions(language=Language(tokenizer=Path("x.json")))):
    try:
        load_task(options)
    except TaskError as error:
        print(error)
"""
    run = [sys.executable, "-c", code, __file__]
    out = subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(out) == 3
    for line, library in zip(out, ("transformers", "datasets", "tokenizers"), strict=True):
        assert f"needs {library}; pip install 'overtone[train]'" in line


def test_byte_logits() -> None:
    model = ByteTransformer(ModelSize(width=16, layers=1, heads=2, context=8))
    tokens = torch.randint(0, 256, (3, 8))
    logits = model(tokens)
    assert logits.shape == (3, 8, 256)
    assert torch.allclose(model(tokens[:, :5]), logits[:, :5], atol=1e-6)  # what comes later does not matter


@pytest.mark.parametrize("name", ["byte", "gpt-neox-1m", "llama-1m", "gpt2-1m"])
def test_sizes_can_be_overridden(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    made = language("none", model=name, width=48, layers=2, heads=3, context=300)
    model = made.model()
    if name == "byte":
        assert made.architecture.size == ModelSize(48, 2, 3, 300)  # type: ignore[attr-defined]
    else:
        config = model.config
        own = PRESETS[name]
        assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (48, 2, 3)
        inner = config.n_inner if name == "gpt2-1m" else config.intermediate_size
        assert inner == round(own.mlp_width * 48 / own.width)
        assert config.max_position_embeddings == max(300, own.positions)
        assert config.use_cache is False
    loss = made.loss(model, torch.randint(0, 256, (2, 301)))
    assert abs(loss.item() - math.log(256)) < 0.5
    assert capfd.readouterr().err == ""  # transformers warns of token numbers beyond the vocabulary
    refused("heads=5", "48", data="none", model=name, width=48, heads=5)


def test_an_odd_head_cannot_be_rotated() -> None:
    refused("heads=3", "even", data="none", model="llama-1m", width=9, heads=3)


def test_grouped_heads_follow_the_heads() -> None:
    with torch.device("meta"):
        assert language("none", model="llama-1b", heads=16).model().config.num_key_value_heads == 4  # type: ignore[union-attr]
        assert language("none", model="llama-1b", width=384, heads=6).model().config.num_key_value_heads == 6  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["gpt-neox-1m", "llama-1m", "gpt2-1m"])
def test_the_same_seed_gives_the_same_model_and_gradients(name: str) -> None:
    made = language("none", model=name, width=32, layers=2, heads=2)
    window = torch.arange(34).view(2, 17)
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        model = made.model()
        assert model.training
        made.loss(model, window).backward()
        found.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *found))  # type: ignore[arg-type]


def test_an_unknown_model_lists_presets_nearest_first() -> None:
    refused("'lama-30m'", "there are llama-30m, ", "byte", "gpt2-medium", data="none", model="lama-30m")
    assert nearest_first("gpt-neox-70")[0] == "gpt-neox-70m"


class TestConfigFile:
    def write(self, folder: Path, **numbers: object) -> Path:
        small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
        config = {"model_type": "mistral", "vocab_size": 300, "max_position_embeddings": 64, **small, **numbers}
        (folder / "config.json").write_text(json.dumps(config))
        return folder / "config.json"

    def test_file_and_folder(self, tmp_path: Path, poem: Path) -> None:
        file = self.write(tmp_path, num_key_value_heads=1, dtype="bfloat16", eos_token_id=100000)
        for path in (file, tmp_path):
            made = language(poem, model=str(path))
            model = made.model()
            assert type(model).__name__ == "MistralForCausalLM"
            assert model.config.vocab_size == made.architecture.vocab_size == 300
            assert {p.dtype for p in model.parameters()} == {torch.float32}
            assert model.config.eos_token_id is None
            made.loss(model, made.valid.batch(torch.arange(2), None))
        assert len(made.sample(model)) > 0  # never a token past the bytes

    def test_what_does_not_fit(self, tmp_path: Path, poem: Path) -> None:
        file = str(self.write(tmp_path))
        refused("max_position_embeddings=64", "context=65", data="none", model=file, context=65)
        refused("width=64", "edit", data="none", model=file, width=64)
        refused("vocab_size=200", "256", data=poem, model=str(self.write(tmp_path, vocab_size=200)))
        language("none", model=file)

    @pytest.mark.parametrize(
        ("text", "part"),
        [
            ("{", "config.json"),
            ("{}", "config.json"),
            ('{"model_type": "no-such"}', "no-such"),
            ('{"model_type": "vit"}', "vit"),
            ('{"model_type": "t5", "vocab_size": 400}', "t5"),
            ('{"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}', "config.json"),
        ],
    )
    def test_no_causal_language_model(self, tmp_path: Path, text: str, part: str) -> None:
        (tmp_path / "config.json").write_text(text)
        (tmp_path / "own.py").write_text("raise SystemExit('ran code of the folder')")
        refused(part, data="none", model=str(tmp_path / "config.json"))

    def test_folder_without(self, tmp_path: Path) -> None:
        refused("without config.json", data="none", model=str(tmp_path))


# ------------------------------------------------------------------------------------------------ data in memory


def test_a_file_becomes_windows(poem: Path) -> None:
    made = language(poem)
    raw = poem.read_bytes()
    cut = len(made.text.train)  # type: ignore[union-attr]
    assert 0 <= cut - len(raw) * 9 // 10 <= 3
    assert len(made.train) == (cut - 1) // 16
    got = made.train.batch(torch.arange(len(made.train)), None)
    assert got.shape == (len(made.train), 17)
    assert got.dtype == torch.int64
    assert bytes(got[:, :-1].flatten().tolist()) == raw[: len(made.train) * 16]  # disjoint, and nothing left out
    assert torch.equal(got[:-1, -1], got[1:, 0])  # a window's last target begins the next one
    valid = made.valid.batch(torch.arange(len(made.valid)), None)
    assert len(valid) == 16
    assert bytes(valid[0].tolist()) == raw[cut : cut + 17]
    assert bytes(valid[-1].tolist()) == raw[-17:]


def test_a_cut_is_not_within_a_character(tmp_path: Path) -> None:
    for extra in range(4):
        path = tmp_path / "sea.txt"
        path.write_text("x" * extra + "海" * 400)
        held = language(path, context=4).text.valid  # type: ignore[union-attr]
        assert bytes(held.tolist()).decode() == "海" * (len(held) // 3)


def test_replicas_have_windows_of_their_own(poem: Path) -> None:
    made = language(poem)
    seen = []
    for rank in range(3):
        feed = made.feed(rank, 3, batch=4, seed=1, skew=1.0)
        rows = feed._order  # type: ignore[attr-defined]
        seen.append(set(rows.tolist()))
        assert torch.equal(feed.next(), made.train.batch(rows[:4], None))
        assert max(rows) - min(rows) < len(made.train) // 3 + 2  # sorted by place in the text
    assert not (seen[0] & seen[1] | seen[1] & seen[2] | seen[0] & seen[2])
    assert len(set.union(*seen)) == len(made.train)


def test_the_standard_library() -> None:
    made = language(model="byte")
    about = made.about()
    assert (about["task"], about["name"]) == ("language", "standard library")
    assert about["train_tokens"] > 5 * about["valid_tokens"] > 0  # type: ignore[operator]
    assert about["vocabulary"] == 256
    assert made.units() == 16


def test_a_tokenizer(poem: Path, subwords: Path) -> None:
    made = language(poem, model="gpt2-1m", tokenizer=subwords)
    library = tokenizers.Tokenizer.from_file(str(subwords))
    library.no_truncation()
    raw = poem.read_bytes()
    cut = next(i for i in range(len(raw) * 9 // 10, len(raw)) if raw[i] & 0xC0 != 0x80)
    end = library.token_to_id("<|endoftext|>")
    assert made.text.train.tolist() == [*library.encode(raw[:cut].decode()).ids, end]  # type: ignore[union-attr]
    assert made.text.valid.tolist() == [*library.encode(raw[cut:].decode()).ids, end]  # type: ignore[union-attr]
    assert made.text.train.dtype == torch.uint16  # type: ignore[union-attr]
    assert made.architecture.vocab_size == library.get_vocab_size() > 256
    assert made.model().config.eos_token_id == end  # type: ignore[union-attr]


def test_bits_per_byte_by_hand(poem: Path, subwords: Path) -> None:
    made = language(poem, model="gpt2-1m", tokenizer=subwords)
    raw = poem.read_bytes()
    tokens = made.text.valid.numel()  # type: ignore[union-attr]
    length = len(raw) - len(made.tokenizer.decode(made.text.train.tolist()[:-1]).encode())  # type: ignore[union-attr]
    nats = 2.5
    got = made.summary({"loss": nats})
    assert got["bits_per_byte"] == pytest.approx(nats * tokens / length / math.log(2), rel=1e-12)
    assert got["bits_per_byte"] < nats / math.log(2) / 2  # a token is more than two bytes here
    assert got["perplexity"] == pytest.approx(math.exp(nats))
    plain = language(poem).summary({"loss": nats})
    assert plain["bits_per_byte"] == pytest.approx(nats / math.log(2))
    assert plain["loss"] == nats
    assert language(poem).summary({"loss": 1e5})["perplexity"] == math.inf
    assert math.isnan(language(poem).summary({"loss": math.nan})["perplexity"])


def test_long_texts_are_tokenised_in_pieces(monkeypatch: pytest.MonkeyPatch, poem: Path, subwords: Path) -> None:
    whole = SubwordTokenizer(subwords)
    document = Document(poem.read_bytes(), "poem")
    monkeypatch.setattr(tokenizer, "PIECE", 100)
    parts = split_at_lines(poem.read_text())
    assert len(parts) > 50
    assert "".join(parts) == poem.read_text()
    assert all(part.endswith("\n") for part in parts[:-1])
    assert whole.decode(whole.encode(document).tolist()) == poem.read_text()


def test_data_is_called_by_its_own_name(poem: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert language(poem).about()["name"] == "poem.txt"
    assert language(poem.parent).about()["name"] == poem.parent.name
    monkeypatch.chdir(poem.parent)
    assert language(".").about()["name"] == poem.parent.name
    with pytest.raises(TaskError, match=r"^poem\.txt: \d+ training samples give each of 999 replicas"):
        language(poem).feed(0, 999, batch=9, seed=0, skew=0.0)


def test_fingerprints_tell_data_apart(tmp_path: Path, poem: Path) -> None:
    first = language(poem).about()["fingerprint"]
    assert language(poem).about()["fingerprint"] == first
    other = tmp_path / "other.txt"
    other.write_text(poem.read_text().replace("boat", "bOat", 1))
    assert language(other).about()["fingerprint"] != first


class TestFolder:
    def test_every_tenth_file(self, tmp_path: Path) -> None:
        for i in range(20):
            folder = tmp_path / ("b" if i % 2 else "a")
            folder.mkdir(exist_ok=True)
            (folder / f"{i:02}.txt").write_text(f"<{i:02}>" * 20)
        (tmp_path / ".hidden").write_text("no")
        (tmp_path / ".git").mkdir()
        (tmp_path / ".git" / "x").write_text("no")
        made = language(tmp_path)
        order = [*range(0, 20, 2), *range(1, 20, 2)]
        assert bytes(made.text.valid.tolist()).decode() == "<00>" * 20 + "<01>" * 20  # type: ignore[union-attr]
        rest = [i for i in order if i > 1]
        assert bytes(made.text.train.tolist()).decode() == "".join(f"<{i:02}>" * 20 for i in rest)  # type: ignore[union-attr]

    def test_few_files_give_the_last_tenth(self, tmp_path: Path) -> None:
        for i, letter in enumerate("abc"):
            (tmp_path / f"{i}.txt").write_text(letter * 100)
        made = language(tmp_path)
        assert bytes(made.text.valid.tolist()) == b"c" * 30  # type: ignore[union-attr]
        assert made.text.train.numel() == 270  # type: ignore[union-attr]

    @pytest.mark.parametrize("name", ["valid", "val", "test"])
    def test_subfolders(self, tmp_path: Path, name: str) -> None:
        for part, letter in (("train", "t"), (name, "v")):
            (tmp_path / part).mkdir()
            (tmp_path / part / "x.txt").write_text(letter * 100)
        (tmp_path / "readme").write_text("not this")
        made = language(tmp_path)
        assert set(made.text.train.tolist()) == {ord("t")}  # type: ignore[union-attr]
        assert set(made.text.valid.tolist()) == {ord("v")}  # type: ignore[union-attr]

    def test_documents_end_with_a_token(self, tmp_path: Path, subwords: Path) -> None:
        for i in range(10):
            (tmp_path / f"{i}.txt").write_text(prose(60, i))
        made = language(tmp_path, model="llama-1m", tokenizer=subwords)
        assert (made.text.train == made.tokenizer.eos_token_id).sum() == 9  # type: ignore[union-attr]

    def test_not_utf8(self, tmp_path: Path, subwords: Path) -> None:
        (tmp_path / "good.txt").write_text(prose(100))
        (tmp_path / "latin.txt").write_bytes("élan ".encode("latin-1") * 50)
        assert len(language(tmp_path).train) > 0
        refused("latin.txt", "UTF-8", "byte 0", data=tmp_path, model="gpt2-1m", tokenizer=subwords)

    def test_without_text(self, tmp_path: Path) -> None:
        refused("0 files", data=tmp_path)
        (tmp_path / "empty").write_text("")
        refused("1 files", "no text", data=tmp_path)


class TestSavedDataset:
    rows = tuple(f"row {i} {prose(10, i)}" for i in range(50))

    def test_rows_are_split(self, tmp_path: Path) -> None:
        datasets.Dataset.from_dict({"story": self.rows, "number": range(50)}).save_to_disk(tmp_path / "d")
        made = language(tmp_path / "d")
        assert bytes(made.text.train.tolist()).decode() == "".join(f"{row}\n" for row in self.rows[:45])  # type: ignore[union-attr]
        assert bytes(made.text.valid.tolist()).decode() == "".join(f"{row}\n" for row in self.rows[45:])  # type: ignore[union-attr]

    def test_splits_are_used(self, tmp_path: Path, subwords: Path) -> None:
        parts = {"train": self.rows[:40], "test": self.rows[40:]}
        saved = {name: datasets.Dataset.from_dict({"text": rows, "title": rows}) for name, rows in parts.items()}
        datasets.DatasetDict(saved).save_to_disk(tmp_path / "d")
        made = language(tmp_path / "d", model="gpt2-1m", tokenizer=subwords)
        decoded = made.tokenizer.decode(made.text.valid.tolist())  # type: ignore[union-attr]
        assert decoded == "".join(f"{row}<|endoftext|>" for row in self.rows[40:])
        assert made.text.bytes_per_token == len("".join(self.rows[40:]).encode()) / made.text.valid.numel()  # type: ignore[union-attr]

    def test_refusals(self, tmp_path: Path) -> None:
        datasets.Dataset.from_dict({"a": self.rows, "b": self.rows}).save_to_disk(tmp_path / "two")
        refused("a, b", "called text", data=tmp_path / "two")
        datasets.Dataset.from_dict({"text": [1, 2, 3]}).save_to_disk(tmp_path / "numbers")
        refused("'text'", "int", data=tmp_path / "numbers")
        datasets.Dataset.from_dict({"text": []}).save_to_disk(tmp_path / "empty")
        refused("empty or damaged", data=tmp_path / "empty")
        (tmp_path / "broken").mkdir()
        (tmp_path / "broken" / "state.json").write_text("{")
        refused("broken", data=tmp_path / "broken")


def test_no_data() -> None:
    made = language("none")
    assert len(made.train) == len(made.valid) == 0
    assert made.sample(made.model()) == ""
    assert made.about()["name"] == "no data"
    with pytest.raises(TaskError, match=r"^no data: 0 training samples"):
        made.feed(0, 1, batch=1, seed=0, skew=0.0)


class TestBadInput:
    def test_files(self, tmp_path: Path) -> None:
        refused("missing.txt", "no such file", data=tmp_path / "missing.txt")
        short = tmp_path / "short.txt"
        short.write_text("")
        refused("short.txt", "0 bytes", data=short)
        short.write_text("x" * 17)
        refused("15 training tokens", "context=16 needs 17", data=short)
        short.write_text("x" * 100)
        refused("10 validation tokens", "context=16 needs 17", data=short)
        language(short, context=9)

    def test_unreadable(self, poem: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def denied(path: Path) -> bytes:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "read_bytes", denied)  # root, in a container, may read everything
        refused("poem.txt", "Permission denied", data=poem)
        refused("poem.txt", "Permission denied", data=poem.parent)

    def test_tokenizers(self, tmp_path: Path, poem: Path, subwords: Path) -> None:
        refused("no such file", data=poem, model="gpt2-1m", tokenizer=tmp_path / "none.json")
        bad = tmp_path / "bad.json"
        bad.write_text("{}")
        refused("bad.json", "tokenizer.json", data=poem, model="gpt2-1m", tokenizer=bad)
        refused("model byte", "gpt2-30m", data=poem, tokenizer=subwords)


# ------------------------------------------------------------------------------------------------ streams


def folder_of(path: Path, files: int, rows: int = 40) -> Path:
    path.mkdir(exist_ok=True)
    for f in range(files):
        rng = random.Random(f)
        texts = [f"[part{f}-{i}] " * rng.randint(1, 12) for i in range(rows)]
        if files == 4:  # in groups of rows, which the library reads one by one
            datasets.Dataset.from_dict({"text": texts}).to_parquet(path / f"part{f}.parquet", batch_size=7)
        else:
            lines = [json.dumps({"text": row, "n": i}) for i, row in enumerate(texts)]
            (path / f"part{f}.jsonl").write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("files", [1, 3, 4])
def test_a_stream_resumes_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subwords: Path, replicas: int, files: int
) -> None:
    monkeypatch.setattr(stream, "BLOCK", 7)
    model = {"model": "gpt2-1m", "tokenizer": subwords} if files == 3 else {}
    data = f"hub:{folder_of(tmp_path / 'd', files)}"
    made = language(data, samples=4, **model)  # type: ignore[arg-type]
    again = language(data, samples=4, **model)  # type: ignore[arg-type]
    feeds = [made.feed(rank, replicas, batch=5, seed=3, skew=0.0) for rank in range(replicas)]
    states, batches = [], []
    for _ in range(180):
        states.append([json.dumps(feed.state_dict()) for feed in feeds])
        batches.append([feed.next() for feed in feeds])  # in turns, as replicas in one process do
    assert json.loads(states[-1][0])["epoch"] >= 1
    assert max(map(len, states[-1])) < 2000
    for start in (0, 1, 6, 41, 160):
        for rank in range(replicas):
            feed = again.feed(rank, replicas, batch=5, seed=3, skew=0.0)
            if start % 2:
                feed.next()  # what it did before does not matter
            feed.load_state_dict(json.loads(states[start][rank]))
            for step in range(start, start + 12):
                assert torch.equal(feed.next(), batches[step][rank]), (start, rank, step)


@pytest.mark.parametrize("files", [1, 3, 4])
def test_replicas_share_a_stream(tmp_path: Path, files: int) -> None:
    every = {f"{f}-{i:02}".ljust(15) + "\n" for f in range(files) for i in range(40)}  # each fills a window
    for f in range(files):
        rows = [json.dumps({"text": row[:-1]}) for row in sorted(every) if row.startswith(str(f))]
        (tmp_path / f"{f}.jsonl").write_text("\n".join(rows))
    made = language(f"hub:{tmp_path}", samples=4)
    seen = []
    for rank in range(3):
        feed = made.feed(rank, 3, batch=1, seed=3, skew=0.0)
        found = []
        while feed.state_dict()["epoch"] == 0:
            found.append(bytes(feed.next()[0, :-1].tolist()).decode())
        found.pop()  # of the next epoch already
        assert len(set(found)) == len(found)
        seen.append(set(found))
    assert not (seen[0] & seen[1] | seen[1] & seen[2] | seen[0] & seen[2])
    held = {f"0-{i:02}".ljust(15) + "\n" for i in range(5)}  # four windows, and the last one's last target
    missing = every - held - set.union(*seen)
    assert len(missing) == 3  # a replica's last document lacks the token after it
    assert set.union(*seen) <= every - held
    valid = made.valid.batch(torch.arange(4), None)
    assert {bytes(window[:-1].tolist()).decode() for window in valid} < held


def test_a_streams_windows_are_shuffled(tmp_path: Path) -> None:
    made = language(f"hub:{folder_of(tmp_path / 'd', 1)}", samples=4)
    feed = made.feed(0, 1, batch=1, seed=3, skew=0.0)
    assert not torch.equal(feed.next()[0, -1:], feed.next()[0, :1])
    first = feed._block.order  # type: ignore[attr-defined]
    assert first.sort().values.tolist() == list(range(len(first)))
    assert first.tolist() != list(range(len(first)))
    other = made.feed(0, 1, batch=1, seed=4, skew=0.0)
    other.next()
    assert other._block.order.tolist() != first.tolist()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_program_with_a_stream_ends_quietly(tmp_path: Path) -> None:
    code = """
import sys
from overtone.tasks import Language, TaskOptions, load_task
task = load_task(TaskOptions(data=sys.argv[1], valid_samples=4, language=Language(context=16)))
feeds = [task.feed(rank, 3, batch=4, seed=0, skew=0.0) for rank in range(3)]
print(sum(len(feed.next()) for feed in feeds))
"""
    run = [sys.executable, "-c", code, f"hub:{folder_of(tmp_path / 'd', 4, rows=3000)}"]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    assert done.stdout == "12\n"
    assert done.stderr == ""


def test_a_stream_of_other_replicas_begins_anew(tmp_path: Path) -> None:
    made = language(f"hub:{folder_of(tmp_path / 'd', 2)}", samples=4)
    feed = made.feed(0, 2, batch=4, seed=3, skew=0.0)
    first = feed.next()
    for _ in range(20):
        feed.next()
    other = made.feed(0, 1, batch=4, seed=3, skew=0.0)
    other.next()
    other.load_state_dict(feed.state_dict())
    assert torch.equal(other.next(), made.feed(0, 1, batch=4, seed=3, skew=0.0).next())
    feed.load_state_dict(other.state_dict())
    assert torch.equal(feed.next(), first)
    with pytest.raises(TaskError, match="rank 0: this is rank 1"):
        made.feed(1, 2, batch=4, seed=3, skew=0.0).load_state_dict(feed.state_dict())


def test_streams_of_other_files_and_splits(tmp_path: Path, endless_subwords: Path) -> None:
    (tmp_path / "txt").mkdir()
    (tmp_path / "txt" / "train.txt").write_text("\n".join(f"line {i}" for i in range(400)))
    (tmp_path / "txt" / "validation.txt").write_text("\n".join(f"held {i}" for i in range(40)))
    made = language(f"hub:{tmp_path / 'txt'}", samples=8)
    valid = made.valid.batch(torch.arange(8), None)
    assert bytes(valid[:2, :-1].flatten().tolist()) == b"held 0\nheld 1\nheld 2\nheld 3\nheld 4\n"[:32]
    assert not made.text.held_out  # type: ignore[union-attr]
    assert b"held" not in bytes(made.feed(0, 1, batch=100, seed=0, skew=0.0).next().flatten().tolist())

    (tmp_path / "parquet").mkdir()
    rows = {"story": [prose(30, i) for i in range(60)]}
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "parquet" / "all.parquet")
    made = language(f"hub:{tmp_path / 'parquet'}", model="llama-1m", tokenizer=endless_subwords, samples=8)
    got = made.feed(0, 1, batch=4, seed=0, skew=0.0).next()
    assert got.shape == (4, 17)
    assert made.tokenizer.eos_token_id is None
    assert 1.5 < made.text.bytes_per_token < 10

    named = language(f"hub:{tmp_path / 'txt'}@validation", samples=2)
    assert named.text.held_out  # type: ignore[union-attr]
    assert bytes(named.valid.batch(torch.arange(1), None)[0].tolist()).startswith(b"held 0")


def test_streams_that_cannot_be(tmp_path: Path, poem: Path) -> None:
    refused("hub:no/such", "connection", data="hub:no/such")
    refused("hub:no/such:en@train", "connection", data="hub:no/such:en@train")
    refused("without hub:", data=f"hub:{poem}")
    (tmp_path / "d").mkdir()
    refused("hub:", data=f"hub:{tmp_path / 'd'}")
    folder = folder_of(tmp_path / "e", 1, rows=5)
    refused("no split 'other'", "train", data=f"hub:{folder}@other")
    refused("validation tokens", data=f"hub:{folder}", context=5000)
    made = language(f"hub:{folder}", samples=1000)
    with pytest.raises(TaskError, match=r"no window of 17 training tokens; .* fewer valid_samples"):
        made.feed(0, 1, batch=1, seed=0, skew=0.0).next()
    with pytest.raises(TaskError, match=r"skew=0\.5: a stream"):
        made.feed(0, 1, batch=1, seed=0, skew=0.5)
    (folder / "part0.jsonl").write_text(json.dumps({"text": "good"}) + "\n{ bad\n")
    refused("hub:", "cannot be read", data=f"hub:{folder}")


# ------------------------------------------------------------------------------------------------ training and after


@pytest.mark.parametrize("name", ["byte", "gpt-neox-1m"])
def test_training_lowers_the_loss(poem: Path, name: str) -> None:
    torch.manual_seed(0)
    made = language(poem, model=name, layers=2)
    model = made.model()
    feed = made.feed(0, 1, batch=16, seed=0, skew=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    held = made.valid.batch(torch.arange(16), None)
    with torch.no_grad():
        before = made.measure(model, held)["loss"]
    for _ in range(30):
        optimizer.zero_grad()
        made.loss(model, feed.next()).backward()
        optimizer.step()
    assert before == pytest.approx(math.log(256), abs=0.3)
    with torch.no_grad():
        assert made.measure(model, held)["loss"] < 3.2

    state = torch.get_rng_state()
    written = made.sample(model)
    assert made.sample(model) == written
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert written.startswith(bytes(held[0, :16].tolist()).decode(errors="replace")[:8])
    assert 100 < len(written) <= 400


def test_a_sample_of_a_model_that_diverged(poem: Path) -> None:
    made = language(poem)
    model = made.model().eval()
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    assert len(made.sample(model)) <= 16
    assert not model.training


def test_control_characters_are_spelt_out() -> None:
    assert visible("a\n\t\x1b[0m é\u202e") == "a\n\t\\x1b[0m é\\u202e"


@pytest.mark.parametrize("name", ["gpt-neox-1m", "llama-1m", "gpt2-1m"])
def test_exported_models_load_elsewhere(
    tmp_path: Path, poem: Path, subwords: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    tokenizer = None if name == "llama-1m" else subwords
    made = language(poem, model=name, tokenizer=tokenizer)
    model = made.model()
    folder = tmp_path / "out"
    folder.mkdir()
    made.export(model, folder)
    assert capfd.readouterr().err == ""  # no bar, here and not for good
    assert transformers.utils.logging.is_progress_bar_enabled()
    assert model.config.use_cache is False  # type: ignore[union-attr]
    assert (folder / "model.safetensors").is_file()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = made.valid.batch(torch.arange(3), None)
    model.eval()
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=tokens).logits, made.architecture.logits(model, tokens))
    assert loaded.config.use_cache is True
    if tokenizer is not None:
        reader = transformers.AutoTokenizer.from_pretrained(folder)
        sentence = prose(40, 3)
        assert reader(sentence)["input_ids"] == made.tokenizer.encode(Document(sentence.encode(), "")).tolist()
        assert reader.eos_token == "<|endoftext|>"


def test_an_exported_byte_model(tmp_path: Path, poem: Path) -> None:
    from safetensors.torch import load_model

    made = language(poem, width=32, heads=2)
    model = made.model()
    made.export(model, tmp_path)
    other = ByteTransformer(ModelSize(**json.loads((tmp_path / "model.json").read_text())))
    load_model(other, str(tmp_path / "model.safetensors"))
    tokens = made.valid.batch(torch.arange(3), None)[:, :-1]
    assert torch.equal(other(tokens), model(tokens))
