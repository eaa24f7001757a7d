"""What a batch costs whose images belong to different tasks, against a batch of one task, in the same run.

    python benchmarks/mixed.py                        # a minute on 2 cores
    python benchmarks/mixed.py --model resnet18 --method best --device cuda --tasks 64 --batch-size 256

The network takes a mixed batch task by task: it makes the task's own parts live, ready under the weights of today, and
sends the task's images through. On a GPU that are many small launches. There, a predictor sends all images through
together (`deploy/mixed.py`), as a captured CUDA graph. That is compared with the folded network of one task, captured,
in the same precision and memory format. Images are on the device, and answers stay there. And: how long one image of a
task takes that is not on the device, read from a file.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import write_report
from safetensors.torch import load_file, save_file
from step import synchronize
from torch import Tensor

from confitune.deploy import folded
from confitune.deploy.mixed import Captured, MixedNet
from confitune.engine import TrainSettings
from confitune.methods import create_method
from confitune.nn import ContinualNet, create_backbone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tf_efficientnet_lite0")
    parser.add_argument("--method", default="confit", help="whose parts tasks own")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("mixed.json"))
    options = parser.parse_args()
    device = TrainSettings(device=options.device).torch_device()
    backbone = create_backbone(options.model, "none")  # speed does not depend on weights
    net = create_method(options.method).network(backbone.module).to(device)
    generator = torch.Generator().manual_seed(0)
    for number in range(options.tasks):
        net.add_task(f"task{number + 1}", options.classes, generator)
        net.train()
        with torch.no_grad():
            net(torch.randn(4, 3, options.pixels, options.pixels, generator=generator).to(device) + number)
            for parameter in net.parts["deltas"].parameters() if "deltas" in net.parts else ():
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator).to(device))
        net.finish_task()
    net.to(memory_format=torch.channels_last).eval()
    shape = (options.batch_size, 3, options.pixels, options.pixels)
    x = torch.randn(shape, generator=generator).to(device, memory_format=torch.channels_last)
    index = (torch.arange(options.batch_size) % options.tasks).to(device)

    def seconds(task: torch.Tensor | str) -> float:
        synchronize(device)
        began = time.perf_counter()
        with torch.no_grad():
            net(x, task)
        synchronize(device)
        return time.perf_counter() - began

    for task in ("task1", index):  # means recovered, libraries warm
        seconds(task)
    single, mixed = [], []
    for _ in range(options.repeats):  # in turns, so that whatever else the machine does meets both
        single.append(seconds("task1"))
        mixed.append(seconds(index))
    ratio = statistics.median(m / s for s, m in zip(single, mixed, strict=True))
    print(
        f"{options.model}, {options.batch_size} images of {options.pixels} pixels: one task "
        f"{1000 * statistics.median(single):.1f} ms, {options.tasks} tasks {1000 * statistics.median(mixed):.1f} ms, "
        f"{ratio:.2f} times"
    )
    numbers = {
        "model": options.model,
        "method": options.method,
        "pixels": options.pixels,
        "batch_size": options.batch_size,
        "tasks": options.tasks,
        "single_seconds": single,
        "mixed_seconds": mixed,
        "ratio": ratio,
    }
    if device.type == "cuda":
        numbers |= on_gpu(net, x, index, options)
    write_report(options.out, device, backbone.weights_sha256, numbers)


@torch.no_grad()
def on_gpu(net: ContinualNet, x: Tensor, index: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of every way, in turns; ratios against one task's; milliseconds for a task that has to be read."""
    expected = net(x, index)  # warm
    one = folded(net, "task1").to(x.device).to(memory_format=torch.channels_last)

    def forward(images: Tensor) -> tuple[Tensor, Tensor]:
        features = one.backbone(images)
        return features, one.head(features)

    names = [list(net.tasks)[task] for task in index.tolist()]
    ways: dict[str, Callable[[], Any]] = {"task by task": lambda: net(x, index)}
    seconds_to_make: dict[str, float] = {}

    def made(name: str, make: Callable[[], Callable[[], Any]]) -> None:
        began = time.perf_counter()
        ways[name] = make()
        ways[name]()
        synchronize(x.device)
        seconds_to_make[name] = time.perf_counter() - began
        print(f"{name}: made in {seconds_to_make[name]:.1f} s", flush=True)

    def mixing() -> Callable[[], Any]:
        mixed = mixed_of(net, x, options.classes)
        return lambda: mixed(x, names)

    def alone() -> Callable[[], Any]:
        run = Captured(forward, [x.clone()])
        return lambda: run(x)

    made("one task", alone)
    made("mixed", mixing)
    real = expected.isfinite()
    difference = float((ways["mixed"]()[1][:, : expected.shape[1]][real] - expected[real]).abs().max())
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.repeats):
        for name, way in ways.items():
            synchronize(x.device)
            began = time.perf_counter()
            way()
            synchronize(x.device)
            times[name].append(time.perf_counter() - began)

    def ratio(name: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(times[name], times[other], strict=True))

    ratios = {
        "mixed / one task": ratio("mixed", "one task"),
        "task by task / one task": ratio("task by task", "one task"),
    }
    read = milliseconds_to_read(net, x[:1], options)
    for name, of_way in times.items():
        print(f"{name}: {1000 * statistics.median(of_way):.2f} ms")
    for name, value in ratios.items():
        print(f"{name}: {value:.3f}")
    print(f"logits differ by up to {difference:.2g} of {float(expected[real].abs().max()):.2f}")
    print(f"an image of a task that is not on the device: {statistics.median(read):.1f} ms, at most {max(read):.1f} ms")
    return {
        "seconds": times,
        "ratios": ratios,
        "seconds_to_make": seconds_to_make,
        "largest_difference_of_logits": difference,
        "milliseconds_to_read_a_task": read,
        "tf32_convolutions": torch.backends.cudnn.allow_tf32,
    }


def mixed_of(net: ContinualNet, x: Tensor, classes: int) -> MixedNet:
    """The network with all its tasks; a predictor has room for 256, and for some classes more."""
    mixed = MixedNet(net, x.shape[1:], max(len(net.tasks), 256) + 2, 16 * -(-classes // 16))
    for task in list(net.tasks):
        net.prepare(task)
        mixed.load(task, net)
    return mixed


def milliseconds_to_read(net: ContinualNet, x: Tensor, options: argparse.Namespace) -> list[float]:
    """As a predictor reads a task: its file, the network's live tensors, its row; then the image's logits."""
    mixed, found = mixed_of(net, x, options.classes), []
    mixed(x, ["task1"])  # captured
    with tempfile.TemporaryDirectory() as folder:
        for task in list(net.tasks)[: options.repeats]:
            path, classes = Path(folder) / f"{task}.safetensors", net.tasks[task].classes
            save_file({key: value.contiguous().cpu() for key, value in net.task_state_dict(task).items()}, path)
            net.drop_task(task)
            mixed.drop(task)
            synchronize(x.device)
            began = time.perf_counter()
            net.load_task_state_dict(task, load_file(path), classes)
            net.prepare(task)
            mixed.load(task, net)
            mixed(x, [task])[1].cpu()
            found.append(1000 * (time.perf_counter() - began))
    return found


if __name__ == "__main__":
    main()
