"""Checkpoints of a run: the network, the task at hand, the accuracies so far.

The one before stays beside the newest, for the case that the newest is damaged.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from reprlib import Repr
from typing import Any

from confitune.engine.checkpoint_data import data_of, values_of
from confitune.errors import ConfituneError
from confitune.files import DamagedFileError, read_sealed, write_sealed

CHECKPOINT, BEFORE = "checkpoint.pt", "checkpoint.before.pt"


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

        Args:
            note: is told where the newest is damaged and the one before is taken.
        """
        there = [folder / name for name in (CHECKPOINT, BEFORE) if (folder / name).exists()]
        damaged: list[str] = []
        for path in there:
            try:
                checkpoint = _checked(cls(**values_of(read_sealed(path))))
            except DamagedFileError as error:
                damaged.append(str(error))
                continue
            except Exception as error:  # whole, but no checkpoint of this version
                shown = str(error)[:300]
                raise ConfituneError(f"{path} cannot be read ({shown}); delete it to start this run anew") from error
            require_same_config(checkpoint.config, config, path)
            if damaged:
                note(f"{damaged[0]}; going on from {path.name} instead")
            return checkpoint
        if damaged:
            raise ConfituneError(f"{'; '.join(damaged)}; delete {folder} to start this run anew")
        return None


_KINDS: dict[str, type | tuple[type, ...]] = {
    "config": dict,
    "task": int,
    "net": dict,
    "fit": (dict, type(None)),
    "penalties": list,
    "matrix": list,
    "seconds": (int, float),
    "train_seconds": (int, float),
    "images": int,
}


def _checked(checkpoint: Checkpoint) -> Checkpoint:
    wrong = [name for name, kind in _KINDS.items() if not isinstance(getattr(checkpoint, name), kind)]
    if wrong or not all(isinstance(key, str) for key in checkpoint.config):
        raise TypeError(f"its {' and '.join(wrong or ['config'])} are not what a run writes")
    return checkpoint


def require_same_config(found: dict[str, Any], wanted: dict[str, Any], path: Path) -> None:
    """Refuse to mix runs of different configurations in one folder."""
    differing = sorted(key for key in {*found, *wanted} if not _same(found.get(key), wanted.get(key)))
    if differing:
        shown = "; ".join(f"{key} was {_said(found, key)}, now {_said(wanted, key)}" for key in differing)
        raise ConfituneError(f"{path} was made with another configuration ({shown}); choose another --out folder")


def _same(found: object, wanted: object) -> bool:
    try:
        return bool(found == wanted)
    except (RuntimeError, RecursionError):  # tensors, or lists in lists without end: no configuration
        return False


def _said(config: dict[str, Any], key: str) -> str:
    return _short(config[key]) if key in config else "not set"


def _short(value: object) -> str:
    brief = Repr()
    brief.maxstring = brief.maxother = brief.maxlong = 300
    brief.maxdict = brief.maxlist = brief.maxtuple = 20
    brief.maxlevel = 4
    return brief.repr(value)
