"""What the simple methods do beside fine-tuning."""

import torch

from confitune.engine import fit
from confitune.methods import create_method
from confitune.methods.linear import fit_linear, folds_of


def test_the_heads_of_lda_are_fitted_at_once(make_net, tasks, make_settings):
    net, task = make_net("lda"), tasks[0]
    x, labels = task.inputs(task.train.pixels[task.train.rows]), task.train.labels
    with torch.no_grad():
        features = net.backbone.eval()(x)
    fit(net, task, create_method("lda"), make_settings(epochs=50))
    expected = fit_linear(features, labels, 3, folds_of(labels, 0))
    with torch.no_grad():
        found = net.eval()(x, "dark")
    torch.testing.assert_close(found.argmax(1), (features @ expected.weight.T + expected.bias).argmax(1))
