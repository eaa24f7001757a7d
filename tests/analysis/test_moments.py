"""Means at test time: in batches or not, and the files that they wait in."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from confitune.analysis import ShiftRecorder
from confitune.analysis.moments import moments_at_test
from confitune.analysis.shift import AFTER_FIRST_TASK


@pytest.mark.parametrize("size", [1, 5, 64])
def test_batches_split_or_not(make_run, sequence, settings, size):
    net = make_run("confit").net
    make_run("confit", net=net).run()
    whole = moments_at_test(net, sequence[0], settings.model_copy(update={"eval_batch_size": len(sequence[0].test)}))
    split = moments_at_test(net, sequence[0], settings.model_copy(update={"eval_batch_size": size}))
    for name in "03":
        np.testing.assert_allclose(split[name], whole[name], rtol=1e-5, atol=1e-6)


def test_moments_wait_in_a_file_to_the_last_bit(make_run, sequence, settings, tmp_path):
    net = make_run("confit").net
    recorder = ShiftRecorder(net, sequence, settings, tmp_path)
    make_run("confit", net=net, listeners=(recorder,)).run()
    kept = moments_at_test(net, sequence[0], settings)
    recorder.task_ended(0, [])
    assert all(torch.equal(found, kept[name]) for name, found in load_file(tmp_path / AFTER_FIRST_TASK).items())
    assert recorder.result()["d1"] == [0.0] * len(kept)
