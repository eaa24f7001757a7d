"""Where taps land, counted by hand."""

import pytest
import torch
from hypothesis import assume, example, given, strategies as st

from confitune.nn.geometry import ConvGeometry


@given(
    kernel=st.integers(1, 5),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 2),
    padding=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    size=st.integers(1, 12),
)
@example(kernel=5, stride=3, dilation=2, padding=(4, 0), size=9)
def test_taps_count_where_each_tap_reads(kernel, stride, dilation, padding, size):
    assume(size + sum(padding) > dilation * (kernel - 1))
    geometry = ConvGeometry((kernel, 1), (stride, 1), (dilation, 1), (padding, (0, 0)))
    starts = range(0, size + sum(padding) - dilation * (kernel - 1), stride)
    expected = [
        [sum(s + dilation * i - padding[0] == h for s in starts) / len(starts) for h in range(size)]
        for i in range(kernel)
    ]
    torch.testing.assert_close(geometry.taps(0, size), torch.tensor(expected, dtype=torch.float64))


def test_an_input_that_is_too_small_is_named():
    with pytest.raises(ValueError, match="an input of 2 pixels is too small"):
        ConvGeometry(kernel=(3, 3)).taps(0, 2)
