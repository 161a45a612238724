import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from idx import read_idx, read_images_and_labels

from ronde.errors import UsageError


def idx_bytes(array: np.ndarray) -> bytes:
    header = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_pair(directory: Path, num_images: int, labels: list[int]) -> None:
    images = np.zeros((num_images, 2, 2))
    (directory / "train-images-idx3-ubyte").write_bytes(idx_bytes(images))
    (directory / "train-labels-idx1-ubyte").write_bytes(idx_bytes(np.array(labels)))


@given(shape=st.lists(st.integers(0, 5), min_size=1, max_size=3), zipped=st.booleans())
@settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_what_is_written_is_read(
    tmp_path: Path, shape: list[int], *, zipped: bool
) -> None:
    array = np.arange(np.prod(shape)).reshape(shape) % 256
    path = tmp_path / ("file.gz" if zipped else "file")
    content = idx_bytes(array)
    path.write_bytes(gzip.compress(content, mtime=0) if zipped else content)
    read = read_idx(path, len(shape))
    assert read.dtype == np.uint8
    assert np.array_equal(read, array)


WHOLE = idx_bytes(np.zeros((2, 3, 3)))


@pytest.mark.parametrize("length", range(len(WHOLE)))
def test_every_cut_is_noticed(tmp_path: Path, length: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(WHOLE[:length])
    with pytest.raises(UsageError, match=r"must .*, got .*\. Fetch the file again\.$"):
        read_idx(path, 3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (WHOLE + b"x", r"must hold 16 \+ 2 \* 3 \* 3 = 34 bytes, got 35"),
        (b"\x00\x00\x0d" + WHOLE[3:], "must start with the bytes 00 00 08 03"),
        (idx_bytes(np.zeros(4)), "got 00 00 08 01"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_idx(path, 3)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="must hold train-images-idx3-ubyte or"):
        read_images_and_labels(tmp_path, "train")


def test_images_and_labels_belong_together(tmp_path: Path) -> None:
    write_pair(tmp_path, 2, [1, 9])
    images, labels = read_images_and_labels(tmp_path, "train")
    assert images.shape == (2, 2, 2)
    assert labels.tolist() == [1, 9]
    write_pair(tmp_path, 2, [1])
    with pytest.raises(UsageError, match="got 2 images and 1 labels"):
        read_images_and_labels(tmp_path, "train")
    write_pair(tmp_path, 2, [1, 10])
    with pytest.raises(UsageError, match="must hold labels 0 to 9, got 10"):
        read_images_and_labels(tmp_path, "train")
