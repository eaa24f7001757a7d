"""What a step and a whole task cost with each comparison method, against fine-tuning in the same run.

    python benchmarks/methods.py                                                     # on a GPU: two minutes
    python benchmarks/methods.py --device cpu --pixels 32 --images 64 --repeats 1

Each method learns tasks of random images one after the other; the first, in which nothing pulls yet and steps are
captured, is left out.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from report import write_report
from step import Speeds, random_task, synchronize

from confitune.engine import Executor, TaskFit, TrainSettings
from confitune.methods import create_method
from confitune.nn import create_backbone

METHODS = ("finetune", "ewc", "si", "rwalk", "mas", "mas-cpr", "mas-afec", "confit", "best")
# A task that gets a head alone would take no time.
ALWAYS_TRAINED = {"best": {"owns": "moments"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--weights", default="none", help="speed does not depend on them")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--method", nargs="+", default=list(METHODS))
    parser.add_argument("--images", type=int, default=640, help="a task, as in Flowers102")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=4, help="tasks measured; the median is taken")
    parser.add_argument("--out", type=Path, default=Path("methods.json"))
    options = parser.parse_args()
    settings = TrainSettings(device=options.device, epochs=options.epochs, batch_size=options.batch_size, lr=1e-4)
    device = settings.torch_device()
    backbone = create_backbone(options.model, options.weights)
    task = random_task(options.images, options, device)
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys(["finetune", *options.method]):
        method = create_method(name, ALWAYS_TRAINED)
        speeds, seconds = Speeds(), []
        executor = Executor(method.network(copy.deepcopy(backbone.module)), settings, speeds)
        for index in range(options.repeats + 2):  # two more: without a pull, and captured with it
            speeds.speeds.clear()
            synchronize(device)
            began = time.perf_counter()
            with executor.session():
                named = replace(task, name=f"task{index + 1}")
                TaskFit(executor, named, method).fit()
            synchronize(device)
            seconds.append(time.perf_counter() - began)
        row = {
            "method": name,
            "images_per_second": statistics.median(speeds.speeds),
            "task_seconds": statistics.median(seconds[2:]),
        }
        base = rows[0] if rows else row
        row["step_cost"] = base["images_per_second"] / row["images_per_second"]
        row["task_cost"] = row["task_seconds"] / base["task_seconds"]
        rows.append(row)
        print(
            f"{name:10} {row['images_per_second']:9,.0f} images/s, a step {row['step_cost']:.2f} times fine-tuning's;"
            f" a task {row['task_seconds']:.3f} s, {row['task_cost']:.2f} times",
            flush=True,
        )
    numbers = {
        "model": options.model,
        "images_a_task": options.images,
        "epochs": settings.epochs,
        "batch_size": settings.batch_size,
        "pixels": options.pixels,
        "execution": settings.execution(device),
        "methods": rows,
    }
    write_report(options.out, device, backbone.weights_sha256, numbers)
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
