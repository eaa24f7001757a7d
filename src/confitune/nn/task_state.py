"""Task state in and out of the memory: one task as named tensors, or everything for a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from confitune.errors import ConfituneError
from confitune.nn.geometry import Size
from confitune.nn.memory import Layout, TaskEntry, TaskMemory


def task_to_state(memory: TaskMemory, entry: TaskEntry) -> dict[str, Tensor]:
    """A task as named tensors; sizes that statistics were measured at come along as small integer tensors.

    One that shares the pre-trained state has none: it says so by a tensor named 'pretrained'.
    """
    state = {key: part.clone() for key, part in memory.named_parts(entry).items()}
    if entry.pretrained:
        state["pretrained"] = torch.tensor(True)
    else:
        for conv, size, batches in zip(memory.statistics, entry.sizes, entry.batches, strict=True):
            state[f"{conv}.input_size"] = torch.tensor([*(size or (0, 0)), batches])
    state["image_size"] = torch.tensor(entry.image_size or (0, 0))
    state["finished"] = torch.tensor(entry.finished)
    return state


def task_from_state(
    memory: TaskMemory, name: str, state: Mapping[str, Tensor], classes: Sequence[str], features: int, like: Tensor
) -> TaskEntry:
    """The entry for a task's named tensors, checked against what this network keeps."""
    finished, pretrained = ("finished" in state and bool(state["finished"].all())), "pretrained" in state
    if pretrained and memory.pretrained is None:
        raise ConfituneError(f"task {name!r} shares the pre-trained state, which this network does not keep")
    layout: Layout | None = None if pretrained else "finished" if finished else "unfinished"
    expected = memory.shapes(layout, len(classes), features)
    sized = [] if pretrained else list(memory.statistics)
    extra = {f"{conv}.input_size": (3,) for conv in sized} | {"image_size": (2,), "finished": ()}
    for key, shape in (expected | extra).items():
        if key not in state or tuple(state[key].shape) != shape:
            got = f"of shape {tuple(state[key].shape)}" if key in state else "missing"
            raise ConfituneError(
                f"task {name!r}: {key} must have shape {shape} and is {got}; is it the task of another network, or of "
                "one with other means?"
            )
    for key in extra:
        values = state[key]
        if values.is_floating_point() or values.is_complex() or not bool((values.long() >= 0).all()):
            raise ConfituneError(f"task {name!r}: {key} must hold whole numbers from 0 on and holds {values.tolist()}")
    if pretrained and not finished:
        raise ConfituneError(f"task {name!r} shares the pre-trained state and says that it is not finished")
    triples = [state[f"{conv}.input_size"].tolist() for conv in sized]
    height, width = state["image_size"].tolist()
    return TaskEntry(
        classes=tuple(classes),
        row=torch.cat([state[key].reshape(-1).to(like) for key in expected]),
        finished=finished,
        pretrained=pretrained,
        image_size=(height, width) if height else None,
        sizes=tuple((h, w) if h else None for h, w, _ in triples),
        batches=tuple(batches for _, _, batches in triples),
    )


def memory_to_state(memory: TaskMemory, current: str | None, image_size: Size | None) -> dict[str, Any]:
    """All rows and the live statistics; what else is live is in the network's own tensors."""
    return {
        "current": current,
        "image_size": image_size,
        "tasks": {name: dict(vars(entry)) for name, entry in memory.tasks.items()},
        "live": [statistics.live_state() for statistics in memory.statistics.values()],
    }


@torch.no_grad()
def memory_from_state(memory: TaskMemory, state: Mapping[str, Any], like: Tensor) -> None:
    """Put back what `memory_to_state` took."""
    shapes = [[table.shape for table in statistics._tables] for statistics in memory.statistics.values()]
    if [[table.shape for table in live["tables"]] for live in state["live"]] != shapes:
        raise ConfituneError("the state's input statistics belong to other layers: is it the state of another network?")
    memory.tasks.clear()
    for name, values in state["tasks"].items():
        memory.tasks[name] = TaskEntry(**{**values, "row": values["row"].to(like.device, copy=True)})
    for statistics, live in zip(memory.statistics.values(), state["live"], strict=True):
        statistics.load_live_state(live)
