"""Images: the digits' fixed split, the photograph, files of CIFAR-10's schema, and what bad input is told."""

import io

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image, Value
from PIL import Image as Picture

from lib.given.data.images import load_images, photograph

CLASSES = ["airplane", "automobile", "bird"]


def png(seed: int, shape=(32, 32, 3)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    buffer = io.BytesIO()
    Picture.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def write(path, pictures: list[bytes], labels: list[int], column: str = "img", typed: bool = True):
    """A parquet file as CIFAR-10's on the hub."""
    kind = Image() if typed else {"bytes": Value("binary"), "path": Value("string")}
    features = Features({column: kind, "label": ClassLabel(names=CLASSES) if typed else Value("int64")})
    rows = {column: [{"bytes": data, "path": None} for data in pictures], "label": labels}
    Dataset.from_dict(rows, features=features).to_parquet(str(path))
    return path


def test_digits_have_a_fixed_split():
    train, test = load_images("digits"), load_images("digits", "test")
    assert train.images.shape == (1437, 1, 8, 8)
    assert test.images.shape == (360, 1, 8, 8)
    assert train.images.min() == 0
    assert train.images.max() == 1
    assert train.images.dtype == torch.float32
    assert train.labels.dtype == torch.int64
    assert test.labels[:5].tolist() == load_images("digits", "test", limit=5).labels.tolist()
    assert test.labels.bincount().tolist() == [28, 37, 30, 36, 39, 38, 34, 42, 38, 38]
    with pytest.raises(ValueError, match="'valid'"):
        load_images("digits", "valid")


def test_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    theirs, ours = load_digits(), [load_images("digits", split) for split in ("train", "test")]
    rows = torch.cat([torch.cat([16 * part.images.flatten(1), part.labels[:, None]], dim=1) for part in ours])
    expected = torch.cat([torch.from_numpy(theirs.data), torch.from_numpy(theirs.target)[:, None]], dim=1).float()
    assert sorted(rows.tolist()) == sorted(expected.tolist())


def test_the_photograph_is_in_colour():
    assert photograph().shape == (3, 600, 512)
    small = photograph(75, 64)
    assert small.shape == (3, 75, 64)
    assert 0 <= small.min() < small.max() <= 1


@pytest.mark.parametrize("typed", [True, False], ids=["typed", "plain"])
def test_files_of_cifar10s_schema_are_read(tmp_path, typed):
    pictures = [png(seed) for seed in range(3)]
    found = load_images(write(tmp_path / "train-00000.parquet", pictures, [0, 2, 1], typed=typed))
    assert found.images.shape == (3, 3, 32, 32)
    expected = np.array(Picture.open(io.BytesIO(pictures[1])), dtype=np.float32) / 255
    torch.testing.assert_close(found.images[1], torch.from_numpy(expected.transpose(2, 0, 1).copy()))
    assert found.labels.tolist() == [0, 2, 1]
    assert found.classes == (tuple(CLASSES) if typed else ("0", "1", "2"))


def test_a_folder_is_read_by_split(tmp_path):
    write(tmp_path / "train-00000.parquet", [png(0), png(1)], [0, 1])
    write(tmp_path / "train-00001.parquet", [png(2)], [2])
    write(tmp_path / "test-00000.parquet", [png(3)], [1])
    assert load_images(tmp_path).labels.tolist() == [0, 1, 2]
    assert load_images(tmp_path, "test").labels.tolist() == [1]
    assert len(load_images(tmp_path, limit=2)) == 2
    with pytest.raises(FileNotFoundError, match="'valid'"):
        load_images(tmp_path, "valid")


def test_grayscale_stays_grayscale(tmp_path):
    path = write(tmp_path / "train.parquet", [png(0, (28, 28))], [0])
    assert load_images(path).images.shape == (1, 1, 28, 28)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.parquet.*cifar10"):
        load_images(tmp_path / "nowhere.parquet")


def test_a_wrong_column_is_named_with_the_file_and_the_row(tmp_path):
    path = write(tmp_path / "train.parquet", [png(0)], [0], column="image")
    with pytest.raises(ValueError, match=r"train\.parquet, row 1: no picture in column 'img'.*'image', 'label'"):
        load_images(path)
    assert len(load_images(path, image="image")) == 1
    with pytest.raises(ValueError, match=r"train\.parquet, row 1: no class .*'fine_label'"):
        load_images(path, image="image", label="fine_label")


@pytest.mark.parametrize("typed", [True, False], ids=["typed", "plain"])
def test_a_truncated_picture_is_named_with_the_file_and_the_row(tmp_path, typed):
    write(tmp_path / "train-00000.parquet", [png(0)], [0], typed=typed)
    write(tmp_path / "train-00001.parquet", [png(1), png(2)[:400], png(3)], [0, 1, 2], typed=typed)
    with pytest.raises(ValueError, match=r"train-00001\.parquet, row 2: the picture in column 'img' cannot be read"):
        load_images(tmp_path)


def test_a_picture_of_another_size_is_named(tmp_path):
    path = write(tmp_path / "train.parquet", [png(0), png(1, (16, 16, 3))], [0, 1])
    with pytest.raises(ValueError, match=r"row 2: the picture is \[3, 16, 16\], the first one is \[3, 32, 32\]"):
        load_images(path)


def test_a_file_of_another_kind_is_named(tmp_path):
    (tmp_path / "train.bin").write_bytes(b"0" * 3073)
    with pytest.raises(FileNotFoundError, match=r"train\.bin: cannot read \.bin"):
        load_images(tmp_path / "train.bin")


def test_a_file_that_is_no_parquet_is_named(tmp_path):
    (tmp_path / "train.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(ValueError, match=r"train\.parquet, after row 0: the file cannot be read"):
        load_images(tmp_path / "train.parquet")
