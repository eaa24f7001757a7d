"""Checkpoints of a run: the network, the task at hand, the accuracies so far.

The one before stays beside the newest, for the case that the newest is damaged. What a file holds is looked through
before torch makes tensors of it: `torch.load` runs nothing from a file when asked so, but takes what memory the file
asks for. Here no more than the file's own size comes out of it: nothing in it is compressed, only tensors and plain
values are built, and no value stands for many by being referred to again and again.
"""

from __future__ import annotations

import io
import os
import pickletools
import re
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from reprlib import Repr
from typing import Any

import torch
from torch import Tensor

from confitune.errors import ConfituneError
from confitune.files import DamagedFileError, read_sealed, write_sealed

CHECKPOINT, BEFORE = "checkpoint.pt", "checkpoint.before.pt"

_BUILT = re.compile(r"torch \w+Storage|torch\._utils _rebuild_tensor_v2|collections OrderedDict")
_MOST_VALUES = 2_000_000  # each tensor, number, text, list or mapping is one
_MOST_DEEP = 50


@dataclass(frozen=True)
class Checkpoint:
    """Everything a run needs to go on."""

    config: dict[str, Any]  # what the run computes; another configuration must not go on from here
    task: int  # tasks learned and evaluated
    net: dict[str, Any]
    fit: dict[str, Any] | None  # the task in training, after its last whole epoch
    hooks: list[dict[str, Any]]  # of the method, and of those that it is combined with
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
    "hooks": list,
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


def data_of(values: dict[str, Any]) -> bytes:
    """Tensors and plain values as bytes."""
    out = io.BytesIO()
    torch.save(values, out)
    return out.getvalue()


def values_of(data: bytes) -> dict[str, Any]:
    """What `data_of` was given, its tensors on the CPU; anything else raises a `ValueError` or torch's own errors."""
    with zipfile.ZipFile(io.BytesIO(data)) as packed:
        members = packed.infolist()
        stored = all(member.compress_type == zipfile.ZIP_STORED for member in members)
        if not stored or sum(member.file_size for member in members) > len(data):
            raise ValueError("its parts are larger than the file")
        for member in members:
            if member.filename.endswith("data.pkl"):
                _require_plain(packed.read(member))
    values = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    _require_countable(values)
    if not isinstance(values, dict):
        raise ValueError(f"it holds {type(values).__name__}")
    return values


def _require_plain(pickled: bytes) -> None:
    for operation, argument, _ in pickletools.genops(pickled):
        if operation.name == "GLOBAL" and not _BUILT.fullmatch(str(argument)):
            raise ValueError(f"it asks for {str(argument)[:100]!r}, which no checkpoint needs")
        if operation.name == "STACK_GLOBAL":
            raise ValueError("it names what it is made of in another way than torch does")


def _require_countable(values: object) -> None:
    """A few lists that refer to one another again and again would be more values than any memory holds."""
    count, left = 0, [(values, 0)]
    while left:
        value, depth = left.pop()
        count += 1
        if count > _MOST_VALUES or depth > _MOST_DEEP:
            raise ValueError("it holds more values than a checkpoint has")
        inside: Iterable[object] = ()
        if isinstance(value, dict):
            inside = (*value, *value.values())
        elif isinstance(value, list | tuple):
            inside = value
        elif isinstance(value, Tensor) and value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise ValueError("it holds a tensor that is larger than what is stored of it")
        left.extend((other, depth + 1) for other in inside)
