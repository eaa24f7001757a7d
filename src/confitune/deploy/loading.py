"""From a bundle's files to a network with tasks.

A bundle may come from anyone: what its files declare is checked before memory is taken for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from confitune.deploy.format import BundleError, Network
from confitune.nn import ContinualNet, build_model, without_memory

_INSIDE = 2  # times the image's size: what a layer may read, some networks pad their images
_MOST_IMAGES = 2**40  # that anything was measured on


def new_network(network: Network, backbone: nn.Module) -> ContinualNet:
    """The network that a bundle describes, around a backbone of its model, without tasks."""
    return ContinualNet(backbone, **network.options)


def load_network(network: Network, shared: Mapping[str, Tensor], size: int) -> ContinualNet:
    """The network with what all tasks share, from a file of `size` bytes; it is not built if those cannot hold it."""
    convs = (weight for weight in without_memory(network.model).parameters() if weight.dim() == 4)
    needed = sum(weight.numel() * weight.element_size() for weight in convs)
    if needed > size:
        raise BundleError(f"{size} bytes cannot be the weights of {network.model}: its convolutions take {needed}")
    check_shared(shared, network.size)
    net = new_network(network, build_model(network.model))
    net.load_shared_state_dict(shared)
    return net


def load_task(net: ContinualNet, task: str, state: Mapping[str, Tensor], classes: Sequence[str], size: int) -> None:
    """Put a task's state into the network and make it current.

    A state with other tensors than the network keeps is refused before any is copied.
    """
    check_declared(state, size)
    net.load_task_state_dict(task, state, classes)


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
    flag = state.get("pretrained", torch.tensor(True))
    if flag.dtype != torch.bool or flag.shape != () or not flag:
        raise BundleError("it does not say clearly whether its task shares the state of pre-training")
    if "pretrained" in state and sizes:
        raise BundleError(f"its task shares the state of pre-training, and yet it has {min(sizes)} of its own")
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


def _check_planes(planes: list[Tensor], size: int) -> None:
    for plane in planes:
        least, most = plane.double().aminmax()  # whatever kind of numbers they are
        if least < 0 or most > _INSIDE * size:
            raise BundleError(f"it says that a layer reads planes which no image of {size} pixels leads to")


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
