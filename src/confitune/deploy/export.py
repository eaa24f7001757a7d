"""One task of a network or a bundle as a file for another runtime: ONNX, with batch norm folded into convolutions.

The file takes `images` [batch, channels, height, width], preprocessed as the backbone wants them, and gives `logits`
[batch, classes] for any batch size. What it holds besides the network says how to use it: the task, its classes, the
size, mean and std of its images.
"""

from __future__ import annotations

import importlib
import io
import json
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from confitune import __version__
from confitune.deploy.bundle import Bundle
from confitune.deploy.folding import copied_to_cpu, example_images, folded
from confitune.deploy.held_out import decode_kept
from confitune.deploy.predictor import Predictor
from confitune.errors import ConfituneError
from confitune.files import write_whole
from confitune.nn import ContinualNet
from confitune.nn.geometry import Size
from confitune.tasks import CROP, Preprocess

_TOLERANCE = 1e-4
_COMPARED = 10  # images


def export_network(
    net: ContinualNet, task: str, path: Path, *, size: int | Size, preprocess: Preprocess | None = None
) -> None:
    """Write one task of `net` as a single ONNX file with weights and metadata inside.

    Args:
        path: ends in .onnx; folders are made.
        size: of the images, (height, width) or one number for both.
        preprocess: how images become network input; its mean, std, resize and crop are written into the metadata.
    """
    if path.suffix != ".onnx":
        raise ConfituneError(f"{path} is no .onnx file")
    path.parent.mkdir(parents=True, exist_ok=True)
    module, example, metadata = _ready(net, task, size, preprocess)
    _optional("onnx")
    _optional("onnxscript")  # torch's exporter is built on it
    with _quiet():
        try:
            data = _onnx(module, example, metadata)
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            raise ConfituneError(f"ONNX cannot take {type(net.backbone).__name__}: {first}") from error
    write_whole(path, lambda out: out.write(data))


def _onnx(module: nn.Module, example: Tensor, metadata: dict[str, object]) -> bytes:
    program = torch.onnx.export(
        module,
        (example,),
        dynamo=True,
        verbose=False,
        input_names=["images"],
        output_names=["logits"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        external_data=False,
    )
    assert program is not None
    model: Any = program.model_proto
    for node in model.graph.node:
        node.ClearField("metadata_props")  # stack traces, with the paths of source files
    # ONNX keeps text alone: the task's name as it is, lists and numbers as JSON.
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}
    _optional("onnx").helper.set_model_props(model, texts)
    data: bytes = model.SerializeToString()
    return data


def check_export(path: Path, net: ContinualNet, task: str, images: Tensor) -> float:
    """The largest absolute difference between the logits of an exported file and those of the network.

    Raises a `ConfituneError` where it is above 1e-4 (times the largest logit, where that is above 1). The network is
    asked on the CPU in float32, as the file is run.

    Args:
        path: what `export_network` wrote.
        images: a batch as the backbone takes them.
    """
    images = images.detach().to("cpu", torch.float32)
    with torch.no_grad():
        expected = copied_to_cpu(net)(images, task)
    found = _logits(path, images)
    if found.shape != expected.shape:
        raise ConfituneError(
            f"{path} gives logits of shape {tuple(found.shape)}, task {task!r} of the network {tuple(expected.shape)}: "
            "is it the file of another task?"
        )
    largest: float = (found - expected).abs().max().item()
    allowed = _TOLERANCE * max(1.0, expected.abs().max().item())
    if not largest <= allowed:  # nor NaN
        raise ConfituneError(
            f"{path} and task {task!r} of the network differ by up to {largest:.2g} in their logits ({allowed:.2g} is "
            "rounding): if the network was trained on since, or this is another one, export it again; otherwise try "
            "another version of torch or onnxruntime"
        )
    return largest


def export_bundle(path: Path, task: str, out: Path | None = None) -> tuple[Path, float]:
    """Write one task of the bundle in `path`; gives the file, and its largest difference to the bundle's logits.

    Args:
        out: the file; default: the task's name in the current folder.
    """
    bundle = Bundle.open(path)
    predictor = Predictor(bundle, device="cpu")
    net = predictor.network_for(task)
    out = out or Path(re.sub(r"[^\w-]+", "_", task) + ".onnx")
    export_network(net, task, out, size=bundle.network.size, preprocess=predictor.preprocess)
    kept = bundle.held_out(task)
    if kept is not None and len(kept["labels"]):
        images = torch.stack(decode_kept(kept, task)[:_COMPARED])
    else:
        chance = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (_COMPARED, 3, CROP, CROP), dtype=torch.uint8, generator=chance)
    return out, check_export(out, net, task, predictor.preprocess(images).contiguous())


def _ready(
    net: ContinualNet, task: str, size: int | Size, preprocess: Preprocess | None
) -> tuple[nn.Module, Tensor, dict[str, object]]:
    """The module to export, an example of its input, and the metadata."""
    module = folded(net, task)
    plane = (size, size) if isinstance(size, int) else (size[0], size[1])
    entry = net.tasks[task]
    sized = any(part.input_means for part in net.parts.values())
    if sized and entry.finished and entry.image_size not in (None, plane):
        raise ConfituneError(
            f"task {task!r} was trained on images of {entry.image_size}, and its recovered means hold for that size "
            f"alone: export it with size={entry.image_size}, not {plane}"
        )
    example = example_images(module.get_submodule("backbone"), plane)
    if example is None or example.dim() != 4:
        name = type(net.backbone).__name__
        raise ConfituneError(f"{name} does not run on images of {plane}: pass the size it was made for")
    metadata: dict[str, object] = {
        "confitune": __version__,
        "task": task,
        "classes": list(entry.classes),
        "size": plane,
    }
    if preprocess is not None:
        metadata |= {key: getattr(preprocess, key) for key in ("mean", "std", "resize", "crop")}
    return module, example, metadata


def _optional(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfituneError(
            f"ONNX files need the package {package}, which is not installed: pip install 'confitune[export]'"
        ) from error


def _logits(path: Path, images: Tensor) -> Tensor:
    """Run an exported file."""
    runtime = _optional("onnxruntime")
    try:
        options = runtime.SessionOptions()
        options.log_severity_level = 3  # errors
        session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        return torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])
    except Exception as error:
        raise ConfituneError(f"{path} does not run on images of shape {tuple(images.shape)}: {error}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what exporters print, warn and log on the way; errors are raised as ever."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
