"""Images left out of a task's training choose its epoch and its learning rate; the last batch may be kept."""

import copy
import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from confitune.engine import EpochEnd, Listener, TrainSettings
from confitune.errors import ConfituneError
from confitune.methods import Method, create_method


class Events(Listener):
    def __init__(self):
        self.ends: list[EpochEnd] = []

    def epoch_ended(self, end):
        self.ends.append(end)


class Spoil(Method):
    """Makes the network worse before some epochs."""

    def __init__(self, *epochs):
        super().__init__()
        self.epochs = epochs

    def begin_epoch(self, context, epoch):
        if epoch in self.epochs:
            with torch.no_grad():
                for parameter in context.net.head.parameters():
                    parameter.mul_(-5)


def settings_of(**given):
    return TrainSettings(**{"epochs": 5, "batch_size": 8, "lr": 0.02, "device": "cpu", "validation": 0.25, **given})


@pytest.fixture
def watched(make_fit, make_method, make_net, make_task):
    """A fit of one task, and after each epoch the loss on the images left out and the network."""

    def run(name, *hooks, **given):
        method, events = make_method(name, *hooks), Events()
        net = make_net(name)
        fit = make_fit(net, make_task("a"), method, settings_of(**given), events)
        losses, nets = [], []

        def after():
            losses.append(fit.validation.loss(net, fit.hooks))
            nets.append(copy.deepcopy(net.state_dict()))

        fit.fit(after)
        return fit, events.ends, losses, nets

    return run


@pytest.mark.parametrize("name", ["finetune", "confit", "linear-probe"])
def test_the_epoch_of_the_lowest_loss_is_kept(watched, name):
    fit, _, losses, nets = watched(name, Spoil(4))
    best = losses.index(min(losses))
    assert best < 4
    for key, kept in fit.net.backbone.state_dict().items():
        if name != "confit" or not key.endswith("running_mean"):  # those are recovered once the task is finished
            assert torch.equal(kept, nets[best][f"backbone.{key}"]), key
    assert fit.net.tasks["a"].finished


def test_without_it_the_last_epoch_is_kept(watched):
    fit, _, losses, nets = watched("finetune")
    assert losses[-1] == min(losses)  # nothing was spoiled
    assert all(torch.equal(kept, nets[-1][f"backbone.{key}"]) for key, kept in fit.net.backbone.state_dict().items())


def test_the_learning_rate_is_divided_by_three_after_epochs_without_gain(watched):
    _, ends, losses, _ = watched("finetune", Spoil(1), epochs=7, lr_patience=2, lr=1e-6)
    assert losses[0] == min(losses)
    assert [end.lr for end in ends] == pytest.approx([1e-6] * 3 + [1e-6 / 3] * 2 + [1e-6 / 9] * 2)


def test_images_that_are_left_out_are_not_trained_on(make_fit, make_method, make_net, make_task, batch_recorder):
    task, recorder = make_task("a", train=(24, 16, 8)), batch_recorder()
    fit = make_fit(
        make_net("finetune"), task, make_method("finetune", recorder), settings_of(last_batch=True, epochs=1)
    )
    fit.fit()
    assert (fit.validation.task.test.labels.bincount().tolist(), fit.images) == ([6, 4, 2], 36)
    trained = torch.cat(recorder.inputs[: fit.steps_an_epoch])  # then those that were left out were looked at
    assert len(trained) == 36
    left_out = task.inputs(fit.validation.task.test.batch(torch.arange(12))[0])
    assert not any(torch.equal(image, other) for image in trained for other in left_out)


def test_the_loss_has_penalties_and_terms_in_it(make_fit, make_net, sequence):
    method = create_method("ewc+cpr", {"ewc": {"strength": 50.0}, "cpr": {"beta": 0.3}})
    net = make_net("finetune")
    make_fit(net, sequence[0], method, settings_of()).fit()
    fit = make_fit(net, sequence[1], method, settings_of(epochs=2))
    fit.fit()
    net.reopen(sequence[1].name)
    held = fit.validation.task
    with net.evaluating():
        logits = net(held.inputs(held.test.batch(torch.arange(len(held.test)))[0]))
    log_p = logits.double().log_softmax(1)
    (ewc, _), weights = method.hooks, net.shared_parameters()
    # After its end the anchor is where the weights are: move them, so that the pull is not zero.
    with torch.no_grad():
        ewc.anchor["0.weight"] += 0.1
    pull = sum((ewc.fisher[n].double() * (weights[n].double() - ewc.anchor[n].double()) ** 2).sum() for n in weights)
    expected = cross_entropy(logits, held.test.labels) + 0.3 * (log_p.exp() * log_p).sum(1).mean() + 50 / 2 * pull
    assert 50 / 2 * pull > 1e-4
    assert fit.validation.loss(net, method.hooks) == pytest.approx(expected.item(), rel=1e-5)


def test_images_of_the_last_batch_are_trained_on_where_that_is_asked_for(make_fit, make_method, make_net, make_task):
    for images, kept, steps in ((20, 20, 3), (17, 16, 2), (16, 16, 2), (7, 7, 1)):
        for last_batch in (False, True):
            events = Events()
            task = make_task("a", train=(images - 3, 3))
            settings = settings_of(validation=0.0, epochs=2, last_batch=last_batch, augmentation="flip")
            fit = make_fit(make_net("finetune"), task, make_method("finetune"), settings, events)
            fit.fit()
            assert fit.steps_an_epoch == (steps if last_batch else max(images // 8, 1))
            assert [end.images for end in events.ends] == [
                kept if last_batch else min(images, images // 8 * 8 or 7)
            ] * 2


def test_patience_needs_images_to_look_at(make_fit, make_net, make_task):
    with pytest.raises(ConfituneError, match=r"set validation=0\.1"):
        make_fit(make_net("finetune"), make_task("a"), "finetune", settings_of(validation=0.0, lr_patience=5))


def test_a_loss_that_is_no_number_is_never_the_lowest(make_fit, make_net, make_task, monkeypatch):
    fit = make_fit(make_net("finetune"), make_task("a"), "finetune", settings_of(epochs=1))
    monkeypatch.setattr(fit.validation, "loss", lambda net, hooks: math.nan)
    before = copy.deepcopy(fit.net.backbone.state_dict())
    fit.fit()
    assert any(not torch.equal(now, before[key]) for key, now in fit.net.backbone.state_dict().items())
