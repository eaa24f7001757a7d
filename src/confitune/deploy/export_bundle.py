"""A bundle's task as a file for another runtime, compared with the bundle before it is called good."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from confitune.deploy.bundle import Bundle
from confitune.deploy.export import check_export, export_onnx, export_torch
from confitune.deploy.format import BundleError
from confitune.deploy.held_out import decode_kept
from confitune.deploy.predictor import Predictor
from confitune.tasks import CROP

_ENDINGS = {"onnx": ".onnx", "torch-export": ".pt2"}
_COMPARED = 10  # images


def export_bundle(path: Path, task: str, to: str = "onnx", out: Path | None = None) -> tuple[Path, float]:
    """Write one task of the bundle in `path`; the file, and its largest difference to the bundle's logits.

    Args:
        to: 'onnx' or 'torch-export'.
        out: the file; default: the task's name in the current folder.
    """
    if to not in _ENDINGS:
        raise BundleError(f"cannot export to {to!r}: there are {', '.join(_ENDINGS)}")
    bundle = Bundle.open(path)
    record = bundle.record(task)
    predictor = Predictor(bundle, device="cpu")
    net = predictor.network_for(task)
    out = out or Path(re.sub(r"[^\w-]+", "_", task) + _ENDINGS[to])
    write = export_onnx if to == "onnx" else export_torch
    write(net, task, out, size=bundle.network.size, classes=record.classes, preprocess=predictor.preprocess)
    images = predictor.preprocess(_some_images(bundle, task))
    return out, check_export(out, net, task, images.contiguous())


def _some_images(bundle: Bundle, task: str) -> Tensor:
    kept = bundle.held_out(task)
    if kept is not None and len(kept["labels"]):
        return torch.stack(decode_kept(kept, task)[:_COMPARED])
    chance = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (_COMPARED, 3, CROP, CROP), dtype=torch.uint8, generator=chance)
