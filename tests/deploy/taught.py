"""Fixtures: bundles that have learned tasks of made-up pictures, none of which looks like another's."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch import Tensor

from confitune.deploy import Bundle, LearnReport, LearnSettings, learn

Teach = Callable[..., LearnReport]

COLOURS = {"reds": (200, 40, 40), "greens": (40, 200, 40), "blues": (40, 40, 200), "yellows": (220, 220, 40)}

TASKS = ("reds", "stripes", "greens", "checks", "blues", "yellows")


def picture(task: str, label: int, chance: np.random.Generator, side: int = 64) -> Image.Image:
    """One of the task's pictures: light and dark of a colour, stripes of three directions, fine and coarse checks."""
    y, x = np.mgrid[:side, :side]
    if task == "stripes":
        plane = 255 * ((((y, x, x + y)[label] + chance.integers(16)) // 8) % 2)
    elif task == "checks":
        width = (4, 16)[label]
        plane = 60 + 120 * (((x + chance.integers(width)) // width + (y + chance.integers(width)) // width) % 2)
    else:
        plane = np.full((side, side), (1.0, 0.4)[label])
    values = plane[..., None] * np.array(COLOURS.get(task, (1, 1, 1))) + chance.normal(0, 15, 3)
    top, left = chance.integers(side - 16, size=2)
    values[top : top + 16, left : left + 16] += chance.normal(0, 40)  # and no noise, which makes PNGs slow
    return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))


@pytest.fixture(scope="session")
def pictures() -> Callable[..., list[Image.Image]]:
    """Makes new pictures of a task, its first two classes in turn."""

    def pictures(task: str, count: int = 8, seed: int = 99) -> list[Image.Image]:
        chance = np.random.default_rng([seed, TASKS.index(task)])
        return [picture(task, n % 2, chance) for n in range(count)]

    return pictures


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the folder of a task's pictures: 10 of each class, 2 of which are held out."""
    root = tmp_path_factory.mktemp("photos")

    def photos(task: str) -> Path:
        if not (root / task).exists():
            chance = np.random.default_rng(TASKS.index(task))
            for label in range(3 if task == "stripes" else 2):
                folder = root / task / f"{task} {label}"
                folder.mkdir(parents=True)
                for n in range(10):
                    picture(task, label, chance).save(folder / f"{n}.png")
        return root / task

    return photos


@pytest.fixture(scope="session")
def decoded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for decoded images."""
    return tmp_path_factory.mktemp("decoded")


@pytest.fixture(scope="session")
def new_bundle(weights: Path) -> dict[str, Any]:
    """Settings that only a new bundle takes: timm's test_byobnet at 32 pixels, every task of which is trained."""
    return {"model": "test_byobnet", "weights": str(weights), "size": 32, "method": "confit"}


@pytest.fixture(scope="session")
def teach(photos: Callable[[str], Path], decoded: Path, new_bundle: dict[str, Any]) -> Teach:
    """Teaches a bundle a task in under a second; keywords are settings."""

    def teach(task: str, bundle: Path, *, folder: Path | None = None, name: str | None = None, **given: Any):
        usual = {"epochs": 4, "batch_size": 4, "lr": 0.02, "device": "cpu", "keep": 64}
        start = {} if Bundle.exists(bundle) else new_bundle
        settings = LearnSettings(**{**usual, **start, **given})
        return learn(folder or photos(task), name or task, bundle, settings, cache_dir=decoded)

    return teach


@pytest.fixture(scope="session")
def taught_once(teach: Teach, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By the number of tasks a bundle with the first so many of `TASKS`: one that has grown, and what it was before."""
    root, found = tmp_path_factory.mktemp("taught"), {}
    for count, task in enumerate(TASKS, 1):
        teach(task, root / "model")
        found[count] = shutil.copytree(root / "model", root / str(count))
    return found


@pytest.fixture
def taught(taught_once: dict[int, Path], tmp_path: Path) -> Callable[..., Path]:
    """Copies a bundle with so many tasks for a test to change; files keep their times."""

    def taught(count: int, name: str = "model") -> Path:
        return Path(shutil.copytree(taught_once[count], tmp_path / name))

    return taught


@pytest.fixture(scope="session")
def real(taught_once: dict[int, Path]) -> dict[str, Tensor]:
    """A task's state, of a network as `NETWORK`."""
    return {key: tensor.clone() for key, tensor in Bundle.open(taught_once[1]).task_state("reds").items()}


@pytest.fixture(scope="session")
def backbone(taught_once: dict[int, Path]) -> dict[str, Tensor]:
    """What all tasks share, of a network as `NETWORK`."""
    return Bundle.open(taught_once[1]).load_network().shared_state_dict()
