"""The image task: images from every source, the same everywhere; models of the right size; exports that load."""

import gzip
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")
pytest.importorskip("sklearn")

import datasets
import torch
import transformers
from PIL import Image as Pil

import overtone.tasks.image
from overtone.errors import TaskError
from overtone.tasks import Image, TaskOptions, load_task
from overtone.tasks.image import source
from overtone.tasks.image.augment import flip_images, shift_images
from overtone.tasks.image.dataset import hold_out, load_images
from overtone.tasks.image.source import evenly_spaced
from overtone.tasks.image.task import PRESETS, ImageTask, task

CLASSES = ("cat", "dog", "eel")


def some_images(count: int, *, channels: int = 3, side: int = 8, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (count, side, side, channels) if channels > 1 else (count, side, side)
    return rng.integers(0, 256, shape, dtype=np.uint8), np.arange(count) * len(CLASSES) // count


def options(data: Path | str | None = None, **image: object) -> TaskOptions:
    return TaskOptions(task="image", data=None if data is None else str(data), image=Image(**image))


def write_folder(root: Path, x: np.ndarray, y: np.ndarray) -> Path:
    for i, (image, label) in enumerate(zip(x, y, strict=True)):
        folder = root / CLASSES[label]
        folder.mkdir(parents=True, exist_ok=True)
        Pil.fromarray(image).save(folder / f"{i:04d}.png")
    return root


def write_saved(root: Path, parts: dict[str, tuple[np.ndarray, np.ndarray]], *, as_arrays: bool = False) -> Path:
    made = {}
    for name, (x, y) in parts.items():
        images = [p.tolist() for p in x] if as_arrays else [Pil.fromarray(p) for p in x]
        kind = datasets.Sequence(datasets.Sequence(datasets.Sequence(datasets.Value("uint8"))))
        features = datasets.Features(
            {
                "image": kind if as_arrays else datasets.Image(),
                "note": datasets.Value("string"),
                "label": datasets.Value("int64") if as_arrays else datasets.ClassLabel(names=list(CLASSES)),
            }
        )
        columns = {"image": images, "note": ["-"] * len(y), "label": y.tolist()}
        made[name] = datasets.Dataset.from_dict(columns, features=features)
    datasets.DatasetDict(made).save_to_disk(str(root))
    return root


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_idx(root: Path, train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray]) -> Path:
    """Half of them packed, as they are found in the wild."""
    root.mkdir()
    for part, (x, y) in (("train", train), ("t10k", test)):
        (root / f"{part}-images-idx{x.ndim}-ubyte.gz").write_bytes(gzip.compress(idx(x)))
        (root / f"{part}-labels.idx1-ubyte").write_bytes(idx(y.astype(np.uint8)))
    return root


def everything(found: ImageTask) -> list[torch.Tensor]:
    return [t for part in (found.train, found.valid) for t in part.batch(torch.arange(len(part)), None)]


# -- the same images from every source ----------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
def test_every_source_gives_the_same_batches(tmp_path: Path, channels: int) -> None:
    train, test = some_images(24, channels=channels), some_images(9, channels=channels, seed=1)
    np.savez(tmp_path / "p.npz", x_train=train[0], y_train=train[1][:, None], x_test=test[0], y_test=test[1])
    write_folder(tmp_path / "folder" / "train", *train)
    write_folder(tmp_path / "folder" / "val", *test)
    sources = {
        "folder": tmp_path / "folder",
        "saved": write_saved(tmp_path / "saved", {"train": train, "validation": test}),
        "idx": write_idx(tmp_path / "idx", train, test),
    }
    if channels == 3:
        sources["arrays"] = write_saved(tmp_path / "arrays", {"train": train, "test": test}, as_arrays=True)
    wanted = task(options(tmp_path / "p.npz"))
    assert wanted.train.batch(torch.tensor([3]), None)[0].shape == (1, channels, 8, 8)
    for name, path in sources.items():
        found = task(options(path))
        for ours, theirs in zip(everything(found), everything(wanted), strict=True):
            assert torch.equal(ours, theirs), name
        assert torch.equal(found.keys, torch.from_numpy(train[1]))
        assert found.train.slow == (name != "idx")
        if name in ("folder", "saved"):
            assert found.dataset.classes == CLASSES


