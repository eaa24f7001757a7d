"""Images per second of training steps, stage by stage, with and without input statistics.

    python benchmarks/step.py                                        # on a GPU: minutes
    python benchmarks/step.py --device cpu --batch-size 8 --steps 4 --task-images 64

Three questions, each answered by ratios from this one run:

- How fast is a step? Each mode (eager, graph, compile), stage and batch size; 'published' is the baseline, written as
  the paper's code does it: float32, NCHW, kernel by kernel, a full batch norm as tracker.
- What do the statistics cost? A step that tracks, one that is silent, and plain batch norm; then whole tasks, where
  trackers are silent until they matter and a pass may follow.
- What does --deterministic cost?
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from report import write_report
from straightforward import PhaseTracker
from torch import nn
from torch.nn.functional import cross_entropy

from confitune.engine import EpochEnd, Listener, TaskFit, TrainSettings
from confitune.engine.capture import Executor
from confitune.methods import Method, Stage, create_method
from confitune.nn import Backbone, Head, Part, XconvNorms, create_backbone, headless, trace_flow
from confitune.tasks import Images, Preprocess, Task

STAGES = {
    "head": frozenset({"head"}),
    "head+norms": frozenset({"head", "norms"}),
    "all": frozenset({"head", "norms", "weights"}),
}
# How statistics of Xconv BN are taken (None: plain batch norm), and the settings for it.
NORMS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "plain BN": (None, {}),
    "silent": ("pass", {}),
    "tracking": ("running", {"track_from": 0}),
}


class OneStage(Method):
    """One stage for all epochs, with plain batch norm or Xconv BN."""

    def __init__(self, stage: str, means: str, statistics: str | None) -> None:
        super().__init__()
        self._stage, self._xconv = stage, statistics and (means, statistics)

    def parts(self) -> list[Part]:
        return [XconvNorms(*self._xconv), Head()] if self._xconv else [Head()]

    def stages(self, epochs: int, index: int) -> tuple[Stage, ...]:
        return (Stage(self._stage, epochs, STAGES[self._stage]),)


class Speeds(Listener):
    """Images per second of every epoch."""

    def __init__(self) -> None:
        self.speeds: list[float] = []

    def epoch_ended(self, end: EpochEnd) -> None:
        self.speeds.append(end.images / end.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--weights", default="none", help="speed does not depend on them")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--mode", nargs="+", default=["eager", "graph"], choices=["eager", "graph", "compile"])
    parser.add_argument("--means", default="window", choices=["window", "phase"])
    parser.add_argument("--steps", type=int, default=50, help="timed at once")
    parser.add_argument("--repeats", type=int, default=4, help="the median of so many is taken")
    parser.add_argument("--task-images", type=int, default=640, help="of the whole tasks (10 epochs), as in Flowers102")
    parser.add_argument("--task-repeats", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("step.json"))
    options = parser.parse_args()
    device = TrainSettings(device=options.device).torch_device()
    if device.type == "cpu":
        options.mode = [mode for mode in options.mode if mode != "graph"]
    backbone = create_backbone(options.model, options.weights)
    numbers: dict[str, Any] = {
        "model": options.model,
        "pixels": options.pixels,
        "means": options.means,
        "published": {},
        "steps": [],
        "tasks": [],
    }
    for batch in options.batch_size:
        speed = published_speed(backbone, batch, options, device)
        numbers["published"][str(batch)] = speed
        print(f"batch {batch:4}  published way, fp32 eager {speed:9,.0f} images/s", flush=True)
        task = random_task(batch * options.steps, options, device)
        for mode in options.mode:
            for deterministic in (False, True) if mode == "graph" else (False,):
                show_steps(numbers, backbone, task, batch, mode, deterministic, speed, options)
    for batch in options.batch_size:
        show_tasks(numbers, backbone, batch, options, device)
    write_report(options.out, device, backbone.weights_sha256, numbers)
    print(f"written to {options.out}")


def show_steps(
    numbers: dict[str, Any],
    backbone: Backbone,
    task: Task,
    batch: int,
    mode: str,
    deterministic: bool,
    baseline: float,
    options: argparse.Namespace,
) -> None:
    for norm in NORMS if not deterministic else ("silent",):
        for stage in STAGES if norm != "tracking" and not deterministic and mode == "graph" else ("all",):
            began = time.perf_counter()
            settings = TrainSettings(
                batch_size=batch,
                device=options.device,
                step=mode,
                deterministic=deterministic,
                epochs=options.repeats + 1,
                **NORMS[norm][1],
            )
            speeds = fitted_speeds(backbone, task, OneStage(stage, options.means, NORMS[norm][0]), settings)
            speed = statistics.median(speeds[1:])
            numbers["steps"].append(
                {
                    "batch_size": batch,
                    "mode": mode,
                    "execution": settings.execution(settings.torch_device()),
                    "norm": norm,
                    "stage": stage,
                    "images_per_second": speed,
                    "ratio_to_published": speed / baseline,
                    "spread": (max(speeds[1:]) - min(speeds[1:])) / speed,
                }
            )
            print(
                f"batch {batch:4}  {mode + (' deterministic' if deterministic else ''):20} {stage:10} {norm:9}"
                f" {speed:9,.0f} images/s  {speed / baseline:5.2f} times published"
                f"   ({time.perf_counter() - began:.1f} s to measure)",
                flush=True,
            )


def fitted_speeds(backbone: Backbone, task: Task, method: Method, settings: TrainSettings) -> list[float]:
    listener = Speeds()
    executor = Executor(method.network(copy.deepcopy(backbone.module)), settings, listener)
    with executor.session():
        TaskFit(executor, task, method).fit()
    return listener.speeds


def show_tasks(
    numbers: dict[str, Any], backbone: Backbone, batch: int, options: argparse.Namespace, device: torch.device
) -> None:
    """Whole tasks of ten epochs in ConFiT's three stages, plain batch norm and both kinds of statistics in turns."""
    task = random_task(max(options.task_images, batch), options, device)
    confit = {kind: {"means": options.means, "statistics": kind} for kind in ("running", "pass")}
    cases = {
        "plain BN": create_method("hierarchical"),
        **{kind: create_method("confit", {"confit": chosen}) for kind, chosen in confit.items()},
    }
    for mode in ["graph"] if "graph" in options.mode else ["eager"]:
        settings = TrainSettings(batch_size=batch, device=options.device, step=mode)
        executors = {
            name: Executor(method.network(copy.deepcopy(backbone.module)), settings) for name, method in cases.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in cases}
        for repeat in range(options.task_repeats + 1):
            for name, executor in executors.items():
                named = replace(task, name=f"task{repeat}")
                synchronize(device)
                began = time.perf_counter()
                with executor.session():
                    TaskFit(executor, named, cases[name]).fit()
                synchronize(device)
                seconds[name].append(time.perf_counter() - began)
        median = {name: statistics.median(values[1:]) for name, values in seconds.items()}
        for name in cases:
            cost = median[name] / median["plain BN"] - 1
            numbers["tasks"].append(
                {
                    "batch_size": batch,
                    "mode": mode,
                    "images": len(task.train),
                    "epochs": settings.epochs,
                    "statistics": name,
                    "seconds": seconds[name][1:],
                    "cost_against_plain_bn": cost,
                }
            )
            print(
                f"batch {batch:4}  {mode:8} whole task, {name:9} {median[name]:7.3f} s  {100 * cost:+5.1f}%", flush=True
            )


