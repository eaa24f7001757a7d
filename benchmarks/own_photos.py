"""`best` on few photos a class, beside what people would try first: logistic regression on frozen features, and a
network for every task, plainly fine-tuned.

    python benchmarks/own_photos.py --photos photos --new new    # a folder for every task, folders of classes in it
    python benchmarks/own_photos.py --dataset flowers102 --data-dir data --per-class 10 20 40

Tasks are learned one after the other, as `confitune learn` does it with its defaults, in the order given and in the
reverse. Of folders all three use the same training images (a fifth is held out, as `learn` does) and are tested on the
new photos; of a dataset, its own test images. Prints accuracy by task of all three, and of the candidates that `best`
chooses among.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from report import write_report
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from confitune.engine import SequenceRun, Turns, library_switches, place
from confitune.methods import create_method
from confitune.nn import Backbone, create_backbone
from confitune.settings import TrainSettings
from confitune.tasks import Images, Task, TaskSequence, load_folder_task, load_tasks

_BATCH = 32
_CANDIDATES = ("head", "changes", "moments")
Scores = dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, help="a folder for every task")
    parser.add_argument("--new", type=Path, help="the same folders with photos to test on")
    parser.add_argument("--dataset", help="instead of folders")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--per-class", type=int, nargs="*", help="training images of a class, in turn; default: all")
    parser.add_argument("--classes-per-task", type=int, default=5, help="of a dataset")
    parser.add_argument("--tasks", type=int, help="only the first so many")
    parser.add_argument("--model", default="tf_efficientnet_lite0")
    parser.add_argument("--weights")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--orders", type=int, default=2, choices=(1, 2))
    parser.add_argument("--no-candidates", action="store_true", help="only what best chooses")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("own_photos.json"))
    options = parser.parse_args()
    device = TrainSettings(device=options.device).torch_device()
    backbone = create_backbone(options.model, options.weights)
    candidates = () if options.no_candidates else _CANDIDATES
    names = ("regression", "fine-tuned", "best", *(f"best, {owns}" for owns in candidates))
    scores: dict[str, Scores] = {name: {} for name in names}
    chosen: list[dict[str, Any]] = []
    seconds = []
    for per_class in options.per_class or [None]:
        tasks = place(TaskSequence("own photos", "clean", tuple(the_tasks(options, backbone, per_class))), device).tasks
        for task in tasks:
            scores["regression"][task.name] = [regression(backbone, task, device)]
            seeds = range(options.seeds)
            scores["fine-tuned"][task.name] = [fine_tuned(backbone, task, device, seed) for seed in seeds]
        runs = [(order, seed) for order in (tasks, tasks[::-1])[: options.orders] for seed in range(options.seeds)]
        began = time.perf_counter()
        for name, accuracy, choice in learned(backbone, runs, options.device):
            scores["best"].setdefault(name, []).append(accuracy)
            chosen.append({"task": name, **choice})
        seconds.append((time.perf_counter() - began) / (len(runs) * len(tasks)))
        for owns in candidates:
            for name, accuracy, _ in learned(backbone, runs, options.device, owns):
                scores[f"best, {owns}"].setdefault(name, []).append(accuracy)
    means = {name: {task: statistics.mean(of_task) for task, of_task in by.items()} for name, by in scores.items()}
    show(means, chosen, statistics.mean(seconds))
    numbers = {
        "model": options.model,
        "per_class": options.per_class,
        "scores": scores,
        "means": means,
        "chosen": chosen,
    }
    write_report(options.out, device, backbone.weights_sha256, {**numbers, "seconds_a_task": statistics.mean(seconds)})


def the_tasks(options: argparse.Namespace, backbone: Backbone, per_class: int | None) -> list[Task]:
    """The tasks, each with the images to learn and to test on."""
    normalised = {"mean": backbone.mean, "std": backbone.std}
    if options.dataset:
        sequence = load_tasks(
            options.dataset, **normalised, data_dir=options.data_dir, classes_per_task=options.classes_per_task
        )
        tasks = list(sequence)
    else:
        names = sorted(folder.name for folder in options.photos.iterdir() if folder.is_dir())
        tasks = []
        for name in names:
            task, new = (load_folder_task(root / name, name, **normalised) for root in (options.photos, options.new))
            rows = torch.cat([new.train.rows, new.test.rows])
            labels = torch.cat([new.train.labels, new.test.labels])
            tasks.append(replace(task, test=Images(new.train.pixels, rows, labels)))
    tasks = tasks[: options.tasks]
    if per_class is None:
        return tasks
    return [
        replace(task, name=f"{task.name}, {per_class} a class", train=some(task.train, per_class)) for task in tasks
    ]


def some(images: Images, per_class: int) -> Images:
    """So many images of each class, drawn at random."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(images), generator=generator)
    kept = [order[images.labels[order] == label][:per_class] for label in images.labels.unique()]
    return images.only(torch.cat(kept).sort().values)


