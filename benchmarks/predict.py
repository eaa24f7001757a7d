"""How long an answer takes on one CPU thread, against what a runtime alone takes; and how long programs take to start.

    python benchmarks/predict.py                        # three minutes
    python benchmarks/predict.py --repeats 20 --starts 2

A bundle of three made-up tasks of `best`, each with norms and changes of its own, and one of tasks that own only a
head; the images are clearly of one task. Of each time the least of many rounds is taken, in which everything that is
compared has its turn. Preprocessing is not part of it: images are given as the network takes them. Start-up is against
`python -c "import torch, timm"`.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from PIL import Image
from report import write_report
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from confitune.deploy import Bundle, Predictor, changing, export_bundle, folded, folding
from confitune.deploy.bundle import Network, TaskRecord
from confitune.deploy.label_space import TaskFeatures
from confitune.nn import create_backbone, two_scales
from confitune.nn.pairing import trace_flow

TASKS, CLASSES, PHOTOS = 3, 4, 20
BATCHES = (1, 16)
Calls = dict[str, Callable[[], object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tf_efficientnet_lite0")
    parser.add_argument("--size", type=int, default=64, help="of images, in pixels")
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--starts", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("predict.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        path, of_heads = Path(scratch) / "model", Path(scratch) / "heads"
        made(path, options.model, options.size, None)
        made(of_heads, options.model, options.size, ["head"])
        bundle, heads = Bundle.open(path), Bundle.open(of_heads)
        times = [timed(bundle, heads, Path(scratch), batch, options) for batch in BATCHES]
        starts = started(path, options.starts)
        sha256 = bundle.network.weights_sha256
    for row in times:
        for name, ms in row["ms"].items():
            print(f"batch {row['batch']:2}, {name:48} {ms:7.3f} ms an image")
        print("  " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in row["ratios"].items()))
    for name, seconds in starts.items():
        print(f"{name:45} {seconds:6.2f} s, {seconds / starts['import torch, timm']:.2f} times")
    numbers = {"model": options.model, "pixels": options.size, "tasks": TASKS, "repeats": options.repeats}
    write_report(options.out, torch.device("cpu"), sha256, {**numbers, "times": times, "start_seconds": starts})


def made(path: Path, model: str, size: int, owns: list[str] | None) -> None:
    """A bundle whose tasks have moved everything that they own by a little."""
    backbone, chance = create_backbone(model, "none"), torch.Generator().manual_seed(0)
    network = Network(
        model=model,
        means="window",
        mean=backbone.mean,  # type: ignore[arg-type]
        std=backbone.std,  # type: ignore[arg-type]
        size=size,
        weights="none",
        weights_sha256=backbone.weights_sha256,
        method="best",
    )
    bundle = Bundle(path, network)
    with changing(bundle) as change:
        change.store_pretrained(backbone.module)
        pretrained = two_scales(copy.deepcopy(backbone.module)).eval()
        net = network.around(backbone.module)
        for task in range(TASKS):
            net.add_task(str(task), [f"{task}-{label}" for label in range(CLASSES)])
            net.eval()(torch.randn(2, 3, size, size, generator=chance))
            with torch.no_grad():
                for name in ("norms", "deltas", "head"):
                    for parameter in net.groups()[name]:
                        parameter.add_(0.01 * torch.randn(parameter.shape, generator=chance))
            net.finish_task(owns)
            labels = torch.arange(CLASSES).repeat(PHOTOS)
            with torch.no_grad():
                features = pretrained(torch.cat([pictures(task, label, size) for label in labels.tolist()]))
            kept = TaskFeatures(features[CLASSES:], labels[CLASSES:], features[:CLASSES], labels[:CLASSES])
            classes = net.tasks[str(task)].classes
            files = {
                "file": change.store_task(net.task_state_dict(str(task)), classes),
                "features": change.store_features(kept),
            }
            change.add_task(str(task), TaskRecord(classes=classes, **files), net.shared_state_dict())


def pictures(task: int, label: int, size: int, count: int = 1) -> Tensor:
    """Of a class, as the network takes them: a pattern with noise on it."""
    pattern = torch.randn(1, 3, 4, 4, generator=torch.Generator().manual_seed(CLASSES * task + label))
    return nn.functional.interpolate(3 * pattern, (size, size)) + 0.1 * torch.randn(count, 3, size, size)


def timed(bundle: Bundle, heads: Bundle, scratch: Path, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    images = pictures(0, 0, options.size, batch)
    file, _ = export_bundle(bundle.path, "0", scratch / "0.onnx")
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(str(file), settings, providers=["CPUExecutionProvider"])
    plain = fused(folded(bundle.load_network(["0"]), "0"))
    predictors = {"with onnxruntime": ready(bundle), "without": None}
    find_spec, folding.find_spec = folding.find_spec, lambda package: None
    predictors["without"] = ready(bundle)
    folding.find_spec = find_spec
    calls: Calls = {"onnxruntime on our own export": lambda: session.run(None, {"images": images.numpy()})}
    calls["folded torch"] = lambda: plain(images)
    for how, predictor in predictors.items():
        calls[f"predict {how}, task given"] = lambda p=predictor: p.predict(images, ["0"] * batch)
        calls[f"predict {how}, guessing among {TASKS}"] = lambda p=predictor: p.predict(images, [None] * batch)
    predictor_of_heads = ready(heads)
    calls[f"predict with onnxruntime, guessing among {TASKS} heads"] = lambda: predictor_of_heads.predict(
        images, [None] * batch
    )
    with torch.inference_mode():
        found = least(calls, options.repeats)
    runtime, torch_alone, given, guessed, torch_given, torch_guessed, head = found.values()
    expected = torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
    logits = [torch.stack(predictor.logits(images, ["0"] * batch)) for predictor in predictors.values()]
    return {
        "batch": batch,
        "ms": {name: 1000 * seconds / batch for name, seconds in found.items()},
        "ratios": {
            "given against onnxruntime": given / runtime,
            "without onnxruntime against folded torch": torch_given / torch_alone,
            "guess against given": guessed / given,
            "the same without onnxruntime": torch_guessed / torch_given,
            "guess of a head against given": head / given,
        },
        "largest difference of logits": max(float((found - expected).abs().max()) for found in logits),
    }


def ready(bundle: Bundle) -> Predictor:
    """A predictor that takes images as the network does, its runners made."""
    predictor = Predictor(bundle, device="cpu")
    predictor.preprocess = lambda images: images  # type: ignore[assignment]
    images = torch.zeros(1, 3, bundle.network.size, bundle.network.size)
    for _ in range(3):
        predictor.predict(images.repeat(TASKS + 1, 1, 1, 1), [*bundle.tasks, None])
    return predictor


def fused(module: nn.Sequential) -> nn.Module:
    """With batch norms in the convolutions before them, channels last: what one would write by hand."""
    backbone = module.get_submodule("backbone")
    flow = trace_flow(backbone)
    for name, norm in list(backbone.named_modules()):
        call = flow.conv_before(name)[0] if isinstance(norm, nn.BatchNorm2d) else None
        if call is not None:
            backbone.set_submodule(call.module, fuse_conv_bn_eval(backbone.get_submodule(call.module), norm))
            backbone.set_submodule(name, getattr(norm, "act", nn.Identity()))
    return module.to(memory_format=torch.channels_last)


def least(calls: Calls, repeats: int) -> dict[str, float]:
    found = dict.fromkeys(calls, math.inf)
    for _ in range(repeats):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            found[name] = min(found[name], time.perf_counter() - began)
    return found


def started(path: Path, repeats: int) -> dict[str, float]:
    """Seconds of whole programs."""
    photo = path.parent / "photo.png"
    Image.new("RGB", (300, 300), "red").save(photo)
    confitune, predict = (sys.executable, "-m", "confitune"), ("predict", str(path), str(photo), "--device", "cpu")
    commands = {
        "import torch, timm": (sys.executable, "-c", "import torch, timm"),
        "confitune methods": (*confitune, "methods"),
        "confitune predict, one photo, task given": (*confitune, *predict, "--task", "0"),
        "confitune predict, one photo": (*confitune, *predict),
    }
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def run(command: tuple[str, ...]) -> None:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)

    return least({name: lambda c=command: run(c) for name, command in commands.items()}, repeats)


if __name__ == "__main__":
    main()
