"""Reads the IDX files in which MNIST and Fashion-MNIST come, plain or gzipped."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from ronde.errors import UsageError

_UNSIGNED_BYTE = 0x08


def read_idx(path: Path, num_axes: int) -> np.ndarray:
    """Read one file of unsigned bytes.

    Args:
        path: The file; a name that ends in ``.gz`` is decompressed.
        num_axes: 1 for labels, 3 for images.

    Returns:
        uint8, of the shape that the file's header gives.

    Raises:
        UsageError: The file is missing, is no such file, or is too short or too long.
    """
    content = _read_bytes(path)
    header_bytes = 4 + 4 * num_axes
    magic = bytes((0, 0, _UNSIGNED_BYTE, num_axes))
    if content[:4] != magic:
        raise UsageError(
            f"{path} must start with the bytes {magic.hex(' ')} (IDX, unsigned bytes, "
            f"{num_axes} axes), got {content[:4].hex(' ') or 'nothing'}. "
            f"Fetch the file again."
        )
    if len(content) < header_bytes:
        raise UsageError(
            f"{path} must hold a header of {header_bytes} bytes, got {len(content)}. "
            f"Fetch the file again."
        )
    shape = struct.unpack(f">{num_axes}I", content[4:header_bytes])
    expected_bytes = header_bytes + math.prod(shape)
    if len(content) != expected_bytes:
        counts = " * ".join(map(str, shape))
        raise UsageError(
            f"{path} must hold {header_bytes} + {counts} = {expected_bytes} bytes, got "
            f"{len(content)}. Fetch the file again."
        )
    return np.frombuffer(content, np.uint8, offset=header_bytes).reshape(shape)


def read_images_and_labels(directory: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Read ``<name>-images-idx3-ubyte`` and ``<name>-labels-idx1-ubyte``.

    Args:
        directory: Where the files are, plain or with ``.gz``.
        name: ``train`` or ``t10k``.

    Returns:
        Images, uint8 of shape (n, height, width), and labels 0-9, uint8 of shape (n,).

    Raises:
        UsageError: A file is not there or damaged, or the two do not fit together.
    """
    images_path = _find(directory, f"{name}-images-idx3-ubyte")
    labels_path = _find(directory, f"{name}-labels-idx1-ubyte")
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if not len(images) or len(images) != len(labels):
        raise UsageError(
            f"{images_path} must hold one image for each label in {labels_path}, got "
            f"{len(images)} images and {len(labels)} labels. Fetch both files again."
        )
    if labels.max() > 9:
        raise UsageError(
            f"{labels_path} must hold labels 0 to 9, got {labels.max()}. "
            f"Fetch the file again."
        )
    return images, labels


def _find(directory: Path, name: str) -> Path:
    for path in (directory / name, directory / f"{name}.gz"):
        if path.is_file():
            return path
    raise UsageError(
        f"{directory} must hold {name} or {name}.gz, got neither. Give the directory "
        f"of the dataset; on Debian, apt-get install dataset-fashion-mnist makes "
        f"/usr/share/datasets/fashion-mnist."
    )


def _read_bytes(path: Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        return gzip.decompress(path.read_bytes())
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UsageError(
            f"{path} must be a whole gzip file, got {path.stat().st_size} bytes that "
            f"are not ({error}). Fetch the file again."
        ) from error
