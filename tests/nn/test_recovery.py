"""Recovered means against measured ones: the mean of the convolution's real output on the same inputs."""

import pytest
import torch
from hypothesis import assume, event, given, settings, strategies as st
from timm.layers import Conv2dSame
from torch import Tensor, nn

from confitune.nn import XconvNorms, trace_flow
from confitune.nn.geometry import ConvGeometry, both_axes
from confitune.nn.parts.xconv import XconvLayer, recover_output_mean

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
axis_pairs = st.tuples(st.integers(0, 4), st.integers(0, 4))


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Conv2d, tuple[int, int], int]:
    """Any convolution, an input size it accepts, and a batch size."""
    kernel = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    dilation = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    groups, per_group, out_per_group = draw(st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 2)))
    kind = draw(st.sampled_from(["padded", "same", "tensorflow"]))
    stride = (1, 1) if kind == "same" else draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    padding = draw(axis_pairs) if kind == "padded" else "same"
    make = Conv2dSame if kind == "tensorflow" else nn.Conv2d
    conv = make(
        groups * per_group,
        groups * out_per_group,
        kernel,
        stride=stride,
        padding=0 if kind == "tensorflow" else padding,
        dilation=dilation,
        groups=groups,
        bias=draw(st.booleans()),
    )
    size = []
    for axis in (0, 1):
        extent = dilation[axis] * (kernel[axis] - 1) + 1
        added = padding[axis] if kind == "padded" else extent // 2
        least = max(1, extent - 2 * added if kind == "padded" else 1)
        size.append(draw(st.integers(least, least + 6)))
    event(kind)
    return conv, (size[0], size[1]), draw(st.integers(1, 3))


@st.composite
def exact_for_phases(draw: st.DrawFn) -> tuple[nn.Conv2d, tuple[int, int], int]:
    """What phase means are exact for: padding d * (K - 1) at any stride, and 1x1 without padding."""
    kernel = draw(st.one_of(st.just((1, 1)), st.tuples(st.integers(1, 5), st.integers(1, 5))))
    dilation = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    stride = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    padding = tuple(d * (k - 1) for d, k in zip(dilation, kernel, strict=True))
    conv = nn.Conv2d(2, 3, kernel, stride, padding, dilation, bias=draw(st.booleans()))
    return conv, draw(st.tuples(st.integers(1, 9), st.integers(1, 9))), draw(st.integers(1, 3))


def track_then_move(
    conv: nn.Conv2d, size: tuple[int, int], batch: int, seed: int, means: str, dtype: torch.dtype, offset: float = 0.0
) -> tuple[Tensor, nn.Conv2d, XconvLayer]:
    """The input of one training forward through conv and BN, the convolution after its weights moved, the layer."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(batch, conv.in_channels, *size, generator=generator, dtype=dtype) * 2 - 1 + offset
    model = nn.Sequential(conv, nn.BatchNorm2d(conv.out_channels)).to(dtype).train()
    assume(conv(x)[:, 0].numel() > 1)  # batch norm refuses to train on one value
    part = XconvNorms(means)
    part.attach(model, trace_flow(model, torch.zeros_like(x)))
    assert part.pairs == {"1": "0"}
    model(x)
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype))
    return x, conv, part.layers["1"]


@settings(max_examples=200)
@given(convolutions(), st.integers(0, 2**16))
def test_window_means_recover_the_measured_mean_in_float64(case, seed):
    x, conv, layer = track_then_move(*case, seed, "window", torch.float64)
    torch.testing.assert_close(layer.recovered_mean(), conv(x).mean((0, 2, 3)), rtol=0, atol=1e-10)


@settings(max_examples=50)
@given(convolutions(), st.integers(0, 2**16))
def test_window_means_recover_the_measured_mean_in_float32(case, seed):
    # Inputs of one sign, as after a ReLU: then |M| is also the scale of what was summed.
    x, conv, layer = track_then_move(*case, seed, "window", torch.float32, offset=1.0)
    recovered = layer.recovered_mean().double()
    conv.double()
    measured = conv(x.double()).mean((0, 2, 3))
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.abs_()
    scale = conv(x.double()).mean((0, 2, 3))  # sum |W| |M| + |bias|
    assert ((recovered - measured).abs() <= 1e-5 * scale).all()


@settings(max_examples=50)
@given(exact_for_phases(), st.integers(0, 2**16))
def test_phase_means_are_exact_for_full_padding_and_for_1x1(case, seed):
    x, conv, layer = track_then_move(*case, seed, "phase", torch.float64)
    torch.testing.assert_close(layer.recovered_mean(), conv(x).mean((0, 2, 3)), rtol=0, atol=1e-10)


@settings(max_examples=75)
@given(convolutions(), st.integers(0, 2**16))
def test_phase_recovery_is_the_convolution_of_the_periodic_map(case, seed):
    """Eq. 11 as written: a map of the input's size that repeats the phase means, convolved and averaged."""
    x, conv, layer = track_then_move(*case, seed, "phase", torch.float64)
    down, right = conv.stride
    periodic = torch.zeros_like(x[:1])
    for a in range(down):
        for b in range(right):
            phase = x[:, :, a::down, b::right]
            if phase.numel():
                periodic[:, :, a::down, b::right] = phase.mean((0, 2, 3))[:, None, None]
    torch.testing.assert_close(layer.recovered_mean(), conv(periodic).mean((0, 2, 3)), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("means", "expected"), [("window", 50.0), ("phase", 56.25)])