def test_a_dataset_without_splits_and_an_npz_without_a_test_part_hold_some_out(tmp_path: Path) -> None:
    x, y = some_images(40)
    np.savez(tmp_path / "p.npz", x=x, y=y)
    table = datasets.Dataset.from_dict({"img": [Pil.fromarray(p) for p in x], "fine_label": y.tolist()})
    table.cast_column("img", datasets.Image()).with_format("torch").save_to_disk(str(tmp_path / "saved"))
    write_folder(tmp_path / "folder", x, y)
    wanted = everything(task(options(tmp_path / "p.npz")))
    assert [len(t) for t in wanted] == [36, 36, 4, 4]
    assert wanted[3].unique().tolist() == [0, 1, 2]
    for path in (tmp_path / "saved", tmp_path / "folder"):
        assert all(torch.equal(a, b) for a, b in zip(everything(task(options(path))), wanted, strict=True))


def test_held_out_samples_are_a_tenth_of_each_class() -> None:
    labels = torch.arange(1000) % 7
    kept, held = hold_out(labels)
    assert torch.equal(torch.cat([kept, held]).sort().values, torch.arange(1000))
    assert len(held) == 100
    counts = labels[held].bincount()
    assert counts.min() >= 14
    assert counts.max() <= 15
    assert torch.equal(hold_out(labels)[1], held)


def test_digits_need_no_data() -> None:
    found = load_task(options())
    assert isinstance(found, ImageTask)
    assert (len(found.train), len(found.valid)) == (1617, 180)
    about = found.about()
    assert {name: about[name] for name in ("classes", "channels", "side")} == {"classes": 10, "channels": 1, "side": 8}
    assert about == task(options()).about()
    assert (about["task"], about["name"], found.unit) == ("image", "digits", "images")


