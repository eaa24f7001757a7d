"""How time and memory grow with the number of tasks.

    python benchmarks/tasks.py                                                       # 200 tasks on a GPU
    python benchmarks/tasks.py --device cpu --tasks 20 --pixels 32 --images 32

Trains task after task on random images with ConFiT; evaluation of old tasks, whose number grows by nature, is left out.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from report import write_report
from step import random_task, synchronize

from confitune.engine import Executor, TaskFit, TrainSettings
from confitune.methods import create_method
from confitune.nn import create_backbone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--weights", default="none", help="speed does not depend on them")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--images", type=int, default=320, help="a task")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("tasks.json"))
    options = parser.parse_args()
    settings = TrainSettings(device=options.device, epochs=options.epochs, batch_size=options.batch_size)
    device = settings.torch_device()
    backbone = create_backbone(options.model, options.weights)
    task = random_task(options.images, options, device)
    method = create_method("confit")
    net = method.network(backbone.module)
    executor = Executor(net, settings)
    points: list[dict[str, Any]] = []
    for index in range(options.tasks):
        named = replace(task, name=f"task{index + 1}")
        synchronize(device)
        began = time.perf_counter()
        with executor.session():
            TaskFit(executor, named, method).fit()
        synchronize(device)
        points.append(
            {
                "tasks": index + 1,
                "seconds": time.perf_counter() - began,
                "memory_bytes": memory_in_use(device),
                "stored_bytes": sum(entry.row.nbytes for entry in net.tasks.values()),
            }
        )
        if (index + 1) % 10 == 0:
            last = points[-10:]
            print(
                f"{index + 1:4} tasks  {statistics.median(p['seconds'] for p in last):7.3f} s a task"
                f"  {last[-1]['memory_bytes'] / 2**20:9,.0f} MiB in use"
                f"  {last[-1]['stored_bytes'] / 2**20:7.1f} MiB of task states",
                flush=True,
            )
    early, late = points[1:11], points[-10:]
    numbers = {
        "ratio_of_time": median(late, "seconds") / median(early, "seconds"),
        "ratio_of_memory": median(late, "memory_bytes") / median(early, "memory_bytes"),
        "bytes_a_task": points[-1]["stored_bytes"] / len(points),
        "model": options.model,
        "images_a_task": options.images,
        "epochs": settings.epochs,
        "batch_size": settings.batch_size,
        "execution": settings.execution(device),
        "points": points,
    }
    write_report(options.out, device, backbone.weights_sha256, numbers)
    print(
        f"the last ten of {options.tasks} tasks against tasks 2 to 11: {numbers['ratio_of_time']:.2f} times as long, "
        f"{numbers['ratio_of_memory']:.2f} times the memory; written to {options.out}"
    )


def memory_in_use(device: torch.device) -> int:
    """On a GPU what torch holds there, else the most that the process held so far."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def median(points: list[dict[str, Any]], key: str) -> float:
    return statistics.median(point[key] for point in points)


if __name__ == "__main__":
    main()
