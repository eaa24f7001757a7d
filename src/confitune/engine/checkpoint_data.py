"""A checkpoint's bytes: what is in them is looked through before torch makes tensors of it.

`torch.load` runs nothing from a file when asked so, but takes what memory the file asks for. Here no more than the
file's own size comes out of it: nothing in it is compressed, only tensors and plain values are built, and no value
stands for many by being referred to again and again.
"""

from __future__ import annotations

import io
import pickletools
import re
import zipfile
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_BUILT = re.compile(r"torch \w+Storage|torch\._utils _rebuild_tensor_v2|collections OrderedDict")
_MOST_VALUES = 2_000_000  # each tensor, number, text, list or mapping is one
_MOST_DEEP = 50


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