def published_speed(backbone: Backbone, batch: int, options: argparse.Namespace, device: torch.device) -> float:
    """Stage 3 as in `straightforward.py`, without its data loading."""
    model = headless(copy.deepcopy(backbone.module)).to(device).train()
    flow = trace_flow(model)
    modules = dict(model.named_modules())
    norms = [name for name, module in modules.items() if isinstance(module, nn.BatchNorm2d)]
    trackers = [PhaseTracker(modules[call.module]).to(device) for n in norms if (call := flow.conv_before(n)[0])]
    head = nn.Linear(flow.features[0], options.classes).to(device)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.01)
    x = torch.randn(batch, 3, options.pixels, options.pixels, device=device)
    y = torch.randint(options.classes, (batch,), device=device)
    speeds = []
    for _ in range(options.repeats + 1):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(options.steps):
            loss = cross_entropy(head(model(x)), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        synchronize(device)
        speeds.append(batch * options.steps / (time.perf_counter() - began))
    assert all(tracker.training for tracker in trackers)
    return statistics.median(speeds[1:])


def random_task(images: int, options: argparse.Namespace, device: torch.device) -> Task:
    generator = torch.Generator(device).manual_seed(0)
    shape = (images + 2, 3, options.pixels, options.pixels)
    pixels = torch.randint(256, shape, dtype=torch.uint8, device=device, generator=generator)
    pixels = pixels.contiguous(memory_format=torch.channels_last)  # as images are placed on a device
    rows = torch.arange(images + 2, device=device)
    labels = rows % options.classes
    names = tuple(map(str, range(options.classes)))
    split = (Images(pixels, rows[:images], labels[:images]), Images(pixels, rows[images:], labels[images:]))
    return Task("random", names, *split, Preprocess((0.5,) * 3, (0.25,) * 3))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
