"""What a task's file declares, checked before memory is taken for it: a bundle may come from anyone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from confitune.deploy.format import BundleError

_INSIDE = 2  # times the image's size: what a layer may read, some networks pad their images


def check_declared(state: Mapping[str, Tensor], size: int) -> None:
    """Refuse a task that was not finished, and sizes that no image of `size` pixels leads to: planes are made of them.

    >>> check_declared({"finished": torch.tensor(True), "image_size": torch.tensor([64, 64])}, 32)
    Traceback (most recent call last):
    confitune.deploy.format.BundleError: it says that it was learned from images of [64, 64] pixels, not 32
    """
    finished, image = state.get("finished", torch.zeros(0)), state.get("image_size", torch.zeros(0))
    if finished.shape != () or not finished:
        raise BundleError("it does not say that its task was finished")
    if image.shape != (2,) or image.tolist() != [size, size]:
        said = image.tolist() if image.numel() < 5 else "very many"
        raise BundleError(f"it says that it was learned from images of {said} pixels, not {size}")
    planes = [tensor[:2] for key, tensor in state.items() if key.endswith(".input_size") and tensor.shape == (3,)]
    least, most = torch.stack([*planes, image]).aminmax()
    if least < 0 or most > _INSIDE * size:
        raise BundleError(f"it says that a layer reads planes which no image of {size} pixels leads to")
