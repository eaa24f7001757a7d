"""What parts of a method are given of a task: which images, what is measured on them, their features."""

import pytest
import torch

from confitune.engine import Listener, TaskFit, TrainSettings
from confitune.engine.context import context_of
from confitune.methods import METHODS


class Notes(Listener):
    def __init__(self):
        self.notes = []

    def note(self, message):
        self.notes.append(message)


@pytest.fixture
def begun(make_net, make_task):
    """A task of 46 images that is about to be trained."""

    def begun(seed=0, batch_size=8, index=-1, listener=None, dropout=0.3, **settings):
        net = make_net("xconv", keep_pretrained=True, dropout=dropout)
        settings = TrainSettings(batch_size=batch_size, seed=seed, device="cpu", **settings)
        return TaskFit(net, make_task("dark", (22, 16, 8)), METHODS["confit"], settings, listener or Listener(), index)

    return begun


def inputs(fit, order):
    return fit.task.inputs(fit.task.train.pixels[fit.task.train.rows[order]])


def test_what_is_known_of_the_task(begun):
    context = context_of(begun(epochs=7))
    assert (context.images, context.classes, context.epochs, context.index) == (46, 3, 7, 0)
    assert context.labels.tolist() == [0] * 22 + [1] * 16 + [2] * 8


@pytest.mark.parametrize(("at_most", "found"), [(1000, 40), (46, 40), (40, 40), (39, 32), (20, 16), (8, 8), (3, 8)])
def test_a_sample_is_whole_batches_of_different_images(begun, at_most, found):
    context = context_of(begun())
    random = torch.get_rng_state()
    order = context.sample(at_most)
    assert len(order) == len(set(order.tolist())) == found
    assert 0 <= int(order.min()) <= int(order.max()) < 46
    assert torch.equal(torch.get_rng_state(), random)


def test_a_sample_is_drawn_from_the_seed_and_the_task(begun):
    first = context_of(begun()).sample(24)
    torch.manual_seed(99)
    assert torch.equal(context_of(begun()).sample(24), first)
    assert torch.equal(context_of(begun()).sample(16), first[:16])
    assert not torch.equal(context_of(begun(seed=1)).sample(24), first)
    assert not torch.equal(context_of(begun(index=1)).sample(24), first)
    assert first.tolist() != sorted(first.tolist())


def test_a_sample_of_a_task_smaller_than_a_batch_is_all_of_it(begun):
    assert sorted(context_of(begun(batch_size=64)).sample(10).tolist()) == list(range(46))


@pytest.mark.parametrize("eval_batch_size", [1, 45, 256])
def test_features_are_those_of_the_images_asked_for(begun, eval_batch_size):
    fit = begun(eval_batch_size=eval_batch_size)
    order = torch.randperm(46, generator=torch.Generator().manual_seed(3))[:45]
    fit.net.eval()
    found = context_of(fit).features(order)
    assert (found.shape, found.dtype) == ((45, 16), torch.float32)
    assert not found.requires_grad
    with torch.no_grad():
        torch.testing.assert_close(found, fit.net.backbone(inputs(fit, order)), rtol=1e-5, atol=1e-6)


def test_what_is_measured_on_the_way_does_not_depend_on_how_many_are_evaluated_at_once(begun):
    states = []
    for eval_batch_size in (7, 39, 256):
        fit = begun(eval_batch_size=eval_batch_size)
        context = context_of(fit)
        order = context.sample(40)
        with fit.net.at_pretrained(40):
            context.features(order)
        states.append(fit.net.pretrained.state())
    for key, value in states[0].items():
        assert all(torch.equal(other[key], value) for other in states[1:]), key
    # The average over images: the first convolution reads them, at stride 2 and padding 1.
    mean = inputs(fit, order)[:, :, ::2, ::2].mean((0, 2, 3))
    torch.testing.assert_close(states[0]["0.input_means"][:, 1, 1], mean, rtol=1e-5, atol=1e-6)


def test_a_note_names_the_task(begun):
    notes = Notes()
    context_of(begun(listener=notes)).note("so it is")
    assert notes.notes == ["task 'dark': so it is"]
