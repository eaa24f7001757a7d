"""What several tests of bundles and servers use."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from confitune.deploy import Bundle, Predictor
from confitune.deploy.bundle import BundleChange, Network, TaskRecord


class FakePredictor:
    """What a server asks of a predictor besides answers, of a bundle that never changes."""

    tasks: Mapping[str, Any] = MappingProxyType({})
    version = "1"
    outdated = False
    unreadable: frozenset[str] = frozenset()

    def renew(self) -> None:
        pass


NETWORK = Network(
    model="test_byobnet",
    means="window",
    mean=(0.5, 0.4, 0.3),
    std=(0.2, 0.25, 0.3),
    size=32,
    weights="none",
    weights_sha256=hashlib.sha256(b"start").hexdigest(),
)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file in a folder, the lock apart."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def contents_and_times(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file in a folder, and when it was changed."""
    return {name: (data, (folder / name).stat().st_mtime_ns) for name, data in contents(folder).items()}


def backbone_of(path: Path, manifest: str = "bundle.json") -> Path:
    """The backbone that a manifest names."""
    return path / "backbones" / f"{json.loads((path / manifest).read_bytes())['backbone']['sha256']}.safetensors"


def checked(path: Path) -> dict[str, float | None]:
    """How good tasks were when they were last tested."""
    return {name: record.checked for name, record in Bundle.open(path).tasks.items()}


def edited(path: Path, **values: Any) -> None:
    """A manifest with other values, its checksum right."""
    said = json.loads(path.read_bytes()) | values
    del said["checksum"]
    text = json.dumps(said, sort_keys=True, ensure_ascii=False).encode()
    path.write_text(json.dumps(said | {"checksum": hashlib.sha256(text).hexdigest()}))


def flipped(data: bytes, position: int) -> bytes:
    """The same with one bit changed."""
    changed = bytearray(data)
    changed[position] ^= 1 << position % 8
    return bytes(changed)


def damage_task(path: Path, task: str, position: int = 5000, of: str = "file") -> Path:
    """Change one bit of a file of a task, whose size stays what it was; gives the file."""
    file = path / getattr(Bundle.open(path).record(task), of).name
    file.write_bytes(flipped(file.read_bytes(), position))
    return file


def answers(path: Path) -> dict[str, Tensor]:
    """Logits of the same images under every task."""
    predictor = Predictor.from_bundle(path, device="cpu")
    pixels = torch.randint(0, 256, (3, 3, 224, 224), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    return {task: torch.stack(predictor.logits(pixels, [task] * 3)) for task in predictor.tasks}


def guess(predictor: Predictor, pixels: Tensor) -> list[tuple[str | None, float | None]]:
    """For each image the task that it is given to, or None, and how surely."""
    found = predictor.predict(pixels, [None] * len(pixels), 1)
    return [(answer.task, answer.task_confidence) for answer in found]


def known(classes: tuple[str, ...], accuracy: float | None, images: int, learned: str) -> TaskRecord:
    """What a server tells of a task, be it what no bundle would hold."""
    return TaskRecord.model_construct(classes=classes, accuracy=accuracy, images=images, learned=learned)


def until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait for something that another thread does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


def perturbed(real: dict[str, Tensor], seed: int, classes: int) -> dict[str, Tensor]:
    """The state of a task with every number moved, and another head."""
    chance = torch.Generator().manual_seed(seed)
    moved = {
        key: tensor * (1 + 0.05 * torch.randn(tensor.shape, generator=chance)) if tensor.is_floating_point() else tensor
        for key, tensor in real.items()
    }
    moved["head.weight"] = torch.randn(classes, real["head.weight"].shape[1], generator=chance)
    moved["head.bias"] = torch.randn(classes, generator=chance)
    return moved


def add(change: BundleChange, name: str, real: dict[str, Tensor], seed: int, **more: Any) -> None:
    """A task like `real`."""
    classes = tuple(f"{name} {n}" for n in range(2 + seed % 3))
    stored = change.store_task(perturbed(real, seed, len(classes)), classes)
    change.add_task(name, TaskRecord(classes=classes, file=stored, checked=50.0), **more)


def settling(only_head):
    """In place of `Best.settle`: a head for every task, or training with moments of its own."""

    def settle(self, context):
        if only_head:
            return self._settle(context, self._head(context), "told to")
        self._use_moments(context.net, True)
        head = self._head(context)
        self._fit = context.index, replace(head, right=torch.zeros_like(head.right))  # whatever training gives is kept
        return False

    return settle


def small() -> nn.Module:
    """The smallest network with a convolution and its norm."""
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers)
