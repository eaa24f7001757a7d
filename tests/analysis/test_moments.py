"""Mean and variance in pieces against those of the whole."""

import numpy as np
import torch

from confitune.analysis.moments import Moments


def test_moments_in_pieces():
    chance = np.random.default_rng(0)
    x = 1000 + chance.normal(size=(75, 3, 4, 5)) * [[[[0.01]], [[1.0]], [[100.0]]]]
    moments = Moments()
    for piece in torch.from_numpy(x).split([1, 40, 34]):
        moments.add(piece)
    np.testing.assert_allclose(moments.mean, x.mean((0, 2, 3)), rtol=1e-13)
    np.testing.assert_allclose(moments.variance, x.var((0, 2, 3)), rtol=1e-10)