def test_where_window_and_phase_means_differ(means, expected):
    # x =  1  2  3  4    K = 3, s = 2, p = 1, W = 1: the four outputs sum what their window has inside the image:
    #      5  6  7  8      top left   1 + 2 + 5 + 6                           = 14
    #      9 10 11 12      top right  2 + 3 + 4 + 6 + 7 + 8                   = 30
    #     13 14 15 16      low left   5 + 6 + 9 + 10 + 13 + 14                = 57
    #                      low right  6 + 7 + 8 + 10 + 11 + 12 + 14 + 15 + 16 = 99   mean 200 / 4 = 50.
    # Phase means: even rows, even columns (1 + 3 + 9 + 11) / 4 = 6, odd columns 7; odd rows 10 and 11. Their map
    #      6  7  6  7      top left   6 + 7 + 10 + 11                         = 34
    #     10 11 10 11      top right  7 + 6 + 7 + 11 + 10 + 11                = 52
    #      6  7  6  7      low left   10 + 11 + 6 + 7 + 10 + 11               = 55
    #     10 11 10 11      low right  2 * (11 + 10 + 11) + 7 + 6 + 7          = 84   mean 225 / 4 = 56.25.
    x = torch.arange(1.0, 17.0).reshape(1, 1, 4, 4)
    model = nn.Sequential(nn.Conv2d(1, 1, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(1)).train()
    part = XconvNorms(means)
    part.attach(model, trace_flow(model))
    model(x)
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    assert part.layers["1"].recovered_mean().tolist() == [expected]


def test_the_pure_functions_on_numbers_by_hand():
    # One channel a group: output 0 sees M[0] alone, output 1 sees M[1] alone.
    weight = torch.tensor([[[[1.0, 2.0]]], [[[3.0, -1.0]]]])
    means = torch.tensor([[[10.0, 1.0]], [[5.0, 4.0]]])
    bias = torch.tensor([0.5, -0.5])
    assert recover_output_mean(weight, bias, means, groups=2).tolist() == [12.5, 10.5]
    # A Linear layer is the case K = 1.
    linear = recover_output_mean(torch.tensor([[1.0, 2.0]]), None, torch.tensor([[[3.0]], [[4.0]]]))
    assert linear.tolist() == [11.0]
    # 1x2 taps at stride 2 without padding on 1x4: tap 0 reads phase 0 only, tap 1 phase 1 only.
    geometry = ConvGeometry(kernel=(1, 2), stride=(1, 2))
    rows, columns = both_axes(geometry.window_from_phases, (1, 4), torch.device("cpu"), torch.float32)
    assert (rows @ torch.tensor([[[7.0, 9.0]]]) @ columns.T).tolist() == [[[7.0, 9.0]]]