def test_validation_is_an_evenly_spaced_part(tmp_path: Path) -> None:
    x, y = some_images(30)
    np.savez(tmp_path / "p.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    some = task(TaskOptions(task="image", data=str(tmp_path / "p.npz"), valid_samples=6))
    everyone = task(options(tmp_path / "p.npz"))
    assert torch.equal(
        some.valid.batch(torch.arange(6), None)[0], everyone.valid.batch(torch.arange(0, 30, 5), None)[0]
    )
    assert evenly_spaced(10, 4).tolist() == [0, 2, 5, 7]
    assert evenly_spaced(3, 4).tolist() == [0, 1, 2]


def test_the_fingerprint_follows_the_data(tmp_path: Path) -> None:
    x, y = some_images(24)
    fingerprints = []
    for name, change in (("a", 0), ("b", 0), ("c", 1)):
        changed = x.copy()
        changed[0] ^= change
        np.savez(tmp_path / f"{name}.npz", x=changed, y=y)
        fingerprints.append(task(options(tmp_path / f"{name}.npz")).about()["fingerprint"])
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
    folders = [write_folder(tmp_path / name, x, y) for name in ("fa", "fb", "fc")]
    (folders[2] / "cat" / "0001.png").unlink()
    folder_fingerprints = [task(options(path)).about()["fingerprint"] for path in folders]
    assert folder_fingerprints[0] == folder_fingerprints[1] != folder_fingerprints[2]


def test_batches_of_decoded_images_come_in_the_same_order(tmp_path: Path) -> None:
    """They are fetched ahead by a thread."""
    train = some_images(24)
    np.savez(tmp_path / "p.npz", x_train=train[0], y_train=train[1], x_test=train[0], y_test=train[1])
    write_folder(tmp_path / "folder" / "train", *train)
    write_folder(tmp_path / "folder" / "test", *train)
    made = [task(options(tmp_path / name, flip=True, crop=2)) for name in ("p.npz", "folder")]
    one, two = (each.feed(1, 2, batch=4, seed=5, skew=1.0) for each in made)
    for _ in range(7):
        (x, y), (x2, y2) = one.next(), two.next()
        assert torch.equal(x, x2)
        assert torch.equal(y, y2)
        assert y.min() >= 1  # the second half of the images in the order of their labels


# -- pixels -------------------------------------------------------------------------------------------------------


def test_normalised_by_the_training_images(tmp_path: Path) -> None:
    x, y = some_images(60)
    x[..., 1] //= 3
    np.savez(tmp_path / "p.npz", x_train=x, y_train=y, x_test=x[:20], y_test=y[:20])
    found = task(options(tmp_path / "p.npz"))
    batch, labels = found.train.batch(torch.arange(60), None)
    assert batch.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert torch.allclose(batch.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(batch.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5)
    scaled = torch.from_numpy(x).permute(0, 3, 1, 2) / 255
    mean, std = scaled.mean((0, 2, 3)), scaled.std((0, 2, 3), correction=0)
    assert torch.allclose(batch, (scaled - mean.view(3, 1, 1)) / std.view(3, 1, 1), atol=1e-5)
    assert torch.allclose(found.dataset.normalization.mean, mean)


def test_floating_pixels_stay_as_they_are(tmp_path: Path) -> None:
    x, y = some_images(30, channels=1)
    np.savez(tmp_path / "bytes.npz", x=x, y=y)
    np.savez(tmp_path / "floats.npz", x=x.astype(np.float64) / 255, y=y)
    np.savez(tmp_path / "wide.npz", x=x.astype(np.int64), y=y.astype(np.uint8))
    exact, floats, wide = (everything(task(options(tmp_path / f"{n}.npz"))) for n in ("bytes", "floats", "wide"))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(exact, floats, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(exact, wide, strict=True))


def test_a_channel_that_never_varies_is_zero(tmp_path: Path) -> None:
    for kind in (np.uint8, np.float32):
        x, y = some_images(30)
        x = x.astype(kind)
        x[..., 2] = 0.1 if kind is np.float32 else 7
        np.savez(tmp_path / "p.npz", x=x, y=y)
        batch = task(options(tmp_path / "p.npz")).train.batch(torch.arange(5), None)[0]
        assert torch.isfinite(batch).all()
        assert batch[:, 2].abs().max() < 1e-4


def test_images_of_differing_sizes_are_resized_if_asked(tmp_path: Path) -> None:
    x, y = some_images(12)
    write_folder(tmp_path / "folder", x, y)
    odd = tmp_path / "folder" / "dog" / "0005.png"
    Pil.new("RGB", (20, 11), (40, 80, 120)).save(odd)
    with pytest.raises(TaskError, match=r"dog/0005.png: 11x20, but .*8x8; give --side"):
        load_images(str(tmp_path / "folder"), None)
    found = load_images(str(tmp_path / "folder"), 4)
    pixels = found.train.raw(torch.arange(len(found.train.labels)), found.shape)
    assert pixels.shape == (11, 3, 4, 4)
    assert any(
        torch.equal(p, torch.tensor([40, 80, 120], dtype=torch.uint8).view(3, 1, 1).expand(3, 4, 4)) for p in pixels
    )


def test_a_size_that_the_survey_missed_is_refused_when_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = some_images(12)
    root = write_folder(tmp_path / "f" / "train", x, y).parent
    write_folder(root / "valid", x, y)
    Pil.new("RGB", (9, 9)).save(root / "train" / "eel" / "0011.png")
    monkeypatch.setattr(source, "SURVEY_SIZE", 4)
    found = task(options(root))
    with pytest.raises(TaskError, match=r"eel/0011.png: 9x9, but others are 8x8; give --side"):
        found.train.batch(torch.tensor([0, 11]), None)


def test_arrays_and_images_are_resized_alike(tmp_path: Path) -> None:
    """By torch and by Pillow: both bilinear and averaged over what is covered, so bytes differ by rounding only."""
    x, y = some_images(12, side=16)
    np.savez(tmp_path / "p.npz", x_train=x, y_train=y, x_test=x[::2], y_test=y[::2])
    root = write_folder(tmp_path / "f" / "train", x, y).parent
    write_folder(root / "valid", x, y)
    rows = torch.arange(12)
    for side in (6, 16, 20):
        a, b = (load_images(str(path), side) for path in (tmp_path / "p.npz", root))
        gap = a.train.raw(rows, a.shape).int() - b.train.raw(rows, b.shape).int()
        assert gap.abs().max() <= (0 if side == 16 else 1)


def test_images_need_not_be_square(tmp_path: Path) -> None:
    x, y = some_images(30, channels=1)
    np.savez(tmp_path / "p.npz", x=x[:, :6], y=y)
    found = task(options(tmp_path / "p.npz"))
    assert found.about()["side"] == "6x8"
    batch = found.train.batch(torch.arange(4), None)
    assert found.model()(pixel_values=batch[0]).logits.shape == (4, 3)


def test_one_colour_image_makes_the_folder_one_of_colours(tmp_path: Path) -> None:
    x, y = some_images(12, channels=1)
    root = write_folder(tmp_path / "f", x, y)
    assert load_images(str(root), None).shape.channels == 1
    Pil.new("RGBA", (8, 8), (10, 20, 30, 40)).save(root / "cat" / "0000.png")
    assert load_images(str(root), None).shape.channels == 3


# -- augmentation -------------------------------------------------------------------------------------------------


def test_flipped_and_shifted_images() -> None:
    raw = torch.arange(1, 2 * 2 * 3 * 4 + 1, dtype=torch.uint8).view(2, 2, 3, 4)
    mirror = flip_images(raw, torch.tensor([True, False]))
    assert torch.equal(mirror[0], raw[0].flip(-1))
    assert torch.equal(mirror[1], raw[1])
    moved = shift_images(raw, torch.tensor([[1, -2], [0, 0]]), 2)
    wanted = torch.zeros_like(raw[0])
    wanted[:, 1:, :2] = raw[0][:, :2, 2:]  # one down, two left
    assert torch.equal(moved[0], wanted)
    assert torch.equal(moved[1], raw[1])


def raw_batch(found: ImageTask, rows: torch.Tensor, seed: int) -> torch.Tensor:
    """A batch with its normalisation undone."""
    x = found.train.batch(rows, torch.Generator().manual_seed(seed))[0]
    by = found.dataset.normalization
    return ((x * by.std.view(-1, 1, 1) + by.mean.view(-1, 1, 1)) / by.scale).round().to(torch.uint8)


def test_a_batch_is_a_function_of_rows_and_generator() -> None:
    found, plain = task(options(flip=True, crop=2)), task(options())
    rows = torch.arange(100, 400)
    assert torch.equal(raw_batch(found, rows, 1), raw_batch(found, rows, 1))
    assert not torch.equal(raw_batch(found, rows, 1), raw_batch(found, rows, 2))
    assert torch.equal(found.train.batch(rows, None)[0], plain.train.batch(rows, None)[0])
    assert torch.equal(raw_batch(plain, rows, 1), raw_batch(plain, rows, 2))
    before = torch.get_rng_state()
    raw_batch(found, rows, 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_half_are_mirrored_and_shifts_reach_every_place() -> None:
    rows = torch.arange(600)
    plain = raw_batch(task(options()), rows, 0)
    turned = raw_batch(task(options(flip=True)), rows, 0)
    same = (turned == plain).flatten(1).all(1)
    mirror = (turned == plain.flip(-1)).flatten(1).all(1)
    assert (same | mirror).all()
    assert 240 < int(mirror.sum()) < 360
    moved = raw_batch(task(options(crop=1)), rows, 0)
    found = set()
    for i in range(len(rows)):
        places = [(dy, dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)]
        fits = [by for by in places if torch.equal(shift_images(plain[i : i + 1], torch.tensor([by]), 1)[0], moved[i])]
        assert fits
        if len(fits) == 1:
            found.add(fits[0])
    assert len(found) == 9


def test_a_crop_that_could_leave_nothing_is_refused() -> None:
    with pytest.raises(TaskError, match=r"crop=8: must be less than the images' side \(8x8\)"):
        task(options(crop=8))


# -- models -------------------------------------------------------------------------------------------------------

FULL = {
    "resnet-tiny": 144_312,
    "resnet-mini": 783_096,
    "resnet-18": 11_689_512,
    "resnet-34": 21_797_672,
    "resnet-50": 25_557_032,
    "resnet-101": 44_549_160,
}


@pytest.mark.parametrize("stem", ["small", "full"])
@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_papers_sizes_also_without_memory(name: str, stem: str) -> None:
    asked = TaskOptions(task="image", model=name, data="none", image=Image(stem=stem))
    with torch.device("meta"):
        model = task(asked).model()
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"meta"}
    count = sum(p.numel() for p in model.parameters())
    stem_gap = (49 - 9) * 3 * PRESETS[name].stem if stem == "small" else 0
    assert count == FULL[name] - stem_gap
    assert model(pixel_values=torch.empty(2, 3, 64, 64, device="meta")).logits.shape == (2, 1000)


def test_a_model_follows_torchs_generator_and_the_data() -> None:
    found = task(options())
    torch.manual_seed(3)
    one = found.model()
    torch.manual_seed(3)
    two = found.model()
    other = found.model()
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))
    stem = one.resnet.embedder.embedder.convolution.weight
    assert not torch.equal(stem, other.resnet.embedder.embedder.convolution.weight)
    assert stem.shape == (16, 1, 3, 3)
    # The new stem has the initial weights that all other convolutions have: of deviation √(2 / fan out).
    assert 0.8 < float(stem.detach().std()) / (2 / (9 * 16)) ** 0.5 < 1.2
    assert one.config is not two.config


