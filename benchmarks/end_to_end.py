"""A whole task sequence with ConFiT: this library against a straightforward loop, in one run on one machine.

    python benchmarks/end_to_end.py                       # the default experiment
    python benchmarks/end_to_end.py --dataset flowers102 --data-dir data --model resnet18.tv_in1k

Prints seconds and their ratio, and writes them as JSON with what they depend on.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
from pathlib import Path

import torch
from straightforward import learn, make_loaders

from confitune.engine import SequenceRun, TrainSettings
from confitune.engine.result import command_line, device_name, versions
from confitune.files import write_whole
from confitune.methods import create_method
from confitune.nn import ContinualNet, create_backbone
from confitune.tasks import dataset_info, load_tasks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="photos")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--model", default="tf_efficientnet_lite0")
    parser.add_argument("--weights")
    parser.add_argument("--means", default="window", choices=["window", "phase"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tasks", type=int)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=2, help="best of so many, taken in turns")
    parser.add_argument("--out", type=Path, default=Path("end_to_end.json"))
    options = parser.parse_args()

    info = dataset_info(options.dataset)
    settings = TrainSettings(epochs=info.epochs, batch_size=info.batch_size, device=options.device)
    device = settings.torch_device()
    backbone = create_backbone(options.model, options.weights)
    tasks = load_tasks(
        options.dataset, mean=backbone.mean, std=backbone.std, data_dir=options.data_dir, tasks=options.tasks
    )

    def ours() -> float:
        net = ContinualNet(copy.deepcopy(backbone.module), means=options.means)
        started = time.perf_counter()
        accuracy = SequenceRun(net, tasks, create_method("confit"), settings).run().acc
        times["confitune"].append(time.perf_counter() - started)
        return accuracy

    def theirs() -> float:
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            model = copy.deepcopy(backbone.module).to(device)
            for module in model.modules():
                if isinstance(module, torch.nn.BatchNorm2d):
                    module.momentum = 0.1
            loaders = make_loaders(tasks, Path(folder), settings.batch_size, options.workers)
            started = time.perf_counter()
            accuracy = learn(model, tasks, loaders, settings.epochs)
            times["straightforward"].append(time.perf_counter() - started)
            return accuracy

    times: dict[str, list[float]] = {"straightforward": [], "confitune": []}
    accuracy = {}
    for _ in range(options.repeats):
        accuracy["straightforward"] = theirs()
        accuracy["confitune"] = ours()
    best = {name: min(values) for name, values in times.items()}
    report = {
        "ratio": best["straightforward"] / best["confitune"],
        "seconds": times,
        "acc": accuracy,
        "dataset": options.dataset,
        "model": options.model,
        "means": options.means,
        "epochs": settings.epochs,
        "batch_size": settings.batch_size,
        "device": device_name(device),
        "versions": versions(),
        "weights_sha256": backbone.weights_sha256,
        "command": command_line(),
    }
    write_whole(options.out, lambda file: file.write(json.dumps(report, indent=1).encode()))
    for name, seconds in best.items():
        print(f"{name:16} {seconds:7.1f} s   ACC {accuracy[name]:.1f}")
    print(f"confitune is {report['ratio']:.2f} times as fast; written to {options.out}")


if __name__ == "__main__":
    main()
