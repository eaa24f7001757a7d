"""Tasks of a network or a bundle as a file for another runtime, in one of the formats that have a module here.

A format is a module with `ENDING` of its files, `write(content)`, which gives the bytes of one, and `run(path, images,
task)`, which gives the logits that the file gives.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from confitune.deploy.bundle import Bundle
from confitune.deploy.export.content import Steps, content_of
from confitune.deploy.folding import copied_to_cpu
from confitune.errors import ConfituneError
from confitune.files import write_whole
from confitune.nn import ContinualNet
from confitune.nn.geometry import Size
from confitune.tasks import CROP, Preprocess
from confitune.tasks.decode import RESIZE

_TOLERANCE = 1e-4
_COMPARED = 10  # images


def _found() -> dict[str, Any]:
    here = __name__.rpartition(".")[0]
    names = [info.name for info in pkgutil.iter_modules(importlib.import_module(here).__path__)]
    modules = {name: importlib.import_module(f"{here}.{name}") for name in names if name not in ("export", "content")}
    return {name: module for name, module in modules.items() if hasattr(module, "ENDING")}


FORMATS: Mapping[str, Any] = _found()


def export_network(
    net: ContinualNet,
    task: str | Sequence[str],
    path: Path,
    *,
    size: int | Size,
    preprocess: Preprocess | None = None,
    cut: Steps = (),
    version: str | None = None,
) -> None:
    """Write one task of `net`, or several, as a single file with weights and metadata inside.

    Args:
        task: its name; or names: the file is then told which, by their places, as a second input.
        path: its ending says the format; folders are made.
        size: of the images, (height, width) or one number for both.
        preprocess: how images become network input; its steps, mean and std are written into the metadata.
        cut: what was done to images before, for the metadata as well.
        version: of the bundle, likewise.
    """
    write, several = _format_of(path).write, not isinstance(task, str)
    content = content_of(net, list(task) if several else [str(task)], size, preprocess, cut, version, several)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        data = write(content)
    except ConfituneError:
        raise
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise ConfituneError(f"{path.suffix} files cannot take {type(net.backbone).__name__}: {first}") from error
    write_whole(path, lambda out: out.write(data))


def check_export(path: Path, net: ContinualNet, task: str, images: Tensor) -> float:
    """The largest absolute difference between the logits of an exported file and those of the network.

    Raises a `ConfituneError` where it is above 1e-4 (times the largest logit, where that is above 1). The network is
    asked on the CPU in float32, as the file is run.

    Args:
        path: what `export_network` wrote.
        images: a batch as the backbone takes them.
    """
    images = images.detach().to("cpu", torch.float32).contiguous()
    with torch.no_grad():
        expected = copied_to_cpu(net)(images, task)
    found = _format_of(path).run(path, images, task)
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


def export_bundle(path: Path, task: str | None, out: Path | None = None, to: str = "onnx") -> tuple[Path, float]:
    """Write one task of the bundle in `path`; gives the file, and its largest difference to the bundle's logits.

    Args:
        task: its name; None: all tasks in one file.
        out: the file; default: the name of the task or the bundle in the current folder.
        to: the format.
    """
    if to not in FORMATS:
        raise ConfituneError(f"there is no format {to!r}; there are: {', '.join(FORMATS)}")
    bundle = Bundle.open(path)
    tasks = list(bundle.tasks) if task is None else [task]
    net, ready = bundle.load_network(tasks), bundle.network.preprocess()
    name = path.resolve().name if task is None else task
    out = out or Path(re.sub(r"[^\w-]+", "_", name) + FORMATS[to].ENDING)
    cut = (("resize", RESIZE), ("crop", CROP))
    export_network(net, task or tasks, out, size=bundle.network.size, preprocess=ready, cut=cut, version=bundle.version)
    return out, max(check_export(out, net, name, ready(_some_images(bundle, name))) for name in tasks)


def _some_images(bundle: Bundle, task: str) -> Tensor:
    kept = bundle.held_out(task)
    if kept is not None:
        return kept.test.pixels[:_COMPARED]
    chance = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (_COMPARED, 3, CROP, CROP), dtype=torch.uint8, generator=chance)


def _format_of(path: Path) -> Any:
    for module in FORMATS.values():
        if path.suffix == module.ENDING:
            return module
    raise ConfituneError(f"{path}: files end in {' or '.join(module.ENDING for module in FORMATS.values())}")
