"""Convolutions move by a share of the step that everything else makes."""

import pytest
import torch

from confitune.methods import create_method


def moved(make_run, make_net, tasks, name, options=None):
    """By how much each parameter moved in one step."""
    start = {key: p.detach().clone() for key, p in make_net("xconv").backbone.named_parameters()}
    task = tasks[0]
    run = make_run(name, options, epochs=1, batch_size=len(task.train), tasks=[task])
    run.run()
    return {key: p.detach() - start[key] for key, p in run.net.backbone.named_parameters()}


@pytest.mark.parametrize("factor", [0.1, 0.5])
def test_one_step(make_run, make_net, tasks, factor):
    plain = moved(make_run, make_net, tasks, "finetune-xconv")
    slow = moved(make_run, make_net, tasks, "finetune-xconv+conv-step", {"conv-step": {"factor": factor}})
    convs = [key for key in plain if key.startswith(("0.", "3."))]
    assert len(convs) == 3
    for key in plain:
        expected = plain[key] * (factor if key in convs else 1)
        torch.testing.assert_close(slow[key], expected, rtol=1e-3, atol=1e-7)


def test_the_whole_step_is_the_method_without_it_to_the_bit(make_run):
    alone = make_run("confit", epochs=5).run().final_sha256
    assert make_run("confit+conv-step", {"conv-step": {"factor": 1}}, epochs=5).run().final_sha256 == alone
    assert make_run("confit+conv-step", epochs=5).run().final_sha256 != alone


def test_nothing_is_kept():
    part = create_method("confit+conv-step").penalties[0]
    assert part.storage() == 0
    assert part.state_dict() == {}
