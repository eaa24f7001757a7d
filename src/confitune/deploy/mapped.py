"""The tensors of a safetensors file as views of the file, which is mapped and not read.

safetensors' own `safe_open` maps a file as well, but takes six times as long for the hundreds of small tensors of a
task, and that is what a predictor waits for when a task is not ready. The format: eight bytes with the length of a JSON
header, the header, then the tensors' bytes; the header gives dtype, shape and place of each.
"""

from __future__ import annotations

import json
import mmap
from pathlib import Path

import torch
from torch import Tensor

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def mapped_tensors(path: Path) -> dict[str, Tensor]:
    """Name -> tensor; what is written to one stays in this process. A file of another format raises some error."""
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {name: _view(data, start, **entry) for name, entry in header.items()}


def _view(data: mmap.mmap, start: int, dtype: str, shape: list[int], data_offsets: list[int]) -> Tensor:
    kind, (first, last) = _DTYPES[dtype], data_offsets
    if first == last:
        return torch.empty(0, dtype=kind).view(shape)
    if first < 0 or (last - first) % kind.itemsize:
        raise ValueError(f"a tensor of {dtype} cannot be bytes {first} to {last}")
    return torch.frombuffer(data, dtype=kind, count=(last - first) // kind.itemsize, offset=start + first).view(shape)
