"""Kernels for mixed batches against convolutions with the changed weights of each image; without a GPU interpreted."""

import os
import subprocess
import sys
from importlib import import_module

import pytest
import torch
from torch.nn.functional import conv2d

from confitune.nn.geometry import ConvGeometry
from program import SOURCE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = (  # images, inputs, outputs, size, rank, window, stride, padding, dilation
    (3, 70, 66, (9, 7), 4, (3, 3), (1, 1), (1, 1), (1, 1)),
    (2, 3, 64, (20, 21), 4, (7, 7), (2, 2), (3, 3), (1, 1)),  # of a first layer
    (2, 5, 8, (9, 9), 3, (1, 1), (2, 2), (0, 0), (1, 1)),  # of a shortcut
    (1, 4, 4, (12, 13), 1, (3, 5), (1, 2), (2, 1), (2, 1)),
)


def check(images, inputs, outputs, size, rank, window, stride, padding, dilation):
    kernels = import_module("confitune.deploy.mixed_kernels")
    chance = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=chance).to(DEVICE)

    shapes = [(outputs,), (outputs,), (outputs, rank), (rank, inputs), (rank, window[0] * window[1])]
    table = draw(images, sum(torch.Size(shape).numel() for shape in shapes) + 7)
    starts = [sum(torch.Size(shape).numel() for shape in shapes[:place]) for place in range(len(shapes))]
    scale, shift, b, a, windows = (
        table[:, start : start + torch.Size(shape).numel()].unflatten(1, shape)
        for start, shape in zip(starts, shapes, strict=True)
    )
    x = draw(images, inputs, *size).contiguous(memory_format=torch.channels_last)
    weight = draw(outputs, inputs, *window)
    y = conv2d(x, weight, None, stride, padding, dilation).contiguous(memory_format=torch.channels_last)
    changes = torch.einsum("nor,nri,nrk->noik", b, a, windows).view(images, *weight.shape)
    each = zip(x, weight + changes, strict=True)
    expected = torch.cat([conv2d(image[None], own, None, stride, padding, dilation) for image, own in each])
    geometry = ConvGeometry(window, stride, dilation, ((padding[0],) * 2, (padding[1],) * 2))
    found = kernels.inner(x, a, windows, geometry, y.shape[2:])
    close = {"atol": 1e-5 * float(expected.abs().max()), "rtol": 1e-5 if DEVICE == "cpu" else 1e-2}
    torch.testing.assert_close(kernels.finished(found, b, y.clone()), expected, **close)
    normalised = expected * scale[..., None, None] + shift[..., None, None]
    given = y.clone()
    assert kernels.finished(found, b, given, scale, shift) is given
    torch.testing.assert_close(given, normalised, **close)
    torch.testing.assert_close(kernels.finished(found, b, y.clone(), scale, shift, True), normalised.relu(), **close)


def test_kernels_do_what_changed_weights_do():
    pytest.importorskip("triton", reason="Triton comes with torch on Linux only")
    if DEVICE == "cuda":
        for case in CASES:
            check(*case)
        return
    # Interpreted from the first import of Triton on, which this process may have behind it.
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": f"{SOURCE}{os.pathsep}{SOURCE.parent / 'tests'}",
    }
    ran = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == f"{len(CASES)} cases\n"


if __name__ == "__main__":
    for case in CASES:
        check(*case)
    print(f"{len(CASES)} cases")
