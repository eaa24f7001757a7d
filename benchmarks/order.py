"""What `best` makes of tasks that are unlike one another, in two orders, beside each task learned first.

    python benchmarks/order.py --data-dir data      # photos, three tasks of Flowers102 as published, digits

A task may start from the one before it, so what it gets can depend on the order. Prints each task's accuracy alone,
and its accuracy after the last task in the order given and in the reverse, as means over seeds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from own_photos import Scores, learned
from report import write_report

from confitune.engine import place
from confitune.nn import Backbone, create_backbone
from confitune.settings import TrainSettings
from confitune.tasks import Task, TaskSequence, load_tasks

PARTS = (("photos:1", "clean"), ("flowers102:1-3", "published"), ("digits:1", "clean"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--cache-dir", type=Path)
    parser.add_argument("--model", default="tf_efficientnet_lite0")
    parser.add_argument("--weights")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("order.json"))
    options = parser.parse_args()
    device = TrainSettings(device=options.device).torch_device()
    backbone = create_backbone(options.model, options.weights)
    tasks = place(TaskSequence("unlike tasks", "own", tuple(the_tasks(options, backbone))), device).tasks
    scores = {
        "first": {task.name: accuracies(backbone, [task], options)[task.name] for task in tasks},
        "in this order": accuracies(backbone, tasks, options),
        "in the reverse": accuracies(backbone, tasks[::-1], options),
    }
    means = {how: {task: statistics.mean(of_task) for task, of_task in by.items()} for how, by in scores.items()}
    print(f"{'':24}" + "".join(f"{how:>16}" for how in means))
    for task in means["first"]:
        print(f"{task:24}" + "".join(f"{by[task]:16.1f}" for by in means.values()))
    numbers = {"model": options.model, "scores": scores, "means": means}
    write_report(options.out, device, backbone.weights_sha256, numbers)


def the_tasks(options: argparse.Namespace, backbone: Backbone) -> list[Task]:
    """Of all parts, one after the other; their names say where they are from."""
    found = []
    for name, pipeline in PARTS:
        given = {"mean": backbone.mean, "std": backbone.std, "pipeline": pipeline}
        found += load_tasks(name, **given, data_dir=options.data_dir, cache_dir=options.cache_dir)
    return found


def accuracies(backbone: Backbone, tasks: Sequence[Task], options: argparse.Namespace) -> Scores:
    """Of each task after the last, one for each seed."""
    found: Scores = {task.name: [] for task in tasks}
    runs = [(tasks, seed) for seed in range(options.seeds)]
    for name, accuracy, _ in learned(backbone, runs, options.device, photos=False, epochs=options.epochs):
        found[name].append(accuracy)
    return found


if __name__ == "__main__":
    main()
