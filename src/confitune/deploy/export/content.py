"""What goes into an exported file, whatever its format: the network of one or many tasks, and how to use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from confitune import __version__
from confitune.deploy.folding import example_images, folded
from confitune.errors import ConfituneError
from confitune.nn import ContinualNet
from confitune.nn.geometry import Size
from confitune.tasks import Preprocess

Steps = Sequence[tuple[str, int]]  # ("resize", short side), ("crop", centre square); bilinear, as Pillow does it
Factors = tuple[Tensor, ...]  # of a change of a weight: B [O, r] and A [r, I], or B, channels [r, I] and windows [r, K]


@dataclass(frozen=True)
class Own:
    """What a task has in place of the first one's tensors, by their names in the backbone, and its head."""

    tensors: Mapping[str, Tensor]
    changes: Mapping[str, Factors]
    head: nn.Linear

    def same_backbone(self, other: Own) -> bool:
        """Whether two tasks differ in their heads alone."""
        if self.tensors.keys() != other.tensors.keys() or self.changes.keys() != other.changes.keys():
            return False
        mine, theirs = (
            [*own.tensors.values(), *(f for factors in own.changes.values() for f in factors)] for own in (self, other)
        )
        return all(map(torch.equal, mine, theirs))


@dataclass(frozen=True)
class Content:
    """One task, or all of them for a file that is told which.

    Attributes:
        module: the first task's network, images to logits, of stock layers alone.
        example: a batch of its input.
        facts: how to use the file, for its metadata; JSON can hold them.
        tasks: of a file of several tasks, what each has of its own.
    """

    module: nn.Module
    example: Tensor
    facts: Mapping[str, Any]
    tasks: Sequence[Own] = ()


def content_of(
    net: ContinualNet,
    tasks: Sequence[str],
    size: int | Size,
    preprocess: Preprocess | None,
    cut: Steps,
    version: str | None,
    several: bool,
) -> Content:
    """What to write of these tasks."""
    plane = (size, size) if isinstance(size, int) else (size[0], size[1])
    for task in tasks:
        net.task_state_dict(task)  # or an error that names those there are
        if any(part.input_means for part in net.parts.values()) and net.tasks[task].finished:
            _require_size(task, net.tasks[task].image_size, plane)
    module = folded(net, tasks[0])
    example = example_images(module.get_submodule("backbone"), plane)
    if example is None or example.dim() != 4:
        name = type(net.backbone).__name__
        raise ConfituneError(f"{name} does not run on images of {plane}: pass the size it was made for")
    facts: dict[str, Any] = {
        "confitune": __version__,
        "tasks": [{"name": task, "classes": list(net.tasks[task].classes)} for task in tasks],
        "size": plane,
    }
    if version is not None:
        facts["version"] = version
    if preprocess is not None:
        own = [("resize", preprocess.resize), ("crop", preprocess.crop)]
        facts["steps"] = [*cut, *((step, side) for step, side in own if side is not None)]
        facts |= {"mean": preprocess.mean, "std": preprocess.std}
    if not several:
        return Content(module, example, facts)
    shared = _without_changes(net, tasks[0], module)
    found = [_own(net, task, shared) for task in tasks]
    with torch.no_grad():
        module.get_submodule("backbone").load_state_dict(shared)
    return Content(module, example, facts, found)


def _require_size(task: str, trained: Size | None, plane: Size) -> None:
    if trained not in (None, plane):
        raise ConfituneError(
            f"task {task!r} was trained on images of {trained}, and its recovered means hold for that size alone: "
            f"export it with size={trained}, not {plane}"
        )


def _changes(net: ContinualNet, task: str) -> dict[str, Factors]:
    state = net.task_state_dict(task)
    layers = [key.removesuffix(".delta.b") for key in state if key.endswith(".delta.b")]
    factors = {layer: [state.get(f"{layer}.delta.{key}") for key in ("b", "a", "window")] for layer in layers}
    return {f"{layer}.weight": tuple(f.cpu() for f in found if f is not None) for layer, found in factors.items()}


def _without_changes(net: ContinualNet, task: str, module: nn.Module) -> dict[str, Tensor]:
    """The tensors of a task's backbone with the weights that all tasks share."""
    plain = {name: weight.detach().cpu() for name, weight in net.backbone.named_parameters()}
    changed = _changes(net, task)
    state = module.get_submodule("backbone").state_dict()
    return {name: (plain[name] if name in changed else tensor).clone() for name, tensor in state.items()}


def _own(net: ContinualNet, task: str, shared: Mapping[str, Tensor]) -> Own:
    module, changes = folded(net, task), _changes(net, task)
    state = module.get_submodule("backbone").state_dict()
    tensors = {
        name: tensor for name, tensor in state.items() if name not in changes and not torch.equal(tensor, shared[name])
    }
    head = module.get_submodule("head")
    assert isinstance(head, nn.Linear)
    return Own(tensors, changes, head)
