"""All classes of all tasks in one: how right answers are without the task, what is unknown, how long it takes.

    python benchmarks/label_space.py --dataset flowers102 --elsewhere caltech101 --elsewhere photos --data-dir data

Tasks are added one after the other to the sums that a bundle keeps (`methods/gaussian.py`), from features of the
pre-trained network; beside it the same classifier from all images at once, and scikit-learn's logistic regression on
all features at once. Then half of the tasks are left out: how many of their test images, and of images from elsewhere,
are said to be unknown, by how many known ones are, too. At last a bundle with many made-up tasks: a guess against the
prediction of a given task.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from report import write_report
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from confitune.deploy import Bundle, Predictor, changing
from confitune.deploy.bundle import Network, TaskRecord
from confitune.deploy.label_space import TaskFeatures
from confitune.engine import TrainSettings, batches
from confitune.methods.gaussian import FeatureSums, Gaussians
from confitune.nn import Backbone, create_backbone, two_scales
from confitune.tasks import Task, load_tasks
from confitune.tasks.splits import hold_out

_ALARMS = (0.01, 0.02, 0.05, 0.1, 0.2)  # shares of known images that are said to be unknown
_HELD = 0.1  # of training images choose ridge and temperature
_CLASSES, _IMAGES = 5, 20  # of made-up tasks, and images of each
_REPEATS = 15

Split = tuple[Tensor, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="photos")
    parser.add_argument("--elsewhere", action="append", default=[], help="a dataset that shows other things")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--cache-dir", type=Path)
    parser.add_argument("--model", default="tf_efficientnet_lite0")
    parser.add_argument("--weights")
    parser.add_argument("--many", type=int, default=1000, help="made-up tasks of the bundle that is timed")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("label_space.json"))
    options = parser.parse_args()
    device = TrainSettings(device=options.device).torch_device()
    backbone = create_backbone(options.model, options.weights)
    net = two_scales(copy.deepcopy(backbone.module)).to(device, memory_format=torch.channels_last).eval()

    @torch.no_grad()
    def of(task: Task, split: str) -> Split:
        images = getattr(task, split)
        found = [net(task.inputs(pixels)).float().cpu() for pixels, _ in batches(images, 64, device)]
        return torch.cat(found), images.labels.cpu()

    def read(name: str, *splits: str) -> list[tuple[Split, ...]]:
        given = {"mean": backbone.mean, "std": backbone.std, "data_dir": options.data_dir}
        tasks = load_tasks(name, **given, cache_dir=options.cache_dir)
        return [tuple(of(task, split) for split in splits) for task in tasks]

    tasks = read(options.dataset, "train", "test")
    elsewhere = {name: torch.cat([test for ((test, _),) in read(name, "test")]) for name in options.elsewhere}
    numbers = {
        "model": options.model,
        "dataset": options.dataset,
        "tasks": len(tasks),
        "accuracy": accuracies(tasks),
        "unknown": unknown(tasks, elsewhere),
        "many": timed(options.many, backbone, options.device),
    }
    for part in ("accuracy", "unknown", "many"):
        print(part, numbers[part])
    write_report(options.out, device, backbone.weights_sha256, numbers)


def learned(tasks: list[tuple[Split, ...]]) -> Gaussians:
    """Task by task; what is to be chosen is chosen on a tenth of the training images, left out at first."""
    whole, fewer, held, inside, first = FeatureSums(), FeatureSums(), [], [], 0
    for number, (train, _) in enumerate(tasks):
        features, of_images = train
        classes = int(of_images.max()) + 1
        stay, left = hold_out(of_images, _HELD, torch.Generator().manual_seed(0))
        whole = whole.plus(str(number), features, of_images, classes)
        fewer = fewer.plus(str(number), features[stay], of_images[stay], classes)
        held.append((features[left], first + of_images[left]))
        inside.append((features[stay], first + of_images[stay]))
        first += classes
    held, inside = ([torch.cat(part) for part in zip(*pairs, strict=True)] for pairs in (held, inside))
    chosen = fewer.calibrated(*held, tuple(inside))
    return replace(whole.gaussians(chosen.ridge), temperature=chosen.temperature, threshold=chosen.threshold)


def joined(tasks: list[tuple[Split, ...]], split: int) -> Split:
    """All images of a split, labelled over all tasks."""
    sizes = [int(task[0][1].max()) + 1 for task in tasks]
    firsts = [sum(sizes[:number]) for number in range(len(tasks))]
    labels = [first + task[split][1] for first, task in zip(firsts, tasks, strict=True)]
    return torch.cat([task[split][0] for task in tasks]), torch.cat(labels)


def accuracies(tasks: list[tuple[Split, ...]]) -> dict[str, float]:
    """In percent of all test images, the task not given."""
    (train, labels), (test, truth) = joined(tasks, 0), joined(tasks, 1)
    one_by_one = learned(tasks)
    at_once = FeatureSums().plus("all", train, labels, int(labels.max()) + 1)
    probabilities = one_by_one.probabilities(test)
    right = probabilities.argmax(1) == truth
    tasks_right = one_by_one.of_tasks(probabilities).argmax(1) == one_by_one.of_class[truth]
    regression = LogisticRegression(max_iter=5000).fit(train.numpy(), labels.numpy())
    return {
        "task by task": _percent(right),
        "all at once": _percent(at_once.gaussians(one_by_one.ridge).logits(test).argmax(1) == truth),
        "logistic regression, all at once": 100 * float(regression.score(test.numpy(), truth.numpy())),
        "task": _percent(tasks_right),
        "mean probability": 100 * float(probabilities.max(1).values.mean()),
    }


def unknown(tasks: list[tuple[Split, ...]], elsewhere: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """How many images that are none of half of the tasks are said to be unknown, by false alarms, in percent."""
    known, others = tasks[::2], tasks[1::2]
    space, test = learned(known), joined(known, 1)[0]
    usual = space.unusual(test)
    strange = {"classes of the same set, never learned": joined(others, 1)[0], **elsewhere}
    found = {}
    for name, images in strange.items():
        far = space.unusual(images)
        found[name] = {f"{100 * share:g}": _percent(far > usual.quantile(1 - share)) for share in _ALARMS}
        found[name]["as set"] = _percent(far > space.threshold)
    return {"known": {"as set": _percent(usual > space.threshold)}, **found}


def timed(many: int, backbone: Backbone, device: str) -> dict[str, float]:
    """Milliseconds of one image, its task given and not, with so many tasks; medians, in turn."""
    chance = torch.Generator().manual_seed(0)
    network = Network(
        model=backbone.name,
        means="window",
        mean=backbone.mean,  # type: ignore[arg-type]
        std=backbone.std,  # type: ignore[arg-type]
        size=224,
        weights=backbone.weights,
        weights_sha256=backbone.weights_sha256,
        method="best",
    )
    with tempfile.TemporaryDirectory() as folder:
        bundle, pretrained = Bundle(Path(folder) / "model", network), backbone.module.cpu()
        with changing(bundle) as change:
            change.store_pretrained(pretrained)
            net = network.around(pretrained)
            net.add_task("0", [str(label) for label in range(_CLASSES)])
            net.eval()(torch.zeros(1, 3, 224, 224))
            net.finish_task(owns=["head"])
            tasks = {}
            for number in range(many):
                labels = torch.arange(_CLASSES).repeat(_IMAGES // _CLASSES)
                features = torch.rand(len(labels), net.head.features, generator=chance)
                kept = TaskFeatures(features, labels, features[:_CLASSES], labels[:_CLASSES])
                state = net.task_state_dict("0")
                state["head.bias"] = state["head.bias"] + number
                state["image_size"] = torch.tensor([224, 224])
                classes = tuple(f"{number}-{label}" for label in range(_CLASSES))
                files = {"file": change.store_task(state, classes), "features": change.store_features(kept)}
                tasks[str(number)] = TaskRecord(classes=classes, **files)
            change.commit(tasks, net.shared_state_dict())
        predictor = Predictor(Bundle.open(Path(folder) / "model"), device=device)
        pixels = torch.randint(0, 256, (1, 3, 224, 224), dtype=torch.uint8, generator=chance)
        times: dict[str, list[float]] = {"given": [], "guessed": []}
        for _ in range(_REPEATS):
            for name, task in (("given", "0"), ("guessed", None)):
                began = time.perf_counter()
                predictor.predict(pixels, [task])
                times[name].append(1000 * (time.perf_counter() - began))
        space = predictor._space
        assert space is not None
        memory = sum(tensor.nbytes for tensor in vars(space).values() if isinstance(tensor, Tensor))
    given, guessed = (statistics.median(of_task[1:]) for of_task in times.values())
    return {"tasks": many, "given ms": given, "guessed ms": guessed, "ratio": guessed / given, "MB": memory / 1e6}


def _percent(found: Tensor) -> float:
    return 100 * float(found.double().mean())


if __name__ == "__main__":
    main()
