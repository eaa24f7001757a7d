"""An estimate of the fastest that a training step could be: operations and bytes against what a device can do."""

from __future__ import annotations

from dataclasses import dataclass

from show_tables import STAGES, Numbers, count, table


@dataclass(frozen=True)
class Device:
    """What a device can do at most, by its maker's data sheet: bf16 operations (dense) and bytes a second."""

    flops: float
    bandwidth: float


@dataclass(frozen=True)
class Work:
    """What a network needs for one image: operations forward, those of its first convolution, numbers that its
    convolutions write. A product and its sum are two operations."""

    forward: float
    first: float
    activations: float

    def flops(self, stage: str) -> float:
        """Gradients of inputs cost as much as forward, those of weights too; the image itself needs no gradient."""
        inputs = self.forward - self.first
        return self.forward + {"head": 0.0, "head+norm": inputs, "all": inputs + self.forward}[stage]

    def bytes(self, stage: str) -> float:
        """In bf16, with batch norm and ReLU done together, each tensor going to memory and back between kernels."""
        return 2 * PASSES[stage] * self.activations


DEVICES = {"NVIDIA H200": Device(flops=989e12, bandwidth=4.8e12)}
WORK = {("resnet18", 224): Work(forward=3.627e9, first=0.236e9, activations=2.484e6)}
# How often a training step goes over the activations. Forward 5: a convolution writes, batch norm reads for its
# moments, reads again and writes, the next convolution reads. Backward 7 more: batch norm reads two tensors for its
# sums, both again, and writes; the gradient of a convolution's input reads and writes. Gradients of weights: 2 reads.
PASSES = {"head": 5, "head+norm": 12, "all": 14}


def floor_table(numbers: Numbers) -> str:
    device = DEVICES.get(numbers["device"])
    work = WORK.get((numbers["model"].split(".")[0], numbers["pixels"]))
    if device is None or work is None:
        return f"No estimate: this page states no peak of {numbers['device']} or no count of {numbers['model']}.\n"
    rows = []
    for stage, name in STAGES.items():
        by_flops, by_bytes = device.flops / work.flops(stage), device.bandwidth / work.bytes(stage)
        measured = [
            step
            for step in numbers["steps"]
            if (step["stage"], step["norm"]) == (stage, "silent") and step["execution"].startswith("bf16")
        ]
        best = max(measured, key=lambda step: step["images_per_second"], default=None)
        cells = ["-", "-"]
        if best:
            speed = best["images_per_second"]
            share = speed / min(by_flops, by_bytes)
            cells = [f"{count(speed)} ({best['execution']}, batch {best['batch_size']})", f"{100 * share:.0f}%"]
        needs = [f"{work.flops(stage) / 1e9:.1f}", f"{work.bytes(stage) / 1e6:.0f}"]
        rows.append([name, *needs, count(by_flops), count(by_bytes), *cells])
    head = ["trains", "GFLOP an image", "MB an image", "images/s by arithmetic", "images/s by memory"]
    return table([*head, "best measured, images/s", "share of the lower"], rows)


def about_floor(numbers: Numbers) -> str:
    device = DEVICES.get(numbers["device"])
    peak = f", {device.flops / 1e12:,.0f} TFLOP/s in bf16 and {device.bandwidth / 1e12:.1f} TB/s" if device else ""
    return f"{numbers['model']}, {numbers['pixels']} pixels{peak}"