def test_nothing_to_train_on_still_makes_a_model() -> None:
    found = task(options("none", side=64))
    assert (len(found.train), len(found.valid)) == (0, 0)
    assert found.about()["side"] == 64
    with pytest.raises(TaskError, match=r"^no data: 0 training samples"):
        found.feed(0, 1, batch=4, seed=0, skew=0.0)


def test_an_unknown_model_names_the_nearest() -> None:
    with pytest.raises(TaskError, match=r"'resnet18': unknown; did you mean resnet-18\? There are resnet-tiny, "):
        task(TaskOptions(task="image", model="resnet18"))
    with pytest.raises(TaskError, match="'zzz': unknown; There are resnet-tiny"):
        task(TaskOptions(task="image", model="zzz"))


def from_config(model: Path, data: str | None = None, **image: object) -> ImageTask:
    return task(TaskOptions(task="image", model=str(model), data=data, image=Image(**image)))


def test_a_model_by_its_config(tmp_path: Path) -> None:
    transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=77
    ).save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        model = from_config(path).model()
        assert type(model) is transformers.ResNetForImageClassification
        assert (model.config.num_labels, model.config.num_channels) == (10, 1)  # the data's, not the config's


def test_a_config_for_another_size_is_refused(tmp_path: Path) -> None:
    transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=4
    ).save_pretrained(tmp_path)
    with pytest.raises(TaskError, match=r"image_size=16, but the images are 8x8; give --side 16"):
        from_config(tmp_path)
    found = from_config(tmp_path, side=16)
    assert found.measure(found.model(), found.valid.batch(torch.arange(4), None)).keys() == {"loss", "top1", "top5"}


