"""Three folders of photographs learned one after the other, as `confitune learn` does it, against plain fine-tuning.

    python benchmarks/learn.py                        # 2 cores: five minutes
    python benchmarks/learn.py --size 64 --epochs 5

The folders are cut from the photographs that come with scikit-image and scikit-learn (the dataset `photos`). Prints
what the first tasks lost, what each adds to the bundle, and how often the task is guessed where nobody says which.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from report import write_report

from confitune.deploy import Bundle, LearnSettings, check_tasks, learn
from confitune.engine import TrainSettings, evaluate, fit
from confitune.methods import create_method
from confitune.nn import create_backbone
from confitune.tasks import Task, load_folder_task, load_tasks

KEPT = 1000  # every test image of a task, so that what is lost is measured on all of them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=3)
    parser.add_argument("--size", type=int, default=128, help="of the network's input")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("learn.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folders = cut_folders(Path(scratch) / "photos", options.tasks)
        kinds = {"best": {"method": "best"}}
        kinds |= {f"confit, {means} means": {"method": "confit", "means": means} for means in ("window", "phase")}
        rows = [learned(folders, Path(scratch), how, new, options) for how, new in kinds.items()]
        rows.append(fine_tuned(folders, Path(scratch), options))
    for row in rows:
        print(
            f"{row['how']:20} when learned {shown(row['learned'])}, at the end {shown(row['end'])}: the earlier tasks "
            f"lost {max(row['lost']):.1f} points at most"
            + (f", {row['bytes_a_task'] / 1e6:.2f} MB a task" if "bytes_a_task" in row else "")
        )
        if "guessed" in row:
            print(
                f"{'':20} without being told, {row['guessed']:.1f}% of the test images go to the right task (by chance "
                f"{100 / options.tasks:.1f}%), {row['unknown']:.1f}% to none"
            )
    numbers = {"size": options.size, "epochs": options.epochs, "tasks": options.tasks, "rows": rows}
    device = TrainSettings(device=options.device).torch_device()
    write_report(options.out, device, create_backbone("tf_efficientnet_lite0").weights_sha256, numbers)


def cut_folders(root: Path, tasks: int) -> list[Path]:
    """The first tasks of `photos` as train/ and test/ with a folder for each class."""
    for task in load_tasks("photos", mean=(0.5,) * 3, std=(0.5,) * 3, tasks=tasks):
        for split, images in (("train", task.train), ("test", task.test)):
            pixels, labels = images.batch(torch.arange(len(images)))
            for number, (image, label) in enumerate(zip(pixels, labels.tolist(), strict=True)):
                folder = root / task.name / split / task.classes[label]
                folder.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{number:03}.png")
    return sorted(root.iterdir())


def learned(
    folders: list[Path], scratch: Path, how: str, new: dict[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    bundle, began = scratch / how, time.perf_counter()
    settings = LearnSettings(**new, size=options.size, epochs=options.epochs, keep=KEPT, device=options.device)
    reports = [learn(folder, folder.name, bundle, settings, cache_dir=scratch / "cache") for folder in folders]
    seconds = time.perf_counter() - began
    opened = Bundle.open(bundle)
    checks = check_tasks(opened, options.device)
    start, end = [report.accuracy for report in reports], [checks.accuracy[folder.name] for folder in folders]
    heads = [4 * (len(report.record.classes) * 1281) for report in reports]
    return {
        "how": how,
        "learned": start,
        "end": end,
        "lost": [a - b for a, b in zip(start[:-1], end[:-1], strict=True)],
        "bytes_a_task": max(report.record.file.bytes - head for report, head in zip(reports, heads, strict=True)),
        "numbers_a_task": max(report.numbers for report in reports),
        "guessed": checks.guessed,
        "unknown": checks.unknown,
        "seconds": seconds,
    }


def fine_tuned(folders: list[Path], scratch: Path, options: argparse.Namespace) -> dict[str, Any]:
    backbone, method = create_backbone("tf_efficientnet_lite0"), create_method("finetune")
    net, began = method.network(backbone.module), time.perf_counter()
    settings = TrainSettings(epochs=options.epochs, device=options.device)
    tasks: list[Task] = []
    start: list[float] = []
    for folder in folders:
        task = load_folder_task(
            folder,
            folder.name,
            mean=backbone.mean,
            std=backbone.std,
            size=options.size,
            cache_dir=scratch / "cache",
        )
        fit(net, task, method, settings)
        tasks.append(task)
        start.append(evaluate(net, task, settings))
    end = [evaluate(net, task, settings) for task in tasks]
    return {
        "how": "fine-tuning",
        "learned": start,
        "end": end,
        "lost": [a - b for a, b in zip(start[:-1], end[:-1], strict=True)],
        "seconds": time.perf_counter() - began,
    }


def shown(values: list[float]) -> str:
    return " ".join(f"{value:.1f}" for value in values)


if __name__ == "__main__":
    main()
