"""Checkpoints of a run: the network, the task at hand, the accuracies so far."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from confitune.errors import ConfituneError
from confitune.files import write_whole

CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True)
class Checkpoint:
    """Everything a run needs to go on."""

    config: dict[str, Any]  # what the run computes; another configuration must not go on from here
    task: int  # tasks learned and evaluated
    net: dict[str, Any]
    fit: dict[str, Any] | None  # the task in training, after its last whole epoch
    penalties: list[dict[str, Any]]
    matrix: list[list[float]]
    seconds: float
    train_seconds: float
    images: int

    def save(self, folder: Path) -> None:
        """Replace the folder's checkpoint, atomically."""
        write_whole(folder / CHECKPOINT, lambda out: torch.save(vars(self), out))

    @classmethod
    def load(cls, folder: Path, config: dict[str, Any]) -> Checkpoint | None:
        """The folder's checkpoint, or None; refused if it was made with another configuration."""
        return cls._read(folder / CHECKPOINT, config, mapped=False)

    @classmethod
    def check(cls, folder: Path, config: dict[str, Any]) -> None:
        """Refuse what `load` would refuse, without reading the weights."""
        cls._read(folder / CHECKPOINT, config, mapped=True)

    @classmethod
    def _read(cls, path: Path, config: dict[str, Any], mapped: bool) -> Checkpoint | None:
        if not path.exists():
            return None
        try:
            checkpoint = cls(**torch.load(path, map_location="cpu", weights_only=True, mmap=mapped))
        except Exception as error:
            raise ConfituneError(f"{path} cannot be read ({error}); delete it to start this run anew") from error
        require_same_config(checkpoint.config, config, path)
        return checkpoint


def require_same_config(found: dict[str, Any], wanted: dict[str, Any], path: Path) -> None:
    """Refuse to mix runs of different configurations in one folder."""
    differing = sorted(key for key in {*found, *wanted} if found.get(key) != wanted.get(key))
    if differing:
        shown = "; ".join(f"{key} was {found.get(key)!r}, now {wanted.get(key)!r}" for key in differing)
        raise ConfituneError(f"{path} was made with another configuration ({shown}); choose another --out folder")