def test_a_config_that_is_of_no_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"a folder without config.json"):
        from_config(tmp_path)
    transformers.BertConfig().save_pretrained(tmp_path)
    with pytest.raises(TaskError, match="model_type bert does not classify images"):
        from_config(tmp_path)
    bad = tmp_path / "bad.json"
    for text in ("{", "{}", '{"model_type": "nonesuch"}', '{"model_type": "resnet", "depths": "many"}', "[]"):
        bad.write_text(text)
        with pytest.raises(TaskError, match=r"bad.json: not a config that transformers knows"):
            from_config(bad)


# -- training, measuring, exporting -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained() -> tuple[ImageTask, torch.nn.Module]:
    found = task(options())
    torch.manual_seed(0)
    model = found.model()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    feed = found.feed(0, 1, batch=64, seed=0, skew=0.0)
    for _ in range(120):
        loss = found.loss(model, feed.next())
        inner.zero_grad()
        loss.backward()
        inner.step()
    return found, model.eval()


def test_the_smallest_learns_the_digits(trained: tuple[ImageTask, torch.nn.Module]) -> None:
    found, model = trained
    means = found.measure(model, found.valid.batch(torch.arange(len(found.valid)), None))
    assert means["top1"] > 0.9
    assert means["top1"] <= means["top5"] <= 1.0
    assert means["loss"] < 0.4
    assert found.summary(means) == means


