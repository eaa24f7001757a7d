"""What a bundle's files declare, checked before memory is taken for it: a bundle may come from anyone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from confitune.deploy.format import BundleError

_INSIDE = 2  # times the image's size: what a layer may read, some networks pad their images
_MOST_IMAGES = 2**40  # that anything was measured on


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
    sizes = {key: tensor for key, tensor in state.items() if key.endswith(".input_size")}
    if "pretrained" in state:
        _check_pretrained(state["pretrained"], sizes)
    _check_planes([tensor[:2] for tensor in sizes.values() if tensor.shape == (3,)], size)


def check_shared(state: Mapping[str, Tensor], size: int) -> None:
    """Refuse a backbone whose state of pre-training has sizes that no image of `size` pixels leads to.

    >>> check_shared({"pretrained.images": torch.tensor(-1)}, 32)
    Traceback (most recent call last):
    confitune.deploy.format.BundleError: it says that its state of pre-training was measured on -1 images
    """
    kept = {key: tensor for key, tensor in state.items() if key.startswith("pretrained.")}
    planes = [tensor for key, tensor in kept.items() if key.endswith(".input_size")]
    if any(plane.shape != (2,) or not _is_whole(plane) for plane in planes):
        raise BundleError("it says nothing that can be understood of the planes that its layers read")
    _check_planes(planes, size)
    images = kept.get("pretrained.images", torch.tensor(0))
    if images.shape != () or not _is_whole(images) or not 0 <= int(images) <= _MOST_IMAGES:
        said = images.tolist() if images.numel() < 5 else "very many numbers of"
        raise BundleError(f"it says that its state of pre-training was measured on {said} images")


def _check_pretrained(flag: Tensor, sizes: Mapping[str, Tensor]) -> None:
    if flag.dtype != torch.bool or flag.shape != () or not flag:
        raise BundleError("it does not say clearly whether its task shares the state of pre-training")
    if sizes:
        raise BundleError(f"its task shares the state of pre-training, and yet it has {min(sizes)} of its own")


def _check_planes(planes: list[Tensor], size: int) -> None:
    for plane in planes:
        least, most = plane.double().aminmax()  # whatever kind of numbers they are
        if least < 0 or most > _INSIDE * size:
            raise BundleError(f"it says that a layer reads planes which no image of {size} pixels leads to")


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
