"""From a bundle's files to a network with tasks.

A bundle may come from anyone: what its files declare is checked before memory is taken for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from confitune.deploy.format import BundleError, Network
from confitune.nn import ContinualNet, build_model, headless, without_memory

_INSIDE = 2  # times the image's size: what a layer may read, some networks pad their images


def new_network(network: Network, backbone: nn.Module) -> ContinualNet:
    """The network that a bundle describes, around a backbone of its model, without tasks."""
    return network.learner().network(backbone)


def load_network(network: Network, shared: Mapping[str, Tensor], size: int) -> ContinualNet:
    """The network with what all tasks share, from a file of `size` bytes; it is not built if those cannot hold it."""
    _require_room(network.model, size)
    net = new_network(network, build_model(network.model))
    net.load_shared_state_dict(shared)
    return net


def load_pretrained(network: Network, state: Mapping[str, Tensor], size: int) -> nn.Module:
    """The network that a bundle started from, without a classifier, from a file of `size` bytes."""
    _require_room(network.model, size)
    net = headless(build_model(network.model))
    own = {key: tensor for key, tensor in net.state_dict().items() if not key.endswith("num_batches_tracked")}
    if own.keys() != state.keys() or any(tensor.shape != state[key].shape for key, tensor in own.items()):
        raise BundleError(f"these are not the weights of {network.model}")
    net.load_state_dict(state, strict=False)
    return net.eval()


def _require_room(model: str, size: int) -> None:
    needed = _least_bytes(model, size)
    if needed > size:
        raise BundleError(f"{size} bytes cannot be the weights of {model}: they take {needed}")


def _least_bytes(model: str, size: int) -> int:
    """What the weights of a network take that no task can own: all but scales and shifts of norms."""
    empty = without_memory(model, size)
    with next(empty.parameters()).device:  # a torchvision network is traced
        weights = [weight for weight in headless(empty).parameters() if weight.dim() > 1]
    return sum(weight.nbytes for weight in weights)


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
    planes = [tensor for key, tensor in state.items() if key.endswith(".input_size") and tensor.shape == (3,)]
    for plane in planes:
        least, most = plane[:2].double().aminmax()  # whatever kind of numbers they are
        if least < 0 or most > _INSIDE * size:
            raise BundleError(f"it says that a layer reads planes which no image of {size} pixels leads to")