def test_measures_count_what_they_say(tmp_path: Path) -> None:
    found = task(options())

    class Fixed(torch.nn.Module):
        def forward(self, pixel_values: torch.Tensor) -> object:
            """Class 0 likeliest, then 1, and so on."""
            logits = -torch.arange(10.0).expand(len(pixel_values), 10)
            return transformers.modeling_outputs.ImageClassifierOutputWithNoAttention(logits=logits)

    labels = torch.tensor([0, 0, 4, 5])
    means = found.measure(Fixed(), (torch.zeros(4, 1, 8, 8), labels))
    assert means["top1"] == 0.5
    assert means["top5"] == 0.75
    few = task(options(write_folder(tmp_path / "f", *some_images(12))))
    assert few.measure(few.model(), few.train.batch(torch.arange(4), None)).keys() == {"loss", "top1"}


def logits_of(model: torch.nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(pixel_values=pixels).logits


def test_an_export_with_the_full_stem_loads_plainly(tmp_path: Path) -> None:
    x, y = some_images(24, side=32)
    root = write_folder(tmp_path / "f", x, y)
    found = task(options(root, stem="full"))
    model = found.model()
    pixels = found.valid.batch(torch.arange(2), None)[0]
    found.export(model, tmp_path / "out")
    reloaded = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert type(reloaded) is transformers.ResNetForImageClassification
    assert torch.equal(logits_of(reloaded, pixels), logits_of(model, pixels))
    assert reloaded.config.id2label == {0: "cat", 1: "dog", 2: "eel"}
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "out")
    held = found.valid.source
    seen = processor([held.open(row) for row in range(2)], return_tensors="pt")["pixel_values"]
    assert torch.allclose(seen, pixels, atol=1e-5)


WITHOUT_OVERTONE = """
import sys, torch
from transformers import AutoModelForImageClassification
model = AutoModelForImageClassification.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
assert not any(name.split(".")[0] == "overtone" for name in sys.modules)
with torch.no_grad():
    torch.save(model(pixel_values=torch.load(sys.argv[2])).logits, sys.argv[3])
"""


def test_the_package_itself_makes_the_small_stem_known() -> None:
    """docs/train.md says to import `overtone.tasks.image`, so the package imports task.py, which registers the type."""
    assert overtone.tasks.image.ImageTask is ImageTask
    known = transformers.AutoModelForImageClassification._model_mapping
    assert known[overtone.tasks.image.SmallResNetConfig] is overtone.tasks.image.SmallResNetForImageClassification


@pytest.mark.slow
def test_an_export_with_the_small_stem_loads_with_and_without_overtone(
    tmp_path: Path, trained: tuple[ImageTask, torch.nn.Module]
) -> None:
    found, model = trained
    found.export(model, tmp_path / "out")
    pixels = found.valid.batch(torch.arange(8), None)[0]
    wanted = logits_of(model, pixels)
    reloaded = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert type(reloaded) is type(model)
    assert torch.equal(logits_of(reloaded, pixels), wanted)
    again = from_config(tmp_path / "out").model()
    assert type(again) is type(model)

    torch.save(pixels, tmp_path / "pixels.pt")
    # A finder that refuses overtone: in a development install it is on the path of every process.
    guard = "import sys\nclass No:\n def find_spec(s, n, p=None, t=None):\n  assert n.split('.')[0] != 'overtone', n\n"
    code = guard + "sys.meta_path.insert(0, No())\n" + WITHOUT_OVERTONE
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules"), "OMP_NUM_THREADS": "1"}
    arguments = [str(tmp_path / name) for name in ("out", "pixels.pt", "logits.pt")]
    done = subprocess.run([sys.executable, "-c", code, *arguments], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "logits.pt"), wanted)


def test_an_export_says_how_images_were_prepared(
    tmp_path: Path, trained: tuple[ImageTask, torch.nn.Module], capfd: pytest.CaptureFixture[str]
) -> None:
    found, model = trained
    found.export(model, tmp_path)
    assert capfd.readouterr().err == ""  # no bar, here and not for good
    assert transformers.utils.logging.is_progress_bar_enabled()
    note = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert note["size"] == {"height": 8, "width": 8}
    assert torch.allclose(torch.tensor(note["image_mean"]), found.dataset.normalization.mean)
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json", "model.safetensors", "preprocessor_config.json", "small_resnet.py",
    }  # fmt: skip
    with pytest.raises(TaskError, match="Linear is not a model of the transformers library"):
        found.export(torch.nn.Linear(1, 1), tmp_path)


