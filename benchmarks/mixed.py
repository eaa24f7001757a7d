"""What a batch costs whose images belong to different tasks, against a batch of one task, in the same run.

    python benchmarks/mixed.py                        # a minute on 2 cores
    python benchmarks/mixed.py --model resnet18 --device cuda

The network takes a mixed batch task by task: it makes the task's own parts live, ready under the weights of today, and
sends the task's images through. On a GPU that are many small launches.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from report import write_report
from step import synchronize

from confitune.engine import TrainSettings
from confitune.methods import create_method
from confitune.nn import create_backbone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tf_efficientnet_lite0")
    parser.add_argument("--method", default="confit", help="whose parts tasks own")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("mixed.json"))
    options = parser.parse_args()
    device = TrainSettings(device=options.device).torch_device()
    backbone = create_backbone(options.model, "none")  # speed does not depend on weights
    net = create_method(options.method).network(backbone.module).to(device)
    generator = torch.Generator().manual_seed(0)
    for number in range(options.tasks):
        net.add_task(f"task{number + 1}", options.classes, generator)
        net.train()
        with torch.no_grad():
            net(torch.randn(4, 3, options.pixels, options.pixels, generator=generator).to(device) + number)
            for parameter in net.parts["deltas"].parameters() if "deltas" in net.parts else ():
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator).to(device))
        net.finish_task()
    net.to(memory_format=torch.channels_last).eval()
    shape = (options.batch_size, 3, options.pixels, options.pixels)
    x = torch.randn(shape, generator=generator).to(device, memory_format=torch.channels_last)
    index = (torch.arange(options.batch_size) % options.tasks).to(device)

    def seconds(task: torch.Tensor | str) -> float:
        synchronize(device)
        began = time.perf_counter()
        with torch.no_grad():
            net(x, task)
        synchronize(device)
        return time.perf_counter() - began

    for task in ("task1", index):  # means recovered, libraries warm
        seconds(task)
    single, mixed = [], []
    for _ in range(options.repeats):  # in turns, so that whatever else the machine does meets both
        single.append(seconds("task1"))
        mixed.append(seconds(index))
    ratio = statistics.median(m / s for s, m in zip(single, mixed, strict=True))
    print(
        f"{options.model}, {options.batch_size} images of {options.pixels} pixels: one task "
        f"{1000 * statistics.median(single):.1f} ms, {options.tasks} tasks {1000 * statistics.median(mixed):.1f} ms, "
        f"{ratio:.2f} times"
    )
    numbers = {
        "model": options.model,
        "method": options.method,
        "pixels": options.pixels,
        "batch_size": options.batch_size,
        "tasks": options.tasks,
        "single_seconds": single,
        "mixed_seconds": mixed,
        "ratio": ratio,
    }
    write_report(options.out, device, backbone.weights_sha256, numbers)


if __name__ == "__main__":
    main()
