"""What an epoch measured, read from the device without making it wait."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
from torch import Tensor


class EpochReadings:
    """Loss and right answers of every step, and whether the weights are still finite at the end.

    They can be read once `copied` has passed: when the device has done all steps and its numbers are here.

    Attributes:
        loss: mean over the steps.
        right: how many images were answered rightly.
        first_bad_step: the first step (from 0) whose loss was not finite.
        weights_finite: whether every weight was finite at the end.
        seconds: from the first step's start to the last one's end, where the work was done.
    """

    def __init__(self, steps: int, device: torch.device) -> None:
        self._steps = steps
        self.images = 0
        self._on_device = torch.zeros(steps + 1, 2, device=device)
        self._began = Moment(device)

    def put(self, step: int, outcome: Tensor, images: int) -> None:
        """What the step gave, and of how many images."""
        self.images += images
        self._on_device[step].copy_(outcome)

    def close(self, weights: Iterable[Tensor]) -> None:
        """The epoch's last step is on its way: start reading."""
        device = self._on_device.device
        largest = torch._foreach_norm([weight.detach() for weight in weights], float("inf"))
        # The loss cannot show what the last step did to the weights.
        self._on_device[self._steps, 0] = torch.stack(largest).isfinite().all()
        self._ended = Moment(device)
        self._read = self._on_device
        if device.type == "cuda":
            self._read = torch.empty(self._on_device.shape, pin_memory=True)
            self._read.copy_(self._on_device, non_blocking=True)
        self.copied = Moment(device)

    def read(self) -> None:
        """Wait for the numbers, and take them."""
        self.copied.wait()
        losses, right = self._read[: self._steps].T
        self.loss = losses.double().mean().item()
        self.right = int(right.double().sum().item())
        bad = (~losses.isfinite()).nonzero()
        self.first_bad_step = int(bad[0]) if len(bad) else None
        self.weights_finite = bool(self._read[self._steps, 0] == 1)
        self.seconds = self._began.until(self._ended)


class Moment:
    """When a device has done what was launched so far."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._clock = time.perf_counter()
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def passed(self) -> bool:
        return self._event is None or bool(self._event.query())

    def until(self, later: Moment) -> float:
        """Seconds between both."""
        if self._event is not None and later._event is not None:
            return float(self._event.elapsed_time(later._event)) / 1000
        return later._clock - self._clock
