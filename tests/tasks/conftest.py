"""Tiny datasets in the layouts of the real ones. Every class has a colour of its own, so pixels tell the label."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

Write = Callable[..., None]


def colour(label: int) -> tuple[int, int, int]:
    return (20 * label + 10, 200 - 10 * label, 128)


@pytest.fixture
def write_image() -> Write:
    def write(path: Path, label: int, size: tuple[int, int] = (40, 32)) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, colour(label)).save(path, format="JPEG", quality=95)

    return write


@pytest.fixture
def label_of() -> Callable[[np.ndarray], int]:
    """Which class stored bytes [3,H,W] of the clean pipeline belong to."""
    return lambda pixels: round((float(np.asarray(pixels)[0].mean()) - 10) / 20)


@pytest.fixture
def flowers_dir(tmp_path: Path, write_image: Write) -> Path:
    """Six species, ten images each, in no order; species 4 does not occur."""
    numbers = np.array([1, 2, 3, 5, 6, 7] * 10, dtype=np.uint8)
    np.random.default_rng(1).shuffle(numbers)
    for i, number in enumerate(numbers):
        write_image(tmp_path / "data/flowers-102/jpg" / f"image_{i + 1:05d}.jpg", int(number))
    savemat(tmp_path / "data/flowers-102/imagelabels.mat", {"labels": numbers[None]})
    return tmp_path / "data"


@pytest.fixture
def caltech_dir(tmp_path: Path, write_image: Write) -> Path:
    top = tmp_path / "data/caltech101/101_ObjectCategories"
    for label, (name, count) in enumerate(
        {"Faces": 10, "airplanes": 15, "ant": 5, "barrel": 10, "yin_yang": 6}.items()
    ):
        for i in range(count):
            write_image(top / name / f"image_{i + 1:04d}.jpg", label)
    write_image(top / "BACKGROUND_Google/image_0001.jpg", 9)
    (top / "ant/Thumbs.db").write_bytes(b"no image")
    return tmp_path / "data"


@pytest.fixture
def cub_dir(tmp_path: Path) -> Path:
    """Four species of three images; in each a bird (the species' colour) in its box, black around it."""
    folder = tmp_path / "data/CUB_200_2011"
    names = ["001.Black_footed_Albatross", "002.Laysan_Albatross", "003.Sooty_Albatross", "004.Groove_billed_Ani"]
    lines: dict[str, list[str]] = {
        name: [] for name in ("images", "image_class_labels", "train_test_split", "bounding_boxes")
    }
    number = 0
    for label, name in enumerate(names):
        for i in range(3):
            number += 1
            picture = Image.new("RGB", (60, 50))
            picture.paste(colour(label), (4, 6, 34, 36))
            (folder / "images" / name).mkdir(parents=True, exist_ok=True)
            picture.save(folder / "images" / name / f"bird_{i}.jpg", format="PNG")
            lines["images"].append(f"{number} {name}/bird_{i}.jpg")
            lines["image_class_labels"].append(f"{number} {label + 1}")
            lines["train_test_split"].append(f"{number} {int(i != 1)}")
            lines["bounding_boxes"].append(f"{number} 4.0 6.0 30.0 30.0")
    lines["classes"] = [f"{i + 1} {name}" for i, name in enumerate(names)]
    for table, rows in lines.items():
        (folder / f"{table}.txt").write_text("\n".join(rows) + "\n")
    return tmp_path / "data"


@pytest.fixture
def cifar_dir(tmp_path: Path) -> Path:
    """Ten classes with four training images and one test image each, written as Python 2 and numpy 1 did."""
    folder = tmp_path / "data/cifar-100-python"
    folder.mkdir(parents=True)
    parts: dict[str, dict[str, object]] = {"meta": {"fine_label_names": [f"class {i}" for i in range(10)]}}
    for part, count in (("train", 40), ("test", 10)):
        labels = [i % 10 for i in range(count)]
        data = np.array([np.repeat(colour(label), 1024) for label in labels], dtype=np.uint8)
        parts[part] = {"data": data, "fine_labels": labels, "filenames": ["x"] * count}
    for part, content in parts.items():
        packed = pickle.dumps(content, protocol=2)
        (folder / part).write_bytes(packed.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n"))
    return tmp_path / "data"


@pytest.fixture
def class_folders(tmp_path: Path, write_image: Write) -> Path:
    """Three classes of five images each."""
    for label, name in enumerate(["ant", "bee", "cat"]):
        for i in range(5):
            write_image(tmp_path / "mine" / name / f"{i}.jpg", label)
    return tmp_path / "mine"
