"""The few held-out images that a bundle keeps of every task, to see later whether it still knows it."""

from __future__ import annotations

import io
from collections.abc import Mapping

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from confitune.deploy.format import BundleError
from confitune.nn import ContinualNet
from confitune.tasks import CROP, Images, Preprocess, UnreadableImageError, open_rgb

_BATCH = 64  # images decoded and tested at once
_PIXELS = CROP * CROP  # of one image: it was cut when it was kept


def keep_some(images: Images, most: int, seed: int = 0) -> dict[str, Tensor]:
    """Up to `most` images, classes in turn, as PNG: they come back bit for bit."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    labels = images.labels.cpu()[order]
    place = torch.zeros(len(order), dtype=torch.int64)  # of an image within its class
    for label in labels.unique():
        mine = labels == label
        place[mine] = torch.arange(int(mine.sum()))
    chosen = order[torch.argsort(place, stable=True)[:most]].sort().values
    files: list[bytes] = []
    for position in chosen:
        pixels, _ = images.batch(position[None])
        out = io.BytesIO()
        Image.fromarray(pixels[0].cpu().permute(1, 2, 0).contiguous().numpy()).save(out, "PNG", optimize=True)
        files.append(out.getvalue())
    return {
        "png": torch.from_numpy(np.frombuffer(b"".join(files), np.uint8).copy()),
        "ends": torch.tensor(np.cumsum([len(file) for file in files])),
        "labels": images.labels.cpu()[chosen].clone(),
    }


@torch.no_grad()
def accuracy_on(net: ContinualNet, task: str, kept: Mapping[str, Tensor], preprocess: Preprocess) -> float:
    """Accuracy in percent of a task on what `keep_some` kept of it."""
    labels, images, right = kept["labels"], decode_kept(kept, task), 0
    device, was_training = next(net.parameters()).device, net.training
    net.eval()
    for first in range(0, len(labels), _BATCH):
        pixels = torch.stack(images[first : first + _BATCH])
        logits = net(preprocess(pixels.to(device)), task)
        right += int((logits.argmax(1).cpu() == labels[first : first + _BATCH]).sum())
    net.train(was_training)
    return 100.0 * right / max(len(labels), 1)


def decode_kept(kept: Mapping[str, Tensor], task: str) -> list[Tensor]:
    """The pixels of what was kept of a task."""
    try:
        files = kept["png"].numpy().tobytes()
        ends = kept["ends"].tolist()
        if len(ends) != len(kept["labels"]):
            raise BundleError(f"{len(ends)} images and {len(kept['labels'])} labels")
        found = [files[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        images = [open_rgb(io.BytesIO(file), most_pixels=_PIXELS) for file in found]
        if any(image.size != images[0].size for image in images):
            raise BundleError("they are not all of one size")
    except (KeyError, TypeError, UnreadableImageError, BundleError) as error:
        raise BundleError(f"the held-out images of task {task!r} are damaged: {error}") from error
    return [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images]
