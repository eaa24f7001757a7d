"""`photos`: which photograph was this patch cut from? The offline default.

The twenty photographs come with scikit-image and scikit-learn, so this needs no download; they are as unlike as
coins, a retina and a rocket. Each is divided into 3 x 3 cells like a chessboard: training patches are cut from the
five "black" cells, test patches from the four "white" ones, so no pixel is in both.
"""

from __future__ import annotations

import zlib
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from confitune.tasks.datasets.image_set import ImageSet
from confitune.tasks.errors import DataMissingError
from confitune.tasks.pipelines import Box
from confitune.tasks.rgb import open_rgb

SIDE = 64
SMALLEST = 32
PATCHES = {"train": 60, "test": 40}  # for each photograph
PHOTOGRAPHS = {
    "skimage/data": [
        "astronaut.png",
        "brick.png",
        "camera.png",
        "cell.png",
        "chelsea.png",
        "clock_motion.png",
        "coffee.png",
        "coins.png",
        "grass.png",
        "gravel.png",
        "hubble_deep_field.jpg",
        "ihc.png",
        "moon.png",
        "motorcycle_left.png",
        "page.png",
        "retina.jpg",
        "rocket.jpg",
        "text.png",
    ],
    "sklearn/datasets/images": ["china.jpg", "flower.jpg"],
}


def read_photos() -> ImageSet:
    """60 training and 40 test patches of each photograph, the same ones every time."""
    paths = sorted((path for place, names in PHOTOGRAPHS.items() for path in _find(place, names)), key=lambda p: p.stem)
    pixels, labels, is_test = [], [], []
    for label, path in enumerate(paths):
        photograph = open_rgb(path)
        for split in ("train", "test"):
            for box in patch_boxes(path.stem, photograph.size, split):
                # Cropped before it is resized: the filter would otherwise reach into the neighbouring cell.
                patch = photograph.crop(box).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
                pixels.append(np.asarray(patch).transpose(2, 0, 1))
                labels.append(label)
                is_test.append(split == "test")
    return ImageSet(
        classes=tuple(path.stem for path in paths),
        labels=np.array(labels, dtype=np.int64),
        train=np.flatnonzero(~np.array(is_test)),
        test=np.flatnonzero(is_test),
        pixels=torch.from_numpy(np.stack(pixels)),
    )


def patch_boxes(photograph: str, size: tuple[int, int], split: str) -> list[Box]:
    """Where the patches of one split are cut from, as (left, top, right, bottom).

    Squares with a side between 32 pixels and the cell's short side, uniformly, at a uniform place in a cell of the
    split. Drawn with a seed made from the photograph's name, so the class order and other photographs do not matter.
    """
    draw = np.random.default_rng(zlib.crc32(f"{photograph}/{split}".encode()))
    cells = board_cells(size, split)
    boxes = []
    for _ in range(PATCHES[split]):
        left, top, right, bottom = cells[draw.integers(len(cells))]
        side = int(draw.integers(SMALLEST, min(right - left, bottom - top) + 1))
        x = int(draw.integers(left, right - side + 1))
        y = int(draw.integers(top, bottom - side + 1))
        boxes.append((x, y, x + side, y + side))
    return boxes


def board_cells(size: tuple[int, int], split: str) -> list[Box]:
    """The 3 x 3 cells of one split: row + column even for training, odd for testing.

    >>> board_cells((300, 300), "test")[0]
    (100, 0, 200, 100)
    """
    width, height = size
    xs = [width * i // 3 for i in range(4)]
    ys = [height * i // 3 for i in range(4)]
    odd = {"train": 0, "test": 1}[split]
    return [
        (xs[column], ys[row], xs[column + 1], ys[row + 1])
        for row in range(3)
        for column in range(3)
        if (row + column) % 2 == odd
    ]


def _find(place: str, names: list[str]) -> list[Path]:
    """Files inside an installed package, found without importing it and without its downloader."""
    package, _, below = place.partition("/")
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise DataMissingError(f"photos needs the photographs of {package}, which is not installed")
    paths = [Path(spec.origin).parent / below / name for name in names]
    if missing := [path for path in paths if not path.exists()]:
        raise DataMissingError(f"photos needs {missing[0]}, which this version of {package} lacks; install another one")
    return paths
