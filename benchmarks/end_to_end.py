"""A whole task sequence with ConFiT: this library against a straightforward loop, in one run on one machine.

    python benchmarks/end_to_end.py                       # the default experiment
    python benchmarks/end_to_end.py --dataset flowers102 --data-dir data --model resnet18.tv_in1k --parallel-seeds 5

Prints seconds and their ratio, and writes them as JSON with what they depend on. With --parallel-seeds, also so many
seeds side by side against one.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from report import write_report
from straightforward import learn, make_loaders

from confitune.engine import SequenceRun, TrainSettings, Turns, library_switches, place, steps_of
from confitune.methods import create_method
from confitune.nn import create_backbone
from confitune.tasks import dataset_info, load_tasks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="photos")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--model", default="tf_efficientnet_lite0")
    parser.add_argument("--weights")
    parser.add_argument("--means", default="window", choices=["window", "phase"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--step", default="auto", choices=["auto", "eager", "graph", "compile"])
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--tasks", type=int)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=2, help="of ours; the best is taken")
    parser.add_argument("--baseline-repeats", type=int, default=1, help="0 leaves the straightforward loop out")
    parser.add_argument("--parallel-seeds", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("end_to_end.json"))
    options = parser.parse_args()

    info = dataset_info(options.dataset)
    settings = TrainSettings(
        epochs=info.epochs,
        batch_size=info.batch_size,
        device=options.device,
        step=options.step,
        deterministic=options.deterministic,
    )
    device = settings.torch_device()
    mode = settings.step_mode(device)
    backbone = create_backbone(options.model, options.weights)
    stored = load_tasks(
        options.dataset, mean=backbone.mean, std=backbone.std, data_dir=options.data_dir, tasks=options.tasks
    )
    began = time.perf_counter()
    tasks = place(stored, device)
    placing = time.perf_counter() - began
    method = create_method("confit", {"confit": {"means": options.means}})
    images = sum(len(t.train) // settings.batch_size * settings.batch_size for t in tasks) * settings.epochs

    def run_of(seed: int, *listeners: Any) -> SequenceRun:
        net = method.network(copy.deepcopy(backbone.module))
        return SequenceRun(net, tasks, method, settings.model_copy(update={"seed": seed}), listeners=listeners)

    times: dict[str, list[float]] = {"straightforward": [], "confitune": []}
    accuracy: dict[str, Any] = {}
    for _ in range(options.baseline_repeats):
        accuracy["straightforward"], seconds = straightforward(backbone, stored, settings, device, options)
        times["straightforward"].append(seconds)
        print(f"straightforward {seconds:7.1f} s", flush=True)
    for _ in range(options.repeats):
        run = run_of(0)
        began = time.perf_counter()
        accuracy["confitune"] = run.run().acc
        times["confitune"].append(time.perf_counter() - began)
        print(f"confitune       {times['confitune'][-1]:7.1f} s", flush=True)
    best = {name: min(values) for name, values in times.items() if values}
    numbers: dict[str, Any] = {
        "seconds": times,
        "images_per_second": {name: images / seconds for name, seconds in best.items()},
        "acc": accuracy,
        "images_trained_on": images,
        "seconds_to_place_images_on_device": placing,
        "execution": settings.execution(device),
        "dataset": options.dataset,
        "model": options.model,
        "means": options.means,
        "epochs": settings.epochs,
        "batch_size": settings.batch_size,
    }
    for name, seconds in best.items():
        print(f"{name:16} {seconds:7.1f} s   {images / seconds:9,.0f} images/s   ACC {accuracy[name]:.1f}")
    if options.baseline_repeats:
        numbers["ratio"] = best["straightforward"] / best["confitune"]
        print(f"confitune is {numbers['ratio']:.2f} times as fast")
    if options.parallel_seeds:
        turns = Turns(options.parallel_seeds, apart=steps_of(tasks[0], settings) // options.parallel_seeds)
        runs = [run_of(seed, turns.listener(seed)) for seed in range(options.parallel_seeds)]
        with library_switches(settings, mode):
            began = time.perf_counter()
            results = turns.run([partial(SequenceRun.run, run) for run in runs])
            seconds = time.perf_counter() - began
        numbers["parallel"] = {
            "seeds": options.parallel_seeds,
            "seconds": seconds,
            "images_per_second": options.parallel_seeds * images / seconds,
            "ratio_to_one_seed": options.parallel_seeds * best["confitune"] / seconds,
            "acc": [result.acc for result in results],
            "first_equals_alone": results[0].acc == accuracy["confitune"],
        }
        ratio = numbers["parallel"]["ratio_to_one_seed"]
        print(f"{options.parallel_seeds} seeds at once {seconds:7.1f} s: {ratio:.2f} times one seed's images/s")
    write_report(options.out, device, backbone.weights_sha256, numbers)
    print(f"written to {options.out}")


def straightforward(
    backbone: Any, tasks: Any, settings: TrainSettings, device: torch.device, options: argparse.Namespace
) -> tuple[float, float]:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        model = copy.deepcopy(backbone.module).to(device)
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = 0.1
        originals = None
        if options.dataset == "flowers102":
            originals = sorted(options.data_dir.rglob("image_*.jpg"))
        loaders = make_loaders(tasks, Path(folder), settings.batch_size, options.workers, originals)
        began = time.perf_counter()
        accuracy = learn(model, tasks, loaders, settings.epochs)
        return accuracy, time.perf_counter() - began


if __name__ == "__main__":
    main()
