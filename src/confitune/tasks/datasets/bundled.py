"""`photos` and `digits`: the two sets that come with installed packages and need no download.

In `photos`, the offline default, the question is which photograph a patch was cut from. The twenty photographs come
with scikit-image and scikit-learn and are as unlike as coins, a retina and a rocket. Each is divided into 3 x 3 cells
like a chessboard: training patches are cut from the five "black" cells, test patches from the four "white" ones, so no
pixel is in both. `digits` are the 1,797 scanned digits of 8 x 8 pixels of scikit-learn.
"""

import zlib
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from confitune.errors import DataMissingError
from confitune.tasks.datasets.dataset import ImageSet
from confitune.tasks.decode import Box, open_rgb
from confitune.tasks.splits import stratified_split

SIDE = 64
SMALLEST = 32
PATCHES = {"train": 60, "test": 40}  # for each photograph
PHOTOGRAPHS = {
    "skimage/data": (
        "astronaut.png brick.png camera.png cell.png chelsea.png clock_motion.png coffee.png coins.png grass.png "
        "gravel.png hubble_deep_field.jpg ihc.png moon.png motorcycle_left.png page.png retina.jpg rocket.jpg text.png"
    ),
    "sklearn/datasets/images": "china.jpg flower.jpg",
}


def read_digits() -> ImageSet:
    """Stored at 8 x 8, enlarged to 64 x 64 on the fly; levels 0..16 spread over 0..255; 80/20 split."""
    from sklearn.datasets import load_digits

    data = load_digits()
    grey = np.rint(data.images * (255 / 16)).astype(np.uint8)
    labels = data.target.astype(np.int64)
    classes = tuple(str(digit) for digit in range(10))
    train, test = stratified_split(labels, classes)
    pixels = torch.from_numpy(grey)[:, None].repeat(1, 3, 1, 1)
    return ImageSet(classes, labels, train, test, pixels=pixels, resize=SIDE)


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
    xs, ys = ([side * i // 3 for i in range(4)] for side in size)
    odd = {"train": 0, "test": 1}[split]
    cells = [(row, column) for row in range(3) for column in range(3) if (row + column) % 2 == odd]
    return [(xs[column], ys[row], xs[column + 1], ys[row + 1]) for row, column in cells]


def _find(place: str, names: str) -> list[Path]:
    """Files inside an installed package, found without importing it and without its downloader."""
    package, _, below = place.partition("/")
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise DataMissingError(f"photos needs the photographs of {package}, which is not installed")
    paths = [Path(spec.origin).parent / below / name for name in names.split()]
    if missing := [path for path in paths if not path.exists()]:
        raise DataMissingError(f"photos needs {missing[0]}, which this version of {package} lacks; install another one")
    return paths