# -- what cannot be used ------------------------------------------------------------------------------------------


def refused(data: Path | str, why: str) -> None:
    with pytest.raises(TaskError, match=why):
        task(options(data))


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    refused(tmp_path / "none.npz", r"none.npz: no such file or folder; give a folder of images")
    refused(tmp_path, r"no subfolders; give a folder of images")
    refused("hub:cifar10", r"not streamed from the hub.*load_dataset\('cifar10'\).save_to_disk")
    (tmp_path / "a.txt").write_text("a")
    refused(tmp_path / "a.txt", "not a known form of image data")


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    x, y = some_images(12)
    root = write_folder(tmp_path / "one", x[:4], y[:4])
    refused(root, "only one class, cat; give at least two")
    (root / "dog").mkdir()
    refused(root, r"dog: no images; add some \(.bmp")
    root = write_folder(tmp_path / "broken", x, y)
    (root / "eel" / "0010.png").write_bytes(b"not an image")
    refused(root, r"eel/0010.png: not a readable image")
    whole = (root / "cat" / "0000.png").read_bytes()
    (root / "eel" / "0010.png").write_bytes(whole[: len(whole) // 2])
    refused(root, r"eel/0010.png: not a readable image")
    Pil.fromarray(np.zeros((8, 8), dtype=np.uint16)).save(root / "eel" / "0010.png")
    refused(root, r"eel/0010.png: pixels of mode I;16; use images of 8 bits")
    root = write_folder(tmp_path / "parts" / "train", x, y).parent
    (root / "valid").mkdir()
    refused(root, "no validation images")
    (root / "valid" / "fox").mkdir()
    refused(root, "class fox is not in .*train")


def npz(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path / "p.npz", **arrays)
    return path / "p.npz"


def test_arrays_that_cannot_be_used(tmp_path: Path) -> None:
    x, y = some_images(12)
    refused(npz(tmp_path, a=x, b=y), "has a, b; name them x_train, y_train")
    refused(npz(tmp_path), "has no arrays; name them")
    refused(npz(tmp_path, x_train=x, y_train=y, x_test=x), "has x_train, y_train, x_test; name them")
    refused(npz(tmp_path, x=x, y=y[:-1]), "12 images, but 11 labels; give one label")
    refused(npz(tmp_path, x=x, y=y.astype(float)), r"labels are float64 of shape \(12,\); give one whole number")
    refused(npz(tmp_path, x=x, y=np.eye(3, dtype=int)[y]), r"labels are int64 of shape \(12, 3\)")
    refused(npz(tmp_path, x=x, y=y - 1), "labels from -1 to 1; number the classes from 0")
    refused(npz(tmp_path, x=x, y=y * 10**9), "labels from 0 to 2000000000; number the classes")
    refused(npz(tmp_path, x=x, y=y * 0), "all training images have label 0; give at least two classes")
    refused(npz(tmp_path, x=x[:0], y=y[:0]), r"images of shape \(0, 8, 8, 3\)")
    refused(npz(tmp_path, x=x.transpose(0, 3, 1, 2), y=y), r"shape \(12, 3, 8, 8\).*channels, which come last")
    refused(npz(tmp_path, x=x.reshape(12, -1), y=y), r"images of shape \(12, 192\)")
    refused(npz(tmp_path, x=x.astype(int) - 9, y=y), "pixels of type int64; use floating numbers, or whole ones from 0")
    refused(npz(tmp_path, x=np.where(x > 250, np.nan, x), y=y), "not finite")
    refused(npz(tmp_path, x_train=x, y_train=y, x_test=x, y_test=y + 1), "label 3 among the validation images")
    refused(npz(tmp_path, x_train=x, y_train=y, x_test=x[:, 1:], y_test=y), r"\(3, 8, 8\), validation .*\(3, 7, 8\)")
    refused(npz(tmp_path, x_train=x, y_train=y, x_test=x / 255, y_test=y), "uint8 of .* torch.float32")
    refused(npz(tmp_path, x=np.array([{}] * 12), y=y), "not a readable .npz of plain arrays")


def test_an_npz_that_is_broken(tmp_path: Path) -> None:
    x, y = some_images(12)
    path = npz(tmp_path, x=x, y=y)
    whole = path.read_bytes()
    for content in (b"", b"junk" * 9, whole[: len(whole) // 2], whole[:200] + b"\xff" * 40 + whole[240:]):
        path.write_bytes(content)
        refused(path, r"p.npz: not a readable .npz of plain arrays")
    with path.open("wb") as file:
        np.save(file, x)
    refused(path, r"p.npz: not a readable .npz")


def test_idx_files_that_cannot_be_used(tmp_path: Path) -> None:
    part = some_images(12, channels=1)
    root = write_idx(tmp_path / "idx", part, part)
    images, labels = root / "train-images-idx3-ubyte.gz", root / "train-labels.idx1-ubyte"
    good = idx(part[0])
    for content, why in (
        (
            gzip.compress(b"\0\0\x0d\x03" + good[4:]),
            r"train-images.*starts with 00000d03, but an IDX file of bytes starts with 00000803",
        ),
        (gzip.compress(b""), "starts with nothing"),
        (gzip.compress(good[:-5]), r"779 bytes, but its header says 16 \+ 768"),
        (gzip.compress(good + b"x"), r"785 bytes, but its header says 16 \+ 768"),
        (gzip.compress(good[:10]), "ends within its header, after 10 bytes"),
        (gzip.compress(good)[:-20], "cannot be read"),
        (b"not packed at all", "cannot be read"),
    ):
        images.write_bytes(content)
        refused(root, why)
    images.write_bytes(gzip.compress(good))
    labels.write_bytes(idx(part[1][:-1].astype(np.uint8)))
    refused(root, "12 images, but 11 labels; give one label")
    labels.unlink()
    refused(root, r"no train-labels\* file")


def test_saved_datasets_that_cannot_be_used(tmp_path: Path) -> None:
    x, y = some_images(6)
    two = write_saved(tmp_path / "a", {"test": (x, y), "more": (x, y)})
    refused(two, "has no split 'train'; its splits are test, more")
    images = [Pil.fromarray(p) for p in x]

    def saved(name: str, **columns: list[object]) -> Path:
        datasets.Dataset.from_dict(columns).save_to_disk(str(tmp_path / name))
        return tmp_path / name

    refused(saved("b", image=images, kind=y.tolist()), r"no column of labels \(label, .*among image, kind; rename")
    refused(saved("c", text=["a"] * 6, label=y.tolist()), r"no column of images \(image, .*among text, label; rename")
    refused(saved("d", image=images, label=["a"] * 6), "labels are <U1")
    refused(saved("e", image=images, label=[0, 1, None, 1, 1, 1]), "row 2 has no label")
    refused(saved("f", image=[[[0.5]]] * 6, label=y.tolist()), r"float64 of shape \(1, 1\); store images")
    refused(saved("g", image=[[[300]]] * 6, label=y.tolist()), r"int64 of shape \(1, 1\); store images")
    refused(saved("h", image=["a"] * 6, label=y.tolist()), r"row \d of column image: <U1 of shape \(\)")
    missing = datasets.ClassLabel(names=list(CLASSES))
    table = datasets.Dataset.from_dict({"image": images, "label": [0, 1, -1, 2, 0, 1]})
    table.cast_column("label", missing).save_to_disk(str(tmp_path / "i"))
    refused(tmp_path / "i", "labels from -1 to 2; number the classes from 0 to at most 2")
    (tmp_path / "b" / "state.json").write_text("{")
    refused(tmp_path / "b", "empty or damaged")


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(TaskError, match=r"needs sklearn.*pip install 'overtone\[train\]'"):
        task(options())
    root = write_saved(tmp_path / "saved", {"train": some_images(6)})
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused(root, r"needs datasets; pip install")
    root = write_folder(tmp_path / "folder", *some_images(6))
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    refused(root, r"^task image: needs PIL.Image; pip install")