def batches(task: Task, images: Images, order: Tensor) -> Any:
    """Inputs and labels."""
    for positions in order.split(_BATCH):
        pixels, labels = images.batch(positions)
        yield task.inputs(pixels), labels


@torch.no_grad()
def features(net: nn.Module, task: Task, images: Images) -> Tensor:
    """What a network makes of images, in evaluation mode."""
    net.eval()
    return torch.cat([net(x) for x, _ in batches(task, images, torch.arange(len(images)))])


def regression(backbone: Backbone, task: Task, device: torch.device) -> float:
    """Scikit-learn's logistic regression with its defaults, on features of the pre-trained network."""
    net = copy.deepcopy(backbone.module).to(device, memory_format=torch.channels_last)
    train, test = (features(net, task, images).cpu().numpy() for images in (task.train, task.test))
    model = LogisticRegression(max_iter=5000).fit(train, task.train.labels.cpu().numpy())
    return 100 * float(model.score(test, task.test.labels.cpu().numpy()))


def fine_tuned(backbone: Backbone, task: Task, device: torch.device, seed: int) -> float:
    """All of the network: batch norm in evaluation mode, AdamW 2e-4 (head 3e-3), one cycle, 8 epochs, flips, labels
    smoothed by 0.1."""
    torch.manual_seed(seed)
    epochs, net = 8, copy.deepcopy(backbone.module).to(device, memory_format=torch.channels_last).eval()
    size = features(net, task, task.train.only(torch.arange(1))).shape[1]
    head = nn.Linear(size, len(task.classes)).to(device)
    groups = [{"params": net.parameters(), "lr": 2e-4}, {"params": head.parameters(), "lr": 3e-3}]
    optimizer = torch.optim.AdamW(groups)
    steps = epochs * -(-len(task.train) // _BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [group["lr"] for group in groups], total_steps=steps)
    for _ in range(epochs):
        for x, labels in batches(task, task.train, torch.randperm(len(task.train))):
            flip = torch.rand(len(x), device=device) < 0.5
            x = torch.where(flip[:, None, None, None], x.flip(-1), x)
            optimizer.zero_grad()
            cross_entropy(head(net(x)), labels.to(device), label_smoothing=0.1).backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        right = head(features(net, task, task.test)).argmax(1) == task.test.labels.to(device)
    return 100 * float(right.double().mean())


def learned(
    backbone: Backbone,
    runs: Sequence[tuple[Sequence[Task], int]],
    device: str,
    owns: str = "chosen",
    photos: bool = True,
    **others: Any,
) -> list[tuple[str, float, dict[str, Any]]]:
    """Accuracy of each task after the last, and what it was given, by `best` as `learn` uses it (or with `photos` off,
    as `run` does), with other settings; a run for each order of tasks and seed, on a GPU side by side."""
    fits = []
    on_gpu = TrainSettings(device=device).torch_device().type == "cuda"
    turns = Turns(len(runs), apart=1)
    for turn, (tasks, seed) in enumerate(runs):
        method = create_method("best", {"best": {"owns": owns}})
        settings = TrainSettings(**method.training(photos, {"device": device, "seed": seed}) | others)
        net = method.network(copy.deepcopy(backbone.module))
        sequence = TaskSequence("own photos", "clean", tuple(tasks))
        listeners = (turns.listener(turn),) if on_gpu else ()
        fits.append(SequenceRun(net, sequence, method, settings, listeners=listeners))
    with library_switches(settings, settings.step_mode(settings.torch_device())):
        todo = [fit.run for fit in fits]
        results = turns.run(todo) if on_gpu else [run() for run in todo]
    found = []
    for (tasks, seed), fit, result in zip(runs, fits, results, strict=True):
        if result.fgt:
            raise SystemExit(f"earlier tasks changed: {result.accuracy_matrix}")
        for task, row in zip(tasks, result.accuracy_matrix, strict=True):
            chosen = {"owns": fit.net.tasks[task.name].owns, **fit.method.choices.get(task.name, {})}
            found.append((task.name, float(row[-1] or 0), {"order": [t.name for t in tasks], "seed": seed, **chosen}))
    return found


def show(means: dict[str, dict[str, float]], chosen: list[dict[str, Any]], seconds: float) -> None:
    """A line for each task."""
    print(f"{'':24}" + "".join(f"{name:>15}" for name in means) + "   of best's runs only a head")
    for task in means["best"]:
        heads = [choice["owns"] == ("head",) for choice in chosen if choice["task"] == task]
        print(f"{task:24}" + "".join(f"{by[task]:15.1f}" for by in means.values()) + f"   {sum(heads)} of {len(heads)}")
    print(f"{'mean':24}" + "".join(f"{statistics.mean(by.values()):15.1f}" for by in means.values()))
    print(f"best: {seconds:.1f} s a task")


if __name__ == "__main__":
    main()
