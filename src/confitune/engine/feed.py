"""Where pixels lie while a network is trained, and how they reach it batch by batch."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from confitune.tasks import Images, Task, TaskSequence

Where = Literal["auto", "device", "host"]

_SHARE_OF_FREE_MEMORY = 0.5  # the rest is for the network, its activations, and whoever else uses the GPU
_AHEAD = 3  # batches on their way while one is trained on
_CHUNK = 1024  # images copied to the device at a time


def place(sequence: TaskSequence, device: torch.device, where: Where = "auto") -> TaskSequence:
    """The same tasks with their pixels on a GPU, each image once, where they fit; else as they are, to be streamed.

    What the CPU trains on stays in the store, mapped into memory.
    """
    if device.type == "cpu" or where == "host":
        return sequence
    splits = [images for task in sequence for images in (task.train, task.test)]
    blocks = {id(images.pixels): images.pixels for images in splits if images.pixels.device.type == "cpu"}
    if not blocks:
        return sequence
    rows = {key: _rows_in_use(splits, block) for key, block in blocks.items()}
    needed = sum(len(rows[key]) * block[0].numel() * block.element_size() for key, block in blocks.items())
    if where == "auto" and needed > _SHARE_OF_FREE_MEMORY * torch.cuda.mem_get_info(device)[0]:
        return sequence
    gathered = {key: _gathered(block, rows[key], device) for key, block in blocks.items()}

    def on_device(images: Images) -> Images:
        key = id(images.pixels)
        return _moved(images, rows[key], gathered[key]) if key in gathered else images

    tasks = tuple(replace(task, train=on_device(task.train), test=on_device(task.test)) for task in sequence)
    torch.cuda.synchronize(device)  # whatever stream they are used on
    return replace(sequence, tasks=tasks)


def place_task(task: Task, device: torch.device, where: Where = "auto") -> Task:
    """The same for a task that stands alone."""
    return place(TaskSequence(task.name, "own", (task,)), device, where)[0]


def batches(
    images: Images, size: int, device: torch.device, order: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Stored pixels and labels on the device, in batches of `size`, in `order` (default: as stored), the rest included.

    Pixels that are elsewhere are gathered and copied while earlier batches are worked on.
    """
    order = torch.arange(len(images)) if order is None else order
    if not len(order):
        return
    if images.pixels.device.type == device.type:
        for positions in to_device(order, device).split(size):
            yield images.batch(positions)
    else:
        yield from _streamed(images, order.split(size), device)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device that nobody waits for."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _streamed(images: Images, parts: Sequence[Tensor], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    copying = torch.cuda.Stream(device)
    labels = images.labels.to(device)
    most = max(map(len, parts))
    slots = [torch.empty(most, *images.pixels.shape[1:], dtype=images.pixels.dtype).pin_memory() for _ in range(_AHEAD)]
    copied: list[torch.cuda.Event | None] = [None] * _AHEAD

    def load(number: int) -> tuple[Tensor, Tensor, torch.cuda.Event]:
        slot, positions = number % _AHEAD, parts[number]
        earlier = copied[slot]
        if earlier is not None:
            earlier.synchronize()
        pinned = slots[slot][: len(positions)]
        torch.index_select(images.pixels, 0, images.rows[positions], out=pinned)
        with torch.cuda.stream(copying):
            pixels = pinned.to(device, non_blocking=True)
            chosen = labels[positions.to(device)]
            done = copied[slot] = torch.cuda.Event()
            done.record(copying)
        return pixels, chosen, done

    copying.wait_stream(torch.cuda.current_stream(device))
    with ThreadPoolExecutor(1) as worker:
        under_way: deque[Future[tuple[Tensor, Tensor, torch.cuda.Event]]] = deque()
        for number in range(len(parts) + _AHEAD):
            if number < len(parts):
                under_way.append(worker.submit(load, number))
            if number >= _AHEAD:
                pixels, chosen, done = under_way.popleft().result()
                training = torch.cuda.current_stream(device)
                training.wait_event(done)
                for tensor in (pixels, chosen):
                    tensor.record_stream(training)
                yield pixels, chosen


def _rows_in_use(splits: Sequence[Images], block: Tensor) -> Tensor:
    used: Tensor = torch.cat([images.rows.cpu() for images in splits if images.pixels is block]).unique()
    return used


def _moved(images: Images, rows: Tensor, gathered: Tensor) -> Images:
    places = torch.searchsorted(rows, images.rows.cpu())
    return Images(gathered, places.to(gathered.device), images.labels.to(gathered.device))


def _gathered(block: Tensor, rows: Tensor, device: torch.device) -> Tensor:
    # Channels last, as networks take them: what is gathered from it then is, too.
    shape = (len(rows), *block.shape[1:])
    gathered = torch.empty(shape, dtype=block.dtype, device=device, memory_format=torch.channels_last)
    for part, target in zip(rows.split(_CHUNK), gathered.split(_CHUNK), strict=True):
        target.copy_(block[part])
    return gathered
