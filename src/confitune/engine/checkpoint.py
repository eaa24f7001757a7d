"""Checkpoints of a run: the network, the task at hand, the accuracies so far.

The one before stays beside the newest, for the case that the newest is damaged. A file holds JSON, and the tensors that
it names as safetensors: nothing in it is executed, and no more comes out of it than its own size.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors.torch import load, save
from torch import Tensor

from confitune.errors import ConfituneError
from confitune.files import DamagedFileError, read_sealed, write_sealed

CHECKPOINT, BEFORE = "checkpoint.pt", "checkpoint.before.pt"


@dataclass
class Checkpoint:
    """Where a run is: everything that it needs to go on."""

    config: dict[str, Any]  # what the run computes; another configuration must not go on from here
    task: int  # tasks learned and evaluated
    net: dict[str, Any]
    fit: dict[str, Any] | None  # the task in training, after its last whole epoch
    hooks: list[dict[str, Any]]  # of the method, and of those that it is combined with
    matrix: list[list[float]]  # accuracies in percent, as `metrics` takes them
    as_learned: list[float]  # before means are recovered, where they are
    seconds: float = 0.0
    train_seconds: float = 0.0
    images: int = 0
    data: int = 0  # checksum of the tasks; 0: not known
    threads: int = 0

    def save(self, folder: Path) -> None:
        """Make this the folder's newest checkpoint; at any moment a whole one is there."""
        data = data_of(vars(self))
        if (folder / CHECKPOINT).exists():
            os.replace(folder / CHECKPOINT, folder / BEFORE)
        write_sealed(folder / CHECKPOINT, data)

    @classmethod
    def load(
        cls, folder: Path, config: dict[str, Any], note: Callable[[str], object] = lambda text: None
    ) -> Checkpoint | None:
        """The folder's newest checkpoint that is whole, or None; refused if it was made with another configuration.

        `note` is told where the newest is damaged and the one before is taken.
        """
        damaged: list[str] = []
        for path in (folder / CHECKPOINT, folder / BEFORE):
            if not path.exists():
                continue
            try:
                with fitting(path):
                    checkpoint = TypeAdapter(cls).validate_python(values_of(read_sealed(path)))
                    differing = differences(checkpoint.config, config)
            except DamagedFileError as error:
                damaged.append(str(error))
                continue
            if differing:
                raise ConfituneError(f"{path} was made with another configuration ({differing}); delete it")
            if damaged:
                note(f"{damaged[0]}; going on from {path.name} instead")
            return checkpoint
        if damaged:
            raise ConfituneError(f"{'; '.join(damaged)}; delete {folder} to start this run anew")
        return None


@contextmanager
def fitting(path: Path) -> Iterator[None]:
    """Within, a checkpoint is used that may be of another version or network, though its checksum is right."""
    try:
        yield
    except ConfituneError:
        raise
    except Exception as error:  # each library and each part of a network has its own errors
        raise ConfituneError(
            f"{path} is no checkpoint of this version or of this run ({type(error).__name__}: {str(error)[:300]}); "
            "delete it to start this run anew"
        ) from error


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """In what two configurations differ, with both values; nothing where they are the same."""
    names = sorted(key for key in {*found, *wanted} if found.get(key) != wanted.get(key))
    return "; ".join(f"{name} was {_said(found, name)}, now {_said(wanted, name)}" for name in names)


def _said(config: dict[str, Any], key: str) -> str:
    return repr(config[key])[:300] if key in config else "not set"


def data_of(values: dict[str, Any]) -> bytes:
    """Tensors and plain values as bytes: a line of JSON, then the tensors, which it names by their numbers."""
    tensors: dict[str, Tensor] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            number = str(len(tensors))
            tensor = value.detach().cpu()
            last = tensor.dim() == 4 and not tensor.is_contiguous()  # convolutions': they come back in this order
            tensor = tensor.permute(0, 2, 3, 1) if last else tensor
            tensors[number] = tensor.clone(memory_format=torch.contiguous_format)
            return {"channels last" if last else "tensor": number}
        if isinstance(value, dict):
            return {"dict": [[plain(key), plain(inside)] for key, inside in value.items()]}
        if isinstance(value, tuple):
            return {"tuple": [plain(inside) for inside in value]}
        return [plain(inside) for inside in value] if isinstance(value, list) else value

    return json.dumps(plain(values)).encode() + b"\n" + save(tensors)


def values_of(data: bytes) -> dict[str, Any]:
    """What `data_of` was given, its tensors on the CPU; anything else raises one of many errors."""
    text, _, packed = data.partition(b"\n")
    tensors = load(packed)

    def whole(value: Any) -> Any:
        if isinstance(value, dict):
            ((kind, inside),) = value.items()
            if kind in ("tensor", "channels last"):
                return tensors[inside] if kind == "tensor" else tensors[inside].permute(0, 3, 1, 2)
            values = [whole(item) for item in inside]
            return {"dict": dict, "tuple": tuple}[kind](values)
        return [whole(inside) for inside in value] if isinstance(value, list) else value

    values: dict[str, Any] = whole(json.loads(text))
    return values
