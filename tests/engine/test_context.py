"""What a method is given of a task: which images, in which order, their features."""

from itertools import chain

import pytest
import torch
from torch.nn.functional import cross_entropy

from confitune.engine import Listener, TrainSettings
from confitune.tasks import Images


class Notes(Listener):
    def __init__(self):
        self.notes = []

    def note(self, message):
        self.notes.append(message)


@pytest.fixture
def begun(make_fit, make_net, make_task):
    """A task of 46 images that is about to be trained."""

    def begun(seed=0, batch_size=8, index=-1, listener=None, **settings):
        settings = TrainSettings(batch_size=batch_size, seed=seed, device="cpu", **settings)
        net, task = make_net("confit", dropout=0.3), make_task("dark", (22, 16, 8))
        return make_fit(net, task, "confit", settings, listener, index)

    return begun


def stored(context, order):
    return context.task.inputs(context.task.train.pixels[context.task.train.rows[order]])


def test_what_is_known_of_the_task(begun):
    context = begun(epochs=7)
    assert (context.images, context.index, context.net.current_task) == (46, 0, "dark")
    assert context.labels.tolist() == [0] * 22 + [1] * 16 + [2] * 8


# ---- all images, in batches ------------------------------------------------------------------------------------------


def order_of(context, size=20):
    """The positions of the images that batches hold, in their order; every image is different."""
    everything = stored(context, torch.arange(46))
    places = {image.numpy().tobytes(): place for place, image in enumerate(everything)}
    found = []
    for x, labels in context.batches(size):
        here = [places[image.numpy().tobytes()] for image in x]
        assert context.labels[here].tolist() == labels.tolist()
        found.append(here)
    return found


@pytest.mark.parametrize(("size", "sizes"), [(20, [20, 20, 6]), (46, [46]), (100, [46]), (9, [9] * 5 + [1])])
def test_batches_hold_every_image_once_the_rest_included(begun, size, sizes):
    order = order_of(begun(), size)
    assert [len(batch) for batch in order] == sizes
    assert sorted(chain(*order)) == list(range(46))


def test_batches_are_not_sorted_by_class_though_images_are(begun):
    """The gradient of a batch of one class alone is larger than that of a mixed one."""
    context = begun()
    assert context.labels.tolist() == sorted(context.labels.tolist())
    first, second, last = (labels.tolist() for _, labels in context.batches(20))
    assert len(set(first)) == len(set(second)) == 3
    assert [*first, *second, *last] != sorted(context.labels.tolist())


def test_the_order_of_batches_is_the_same_each_time_for_a_seed_and_a_task(begun):
    context = begun()
    first = order_of(context)
    torch.manual_seed(99)
    random = torch.get_rng_state()
    assert order_of(context) == first
    assert torch.equal(torch.get_rng_state(), random)
    assert order_of(begun()) == first
    assert list(chain(*order_of(begun(), 7))) == list(chain(*first))
    assert order_of(begun(batch_size=16)) == first
    assert order_of(begun(seed=1)) != first
    assert order_of(begun(index=1)) != first


# ---- gradients and features ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_gradients_are_summed_over_batches_and_leave_no_trace(begun, smoothing):
    context = begun(label_smoothing=smoothing)
    weight = context.net.backbone.get_parameter("0.weight")
    buffers = [buffer.clone() for buffer in context.net.buffers()]
    torch.manual_seed(1)  # of dropout
    (found,) = context.gradients([weight], 2)
    assert all(torch.equal(now, before) for now, before in zip(context.net.buffers(), buffers, strict=True))
    weight.requires_grad_(True)
    expected = torch.zeros_like(weight)
    torch.manual_seed(1)
    order = context._order("gradients", 0)
    for positions in (order[:8], order[8:16]):
        pixels, labels = context.task.train.batch(positions)
        loss = cross_entropy(context.net(context.task.inputs(pixels)), labels, label_smoothing=smoothing)
        expected += torch.autograd.grad(loss, [weight])[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_gradients_are_of_whole_batches(begun, monkeypatch):
    """An image that is left over has no batch moments."""
    context, seen, batch = begun(batch_size=15), [], Images.batch
    monkeypatch.setattr(Images, "batch", lambda images, at: seen.append(at) or batch(images, at))
    context.gradients([context.net.backbone.get_parameter("0.weight")], 16)
    assert [len(positions) for positions in seen] == [15, 15, 15]  # of 46


@pytest.mark.parametrize("at_once", [1, 17, 256])
def test_features_are_those_of_the_images_in_their_order(begun, monkeypatch, at_once):
    monkeypatch.setattr("confitune.engine.context._AT_ONCE", at_once)
    context = begun()
    context.net.eval()
    with torch.no_grad():
        found = context.features()
        assert (found.shape, found.dtype) == ((46, 16), torch.float32)
        expected = context.net.backbone(stored(context, torch.arange(46)))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_features_are_taken_in_batches_of_few_sizes(begun, monkeypatch):
    """A GPU's libraries choose algorithms for each size; and a last batch of one image would have no moments."""
    context, sizes = begun(), []
    context.net.backbone.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    for at_once, expected in ((256, [48]), (20, [16] * 3), (40, [32] * 2)):
        monkeypatch.setattr("confitune.engine.context._AT_ONCE", at_once)
        with context.net.evaluating(batch_moments=True):
            assert context.features().shape == (46, 16)
        assert sizes == expected
        sizes.clear()


def test_a_note_names_the_task(begun):
    notes = Notes()
    begun(listener=notes).note("so it is")
    assert notes.notes == ["task 'dark': so it is"]


def test_few_images_get_more_epochs_where_steps_are_asked_for(begun):
    assert begun(epochs=3).epochs == 3
    assert begun(epochs=3, min_steps=10).epochs == 3  # 5 an epoch
    assert begun(epochs=3, min_steps=16).epochs == 4
