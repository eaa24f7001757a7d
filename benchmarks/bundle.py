"""A bundle of a thousand tasks against one of ten, in turns in the same process.

    python benchmarks/bundle.py                       # three minutes, and 0.5 GB of disk that it frees again
    python benchmarks/bundle.py --tasks 3000 --means window

One task is learned from photographs (the dataset `photos`); the others are copies of its state with every number moved
a little and heads of their own, so that no two files are the same. Each comes with the check of twenty earlier tasks
that `confitune learn` puts on record. Prints what opening, adding and predicting cost with many tasks against few, and
the memory that a predictor takes which keeps 64 tasks ready.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from learn import cut_folders
from report import write_report
from torch import Tensor

from confitune.deploy import Bundle, LearnSettings, Predictor, changing, learn
from confitune.deploy.bundle import BundleChange, TaskRecord

FEW = 10
CHECKED = 20  # tasks, after each that is learned
CLASSES = range(2, 21)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--means", choices=("phase", "window"), default="phase")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--ready", type=int, default=64)
    parser.add_argument("--predicted", type=int, default=1000, help="different tasks, to see what memory they take")
    parser.add_argument("--folder", type=Path, help="for the bundles; default: one that is deleted afterwards")
    parser.add_argument("--out", type=Path, default=Path("bundle.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        few, many, real = made(Path(scratch), options)
        numbers = measured(few, many, real, options)
        weights_sha256 = Bundle.open(few).network.weights_sha256
    for name, row in numbers["times"].items():
        print(
            f"{name:45} {FEW} tasks {1e3 * row['few']:8.2f} ms, {options.tasks:,} {1e3 * row['many']:8.2f} ms", end=""
        )
        print(f": {row['ratio']:.2f} times")
    print(
        f"memory {numbers['memory_start_mb']:,.0f} MB at first, {numbers['memory_ready_mb']:,.0f} MB with "
        f"{options.ready} tasks ready, {numbers['memory_end_mb']:,.0f} MB after {options.predicted:,} different tasks; "
        f"{numbers['disk_mb']:,.0f} MB on disk, {numbers['task_mb']:.2f} MB a task"
    )
    write_report(options.out, torch.device("cpu"), weights_sha256, numbers)


def made(scratch: Path, options: argparse.Namespace) -> tuple[Path, Path, dict[str, Tensor]]:
    """A bundle of few tasks, one of many, and the state of the task that all the others are copies of."""
    (photos,) = cut_folders(scratch / "photos", 1)
    settings = LearnSettings(method="confit", means=options.means, epochs=1, device="cpu")
    learn(photos, "real", scratch / "few", settings, cache_dir=scratch / "cache")
    many, chance = scratch / "many", random.Random(0)
    shutil.copytree(scratch / "few", many)
    real = {key: tensor.clone() for key, tensor in Bundle.open(many).task_state("real").items()}
    began = time.perf_counter()
    for path, count in ((scratch / "few", FEW), (many, options.tasks)):
        bundle = Bundle.open(path)
        with no_waiting_for_the_disk(), changing(bundle) as change:
            while len(bundle.tasks) < count:
                add(change, f"task {len(bundle.tasks):05}", *another(real, chance), chance)
                if len(bundle.tasks) % 1000 == 0:
                    print(f"{len(bundle.tasks):,} tasks after {time.perf_counter() - began:.0f} s", flush=True)
    os.sync()
    return scratch / "few", many, real


def another(real: dict[str, Tensor], chance: random.Random) -> tuple[dict[str, Tensor], list[str]]:
    """A state like the real one with every number moved by about a hundredth, and another number of classes."""
    generator = torch.Generator().manual_seed(chance.getrandbits(60))
    state = {
        key: tensor * (1 + 0.01 * torch.randn(tensor.shape, generator=generator))
        if tensor.is_floating_point()
        else tensor
        for key, tensor in real.items()
    }
    classes, features = chance.choice(CLASSES), real["head.weight"].shape[1]
    state["head.weight"] = 0.03 * torch.randn(classes, features, generator=generator)
    state["head.bias"] = torch.zeros(classes)
    return state, [f"class {n}" for n in range(classes)]


def add(
    change: BundleChange,
    name: str,
    state: dict[str, Tensor],
    classes: list[str],
    chance: random.Random,
    shared: dict[str, Tensor] | None = None,
) -> None:
    """As `learn` does it when training is done."""
    known = change.bundle.tasks.keys()
    checked = {f"task {chance.randrange(1, len(known)):05}" for _ in range(CHECKED)} & known if len(known) > 1 else {}
    stored = change.store_task(state, classes)
    record = TaskRecord(classes=tuple(classes), file=stored, accuracy=90.0, images=640, epochs=10, learned="2026-01-01")
    change.add_task(name, record, shared, dict.fromkeys(checked, 90.625))


@contextmanager
def no_waiting_for_the_disk() -> Any:
    sync, os.fsync = os.fsync, lambda handle: None
    try:
        yield
    finally:
        os.fsync = sync


def measured(few: Path, many: Path, real: dict[str, Tensor], options: argparse.Namespace) -> dict[str, Any]:
    chance = random.Random(1)
    files = [file.stat().st_size for file in many.rglob("*") if file.is_file()]
    bundles = (Bundle.open(few), Bundle.open(many))
    with ProcessPoolExecutor(1, get_context("spawn")) as fresh:  # in this process a task was learned
        numbers = fresh.submit(memory, many, options.ready, options.predicted).result()
    times = {"opening": in_turns([lambda path=path: Bundle.open(path) for path in (few, many)], 11)}
    times["adding a task"] = adding(bundles, real, options.repeats, chance, shared=None)
    shared = bundles[0].load_network().shared_state_dict()
    times["adding a task and a backbone"] = adding(bundles, real, options.repeats // 4, chance, shared)
    predictors = [Predictor(bundle, device="cpu", ready=options.ready) for bundle in bundles]
    times["one image, of a random task"] = predicting(predictors, options.repeats, chance)
    predictors = [Predictor(bundle, device="cpu", ready=1) for bundle in bundles]
    times["one image, of a task that is not ready"] = predicting(predictors, options.repeats, chance)
    sizes = [record.file.bytes for record in bundles[1].tasks.values()]
    return {
        "model": bundles[0].network.model,
        "means": options.means,
        "pixels": bundles[0].network.size,
        "few": FEW,
        "tasks": options.tasks,
        "ready": options.ready,
        "predicted": options.predicted,
        "times": times,
        **numbers,
        "disk_mb": sum(files) / 1e6,
        "task_mb": statistics.mean(sizes) / 1e6,
        "backbone_mb": max(file.stat().st_size for file in (many / "backbones").iterdir()) / 1e6,
        "manifest_mb": (many / "bundle.json").stat().st_size / 1e6,
    }


def memory(path: Path, ready: int, predicted: int) -> dict[str, float]:
    """Of this process: a predictor without tasks, with as many as it keeps ready, and after many different ones."""
    predictor, image = Predictor.from_bundle(path, device="cpu", ready=ready), some_image()
    found = {"memory_start_mb": resident_mb()}
    for number, task in enumerate(random.Random(2).sample(list(predictor.tasks), predicted), 1):
        predictor.predict(image, [task])
        if number == ready:
            found["memory_ready_mb"] = resident_mb()
    return {**found, "memory_end_mb": resident_mb()}


def adding(
    bundles: tuple[Bundle, Bundle],
    real: dict[str, Tensor],
    repeats: int,
    chance: random.Random,
    shared: dict[str, Tensor] | None,
) -> dict[str, Any]:
    """One more task's state, which is then taken out again so that the bundle stays as large."""

    def one(bundle: Bundle) -> float:
        state, classes = another(real, chance)
        moved = None if shared is None else {key: tensor + chance.random() for key, tensor in shared.items()}
        began = time.perf_counter()
        with changing(bundle) as change:
            add(change, "one more", state, classes, chance, moved)
        seconds = time.perf_counter() - began
        with changing(bundle) as change:
            change.remove_task("one more")
        return seconds

    return compared([[one(bundle) for bundle in bundles] for _ in range(repeats)])


def predicting(predictors: list[Predictor], repeats: int, chance: random.Random) -> dict[str, Any]:
    image, names = some_image(), [list(predictor.tasks) for predictor in predictors]
    before: list[str] = ["", ""]

    def one(place: int) -> float:
        task = chance.choice([name for name in chance.sample(names[place], 2) if name != before[place]])
        before[place] = task
        began = time.perf_counter()
        predictors[place].predict(image, [task])
        return time.perf_counter() - began

    for _ in range(2 * FEW):  # the few are ready, libraries warm
        one(0), one(1)
    return compared([[one(0), one(1)] for _ in range(repeats)])


def in_turns(calls: list[Callable[[], object]], repeats: int) -> dict[str, Any]:
    def seconds(call: Callable[[], object]) -> float:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    return compared([[seconds(call) for call in calls] for _ in range(repeats)])


def compared(rounds: list[list[float]]) -> dict[str, Any]:
    few, many = (statistics.median(column) for column in zip(*rounds, strict=True))
    return {"few": few, "many": many, "ratio": many / few, "repeats": len(rounds)}


def some_image() -> Tensor:
    return torch.randint(0, 256, (1, 3, 224, 224), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    main()
