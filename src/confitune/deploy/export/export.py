"""Tasks of a network or a bundle as a file for another runtime, in one of the formats that have a module here.

A format is a module that is called like the ending of its files, with `write(content)`, which gives the bytes of one,
and `run(path, images, task)`, which gives the logits that the file gives.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from confitune import __version__
from confitune.deploy.bundle import Bundle
from confitune.deploy.folding import copied_to_cpu, example_images, folded
from confitune.errors import ConfituneError
from confitune.files import write_whole
from confitune.nn import ContinualNet, state_sha256
from confitune.nn.geometry import Size
from confitune.tasks import Preprocess
from confitune.tasks.decode import CROP, RESIZE

_TOLERANCE = 1e-4
_COMPARED = 10  # images
FORMATS = [info.name for info in pkgutil.iter_modules([str(Path(__file__).parent)]) if info.name != "export"]
Factors = tuple[Tensor, ...]  # of a change of a weight: B [O, r] and A [r, I], or B, channels [r, I] and windows [r, K]


@dataclass(frozen=True)
class Own:
    """What a task has in place of the first one's tensors, by their names in the backbone, and its head."""

    backbone: str  # hash of the whole; equal for tasks that differ in their heads alone
    tensors: Mapping[str, Tensor]
    changes: Mapping[str, Factors]
    head: nn.Linear


@dataclass(frozen=True)
class Content:
    """What to write: one task, or all of them for a file that is told which."""

    module: nn.Module  # the first task's network, images to logits, of stock layers alone
    example: Tensor  # a batch of its input
    facts: Mapping[str, Any]  # how to use the file, for its metadata; JSON can hold them
    tasks: Sequence[Own] = ()  # of several: what each has of its own; `module` then has the weights that all share


def export_network(
    net: ContinualNet,
    task: str | Sequence[str],
    path: Path,
    *,
    size: int | Size,
    preprocess: Preprocess | None = None,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Write one task of `net`, or several, as a single file with weights and metadata inside.

    Args:
        task: its name; or names: the file is then told which, by their places, as a second input.
        path: its ending says the format; folders are made.
        size: of the images, (height, width) or one number for both.
        preprocess: how images become network input; its steps, mean and std are written into the metadata.
        facts: more for the metadata, or in place of what is written there.
    """
    write, names = _format_of(path).write, [task] if isinstance(task, str) else list(task)
    plane = (size, size) if isinstance(size, int) else (size[0], size[1])
    for name in names:
        net.task_state_dict(name)  # or an error that names those there are
        trained = net.tasks[name].image_size if net.tasks[name].finished else None
        if any(part.input_means for part in net.parts.values()) and trained not in (None, plane):
            raise ConfituneError(
                f"task {name!r} was trained on images of {trained}, and its recovered means hold for that size alone: "
                f"export it with size={trained}, not {plane}"
            )
    kind, module = type(net.backbone).__name__, folded(net, names[0])
    example = example_images(module[0], plane)
    if example is None:
        raise ConfituneError(f"{kind} does not run on images of {plane}: pass the size it was made for")
    said: dict[str, Any] = {
        "confitune": __version__,
        "tasks": [{"name": name, "classes": list(net.tasks[name].classes)} for name in names],
        "size": plane,
    }
    if preprocess is not None:
        said |= {"steps": _steps(preprocess), "mean": preprocess.mean, "std": preprocess.std}
    owned = () if isinstance(task, str) else _owned(net, names, module[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        data = write(Content(module, example, {**said, **(facts or {})}, owned))
    except ConfituneError:
        raise
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise ConfituneError(f"{path.suffix} files cannot take {kind}: {first}") from error
    write_whole(path, lambda out: out.write(data))


def _steps(preprocess: Preprocess) -> list[tuple[str, int]]:
    """The short side that images are resized to, the centre square that is cut; bilinear, as Pillow does it."""
    sides = {"resize": preprocess.resize, "crop": preprocess.crop}
    return [(step, side) for step, side in sides.items() if side is not None]


@torch.no_grad()
def _owned(net: ContinualNet, tasks: Sequence[str], backbone: nn.Module) -> list[Own]:
    """What each task has of its own; `backbone`, the first one's, gets the weights that all share."""
    found, shared = [], backbone.state_dict()
    for name in _changes(net, tasks[0]):
        shared[name].copy_(net.backbone.get_parameter(name))
    for task in tasks:
        module, changes = folded(net, task), _changes(net, task)
        state = {name: tensor for name, tensor in module[0].state_dict().items() if name not in changes}
        own = {name: tensor for name, tensor in state.items() if not torch.equal(tensor, shared[name])}
        head = module[1]
        assert isinstance(head, nn.Linear)
        found.append(Own(state_sha256(module[0]), own, changes, head))
    return found


def _changes(net: ContinualNet, task: str) -> dict[str, Factors]:
    state = net.task_state_dict(task)
    layers = [key.removesuffix(".delta.b") for key in state if key.endswith(".delta.b")]
    factors = {layer: [state.get(f"{layer}.delta.{key}") for key in ("b", "a", "window")] for layer in layers}
    return {f"{layer}.weight": tuple(f.cpu() for f in found if f is not None) for layer, found in factors.items()}


def check_export(path: Path, net: ContinualNet, task: str, images: Tensor) -> float:
    """The largest absolute difference between the logits of an exported file and those of the network.

    Raises a `ConfituneError` where it is above 1e-4 (times the largest logit, where that is above 1). The network is
    asked on the CPU in float32, as the file is run.

    Args:
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


def export_bundle(path: Path, task: str | None, out: Path | None = None, to: str | None = None) -> tuple[Path, float]:
    """Write one task of the bundle in `path`; gives the file, and its largest difference to the bundle's logits.

    Args:
        task: its name; None: all tasks in one file.
        out: the file, whose ending says the format; default: the name of the task or the bundle in the current folder.
        to: the format where `out` is not given; default: onnx.
    """
    if to not in (None, *FORMATS):
        raise ConfituneError(f"there is no format {to!r}; there are: {', '.join(FORMATS)}")
    if out and to and out.suffix != f".{to}":
        raise ConfituneError(f"{out}: its ending says the format: leave --to out, or let the file end in .{to}")
    bundle = Bundle.open(path)
    tasks = list(bundle.tasks) if task is None else [task]
    net, ready = bundle.load_network(tasks), bundle.network.preprocess()
    name = path.resolve().name if task is None else task
    out = out or Path(re.sub(r"[^\w-]+", "_", name) + f".{to or 'onnx'}")
    facts = {"version": bundle.manifest.version, "steps": [("resize", RESIZE), ("crop", CROP), *_steps(ready)]}
    export_network(net, task or tasks, out, size=bundle.network.size, preprocess=ready, facts=facts)
    return out, max(check_export(out, net, name, ready(_some_images(bundle, name))) for name in tasks)


def _some_images(bundle: Bundle, task: str) -> Tensor:
    kept = bundle.held_out(task)
    if kept is not None:
        return kept.test.pixels[:_COMPARED]
    chance = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (_COMPARED, 3, CROP, CROP), dtype=torch.uint8, generator=chance)


def _format_of(path: Path) -> Any:
    if path.suffix[1:] not in FORMATS:
        raise ConfituneError(f"{path}: files end in {' or '.join(f'.{name}' for name in FORMATS)}")
    return importlib.import_module(f"{__package__}{path.suffix}")
