"""The data set of pictures that a package brings: how its files are read, written, held out and trained on."""

import gzip
import struct
from typing import Any

import numpy as np
import pytest

from lib.bench import scaling_laws_images
from lib.given.data.images import load_images
from lib.given.data.record import load
from lib.runs.data import pictures
from lib.runs.data.gathering import Source
from lib.runs.engine.request import parse
from lib.runs.engine.start import prepare
from lib.runs.engine.tasks import ViTTask
from lib.runs.flags import UsageError
from lib.runs.pictures import main
from lib.runs.train_vit import make_vit_parser


def idx(values: np.ndarray) -> bytes:
    head = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    return gzip.compress(head + values.astype(np.uint8).tobytes())


def put(folder, beginning: str, n: int, seed: int = 0, n_labels: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    images, labels = generator.integers(256, size=(n, 28, 28)), generator.integers(10, size=n_labels or n)
    labels[:10] = np.arange(10)[: len(labels)]
    (folder / f"{beginning}-images-idx3-ubyte.gz").write_bytes(idx(images))
    (folder / f"{beginning}-labels-idx1-ubyte.gz").write_bytes(idx(labels))
    return images, labels


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A data set of 60 pictures to train on and 20 to test, made from a package that is not downloaded."""
    (tmp_path / "package").mkdir()
    found = {
        split: put(tmp_path / "package", name, n)
        for (split, name), n in zip(pictures.SPLITS.items(), (60, 20), strict=True)
    }

    def unpacked(name, folder):
        for path in (tmp_path / "package").iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        return Source(name, "1.0", ["Expat"])

    monkeypatch.setattr(pictures, "unpacked", unpacked)
    assert main([str(tmp_path / "set")]) == 0
    return tmp_path / "set", found


@pytest.mark.parametrize("split", ["train", "test"])
def test_pictures_and_classes_come_back(made, split):
    folder, found = made
    data = load_images(folder, split)
    images, labels = found[split]
    assert np.array_equal((data.images[:, 0] * 255).round().numpy(), images)
    assert data.labels.tolist() == labels.tolist()
    assert data.classes == pictures.CLASSES


def options(folder, *more):
    words = f"--data {folder} --image-size 28 --patch-size 7 --dim 64 --n-layers 1 --batch 10 --steps 2 --device cpu"
    return parse(make_vit_parser(), [*words.split(), *more])


def test_the_test_split_is_held_out_and_never_trained_on(made):
    folder, found = made
    run = prepare(options(folder, "--eval-every", "1"), ViTTask)
    source: Any = run.task.source
    assert (source.n, source.n_held_out) == (60, 20)
    assert source.pictures[:60, 0].tolist() == found["train"][0].tolist()
    assert source.pictures[60:, 0].tolist() == found["test"][0].tolist()
    config = run.task.config
    assert (config.dim, config.n_heads, config.hidden_dim, config.n_layers, config.n_patches) == (64, 1, 256, 1, 16)


def test_a_test_split_that_batches_do_not_divide_is_not_trained_on_either(made):
    folder, _ = made
    source = prepare(options(folder, "--eval-every", "1", "--batch", "15"), ViTTask).task.source
    assert (source.n, source.n_held_out) == (60, 15)


def test_a_test_split_smaller_than_a_batch_is_refused(made):
    with pytest.raises(
        UsageError, match=r"--batch 30: the test split of .* has 20 images; expected a batch of at most"
    ):
        prepare(options(made[0], "--eval-every", "1", "--batch", "30"), ViTTask)


def test_test_pictures_of_another_size_are_refused(made):
    pictures.write_split(made[0] / "test.parquet", np.zeros((20, 32, 30), np.uint8), np.arange(20) % 10)
    with pytest.raises(UsageError, match=r"of the test are \(1, 32, 30\) and those to train on \(1, 28, 28\)"):
        prepare(options(made[0], "--eval-every", "1"), ViTTask)


def test_a_class_that_only_the_test_has_gets_a_logit(tmp_path):
    """Without names, each split says only which classes it has."""
    from datasets import Dataset, Features, Image, Value

    for split, classes in {"train": 3, "test": 4}.items():
        pictures.write_split(tmp_path / "named.parquet", np.zeros((20, 28, 28), np.uint8), np.arange(20) % classes)
        data = Dataset.from_parquet(str(tmp_path / "named.parquet"), cache_dir=str(tmp_path / split))
        data.cast(Features({"img": Image(), "label": Value("int64")})).to_parquet(tmp_path / f"{split}.parquet")
    assert prepare(options(tmp_path, "--eval-every", "1"), ViTTask).task.n_classes == 4


def test_without_evaluation_the_test_split_is_not_read(made):
    source: Any = prepare(options(made[0]), ViTTask).task.source
    assert (source.n, source.n_held_out, len(source.pictures)) == (60, 0, 60)


def test_a_share_is_refused_where_there_is_a_test_split(made):
    with pytest.raises(UsageError, match=r"--held-out 0\.2: .* has a test split of its own"):
        options(made[0], "--eval-every", "1", "--held-out", "0.2")


def test_patches_that_do_not_tile_the_picture_are_refused(made):
    with pytest.raises(UsageError, match="--patch-size 5: image_size = 28 is not a multiple of patch_size = 5"):
        prepare(options(made[0], "--patch-size", "5"), ViTTask)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda f: (f / "train-labels-idx1-ubyte.gz").unlink(),
        "there is no train-images-idx3-ubyte.gz with its labels"),
        (lambda f: (f / "train-images-idx3-ubyte.gz").write_bytes(b"no gzip"),
        "train-images-idx3-ubyte.gz is no idx file"),
        (lambda f: (f / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"\0\0")), "is no idx file"),
        (lambda f: (f / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx_cut())),
        "holds 7 bytes for the shape"),
        (lambda f: put(f, "t10k", 20, n_labels=19), "t10k: 20 pictures, 19 classes"),
    ],
)  # fmt: skip
def test_damaged_packages_are_named(tmp_path, monkeypatch, capsys, harm, message):
    for name in pictures.SPLITS.values():
        put(tmp_path, name, 20)
    harm(tmp_path)

    def unpacked(name, folder):
        for path in tmp_path.glob("*.gz"):
            (folder / path.name).write_bytes(path.read_bytes())
        return Source(name, "1.0", ["Expat"])

    monkeypatch.setattr(pictures, "unpacked", unpacked)
    assert main([str(tmp_path / "set")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "set" / "train.parquet").exists(), "nothing is written before all has been read"


def idx_cut() -> bytes:
    return struct.pack(">HBB3I", 0, 8, 3, 2, 2, 2) + bytes(7)


@pytest.mark.time_limit(200)
def test_the_largest_is_predicted_before_it_is_trained(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(
        scaling_laws_images,
        "record",
        lambda name, found, folder: written.append(sorted(found)) or record(name, found, folder),
    )
    from lib.bench.kit import record

    scaling_laws_images.main(["--tiny", f"--folder={tmp_path}"])
    found = load("scaling_laws_images", tmp_path)["results"]
    assert written == [["batch", "predict", "sweep", "tiny"], ["batch", "largest", "predict", "sweep", "tiny"]]
    sizes = [(p["dim"], p["n_layers"], p["steps"]) for p in found["sweep"]]
    assert sizes == [(*size, n) for size in scaling_laws_images.TINY_SIZES[:-1] for n in scaling_laws_images.TINY_STEPS]
    plan = found["predict"]
    d, n = plan["images"], plan["n_weights"]
    assert (d, n) == (20 * 50, 12 * 4 * 128**2)
    loss = plan["e"] + plan["a"] / n ** plan["alpha"] + plan["b"] / d ** plan["beta"]
    assert plan["held_out_loss"] == pytest.approx(loss)
    assert plan["held_out_top1"] == pytest.approx(plan["at_0"] + plan["slope"] * loss)
    assert plan["slope"] < 0, "a lower loss goes with a higher accuracy"
    for name in ("held_out_loss", "held_out_top1"):
        low, high = plan["intervals_90"][name]
        assert low <= high
    assert [p["steps"] for p in found["largest"]] == list(scaling_laws_images.TINY_STEPS)


def test_the_program_needs_data(capsys):
    with pytest.raises(SystemExit):
        scaling_laws_images.main([])
    assert "a folder that lib.runs.pictures wrote" in capsys.readouterr().err
