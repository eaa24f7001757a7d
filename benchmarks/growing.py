"""People's photos in one growing bundle: answers where nobody says which task, and classes that come later.

    python benchmarks/growing.py --photos photos --new new      # a folder for every task, folders of classes in it

Tasks are learned one after the other with the defaults of `confitune learn`. On new photos, without their task: how
often task and class are right, beside one logistic regression over the classes of all tasks, on frozen features of all
photos at once. Then all classes, in their order, make tasks of ten: five are learned and five added later, without the
photos of the first, beside all ten learned at once. `learn` and the regression hold out a fifth of the photos.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from own_photos import features
from report import write_report
from sklearn.linear_model import LogisticRegression

from confitune.deploy import LearnSettings, Predictor, grow, learn
from confitune.deploy.predictor import image_files, predict_files
from confitune.engine import TrainSettings
from confitune.nn import Backbone, create_backbone
from confitune.tasks import load_folder_task

_FIRST, _ALL = 5, 10  # classes that are learned at first, and in the end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, required=True, help="a folder for every task")
    parser.add_argument("--new", type=Path, required=True, help="the same folders with photos to test on")
    parser.add_argument("--model", default="tf_efficientnet_lite0")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("growing.json"))
    options = parser.parse_args()
    backbone = create_backbone(options.model, options.weights)
    settings = LearnSettings(model=options.model, weights=options.weights, device=options.device)
    with tempfile.TemporaryDirectory() as scratch:
        without_task = guessed(options.photos, options.new, Path(scratch) / "all", settings)
        grown = [
            grown_and_at_once(classes, options.photos, options.new, Path(scratch) / str(number), settings)
            for number, classes in enumerate(tens(options.photos))
        ]
    without_task["class, one regression"] = regression(options.photos, options.new, backbone, options.device)
    growth = {how: statistics.mean(of_ten[how] for of_ten in grown) for how in grown[0]}
    print(without_task, growth)
    numbers = {"model": options.model, "without_task": without_task, "growth": growth, "of_each_ten": grown}
    write_report(options.out, TrainSettings(device=options.device).torch_device(), backbone.weights_sha256, numbers)


def folders(root: Path) -> list[Path]:
    """In their order."""
    return sorted(path for path in root.iterdir() if path.is_dir())


def tens(root: Path) -> list[list[Path]]:
    """The folders of classes of all tasks, ten by ten; what is left over is left out."""
    classes = [path.relative_to(root) for task in folders(root) for path in folders(task)]
    return [classes[first : first + _ALL] for first in range(0, len(classes) - _ALL + 1, _ALL)]


def guessed(photos: Path, new: Path, bundle: Path, settings: LearnSettings) -> dict[str, Any]:
    """Of new photos whose task is not given, in percent."""
    for task in folders(photos):
        learn(task, task.name, bundle, settings)
    files = image_files([str(new)])
    counts = {"task": 0, "class": 0, "unknown": 0}
    unknown = Predictor.from_bundle(bundle, device=settings.device)
    always = Predictor.from_bundle(bundle, device=settings.device, unknown=False)
    for predictor in (always, unknown):
        for file, answer in predict_files(predictor, files, None, 1):
            if isinstance(answer, Exception):
                raise SystemExit(f"{file}: {answer}")
            counts["unknown"] += answer.task is None
            if predictor is always:
                right = answer.task == file.parts[-3]
                counts["task"] += right
                counts["class"] += right and answer.classes[0][0] == file.parts[-2]
    return {**{what: 100 * count / len(files) for what, count in counts.items()}, "photos": len(files)}


def regression(photos: Path, new: Path, backbone: Backbone, device: str) -> float:
    """Of the same new photos the share that one logistic regression over all classes knows."""
    place, net = TrainSettings(device=device).torch_device(), backbone.module
    net.to(place, memory_format=torch.channels_last)
    given = {"mean": backbone.mean, "std": backbone.std}
    train, labels, test, truth, first = [], [], [], [], 0
    for folder in folders(photos):
        task = load_folder_task(folder, folder.name, **given)
        other = load_folder_task(new / folder.name, folder.name, **given)
        train.append(features(net, task, task.train).cpu())
        labels.append(first + task.train.labels.cpu())
        for images in (other.train, other.test):
            test.append(features(net, other, images).cpu())
            truth.append(first + images.labels.cpu())
        first += len(task.classes)
    fitted = LogisticRegression(max_iter=5000).fit(torch.cat(train).numpy(), torch.cat(labels).numpy())
    return 100 * float(fitted.score(torch.cat(test).numpy(), torch.cat(truth).numpy()))


def grown_and_at_once(
    classes: Sequence[Path], photos: Path, new: Path, scratch: Path, settings: LearnSettings
) -> dict[str, float]:
    """Accuracy in percent on new photos of all ten classes."""
    first, later, whole = (linked(some, photos, scratch / name) for name, some in parts(classes).items())
    learn(first, "ten", scratch / "grown", settings)
    grow(later, "ten", scratch / "grown", settings)
    learn(whole, "ten", scratch / "at once", settings)
    test = linked(classes, new, scratch / "new")
    return {how: accuracy(scratch / how, test, settings.device) for how in ("grown", "at once")}


def parts(classes: Sequence[Path]) -> dict[str, Sequence[Path]]:
    """What is learned at first, what later, and both."""
    return {"first": classes[:_FIRST], "later": classes[_FIRST:], "whole": classes}


def linked(classes: Sequence[Path], root: Path, folder: Path) -> Path:
    """A folder of these classes."""
    folder.mkdir(parents=True)
    for path in classes:
        (folder / path.name).symlink_to((root / path).resolve(), target_is_directory=True)
    return folder


def accuracy(bundle: Path, new: Path, device: str) -> float:
    """Of the bundle's one task, on photos in folders of classes."""
    predictor, right = Predictor.from_bundle(bundle, device=device), []
    for folder in folders(new):
        for _, answer in predict_files(predictor, image_files([str(folder)]), "ten", 1):
            right.append(not isinstance(answer, Exception) and answer.classes[0][0] == folder.name)
    return 100 * statistics.mean(right)


if __name__ == "__main__":
    main()
