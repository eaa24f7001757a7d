"""One seed, one result; a seed changes head initialisation and batch order, nothing else."""

import dataclasses
import math

import pytest
import torch

from confitune.engine import Executor, TaskFit, TrainSettings, network_sha256
from confitune.methods import create_method
from confitune.nn import state_sha256


class Recorder:
    """Stands in for a task's preprocessing and keeps the pixels of every batch."""

    def __init__(self, preprocess):
        self.preprocess, self.batches = preprocess, []

    def __call__(self, pixels):
        self.batches.append(pixels.clone())
        return self.preprocess(pixels)


def fitted(net, task, method="finetune", index=0, **settings):
    settings = TrainSettings(**{"epochs": 2, "batch_size": 8, "device": "cpu", **settings})
    TaskFit(Executor(net, settings), task, create_method(method), index).fit()


@pytest.mark.parametrize("method", ["confit", "finetune", "single-task"])
def test_same_seed_same_result_other_seed_other_weights(make_run, method):
    options = {"dropout": 0.2, "augmentation": "flip"}
    first, again = make_run(method, **options).run(), make_run(method, **options).run()
    assert first.accuracy_matrix == again.accuracy_matrix
    assert first.final_sha256 == again.final_sha256
    other = make_run(method, seed=1, **options).run()
    assert other.final_sha256 != first.final_sha256
    assert other.weights_sha256 == first.weights_sha256


def test_results_do_not_depend_on_the_global_random_state(make_run):
    torch.manual_seed(1)
    first = make_run(dropout=0.2).run()
    torch.manual_seed(2)
    assert make_run(dropout=0.2).run().final_sha256 == first.final_sha256


def test_training_leaves_the_global_random_state_alone(make_fit, make_net, make_task):
    settings = TrainSettings(epochs=2, batch_size=8, augmentation="flip", device="cpu")
    fit = make_fit(make_net("confit", dropout=0.2), make_task("dark"), "confit", settings)
    before = torch.get_rng_state()
    fit.fit()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_seed_changes_the_head_and_not_the_backbone(make_fit, make_net, make_task):
    nets = [make_net("finetune") for _ in range(2)]
    for seed, net in enumerate(nets):
        settings = TrainSettings(seed=seed, device="cpu")
        make_fit(net, make_task("dark"), "finetune", settings)
    assert state_sha256(nets[0].backbone) == state_sha256(nets[1].backbone)
    heads = [net.head.linear.weight.detach() for net in nets]
    assert not torch.equal(*heads)
    bound = 1 / math.sqrt(16)  # torch's own: uniform within 1 / sqrt(inputs)
    for head in heads:
        assert head.abs().max() <= bound
        assert head.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.25)


def test_heads_of_different_tasks_differ_under_one_seed(make_fit, make_net, make_task):
    heads = []
    for index in range(2):
        net = make_net("finetune")
        make_fit(net, make_task("dark"), "finetune", index=index)
        heads.append(net.head.linear.weight.detach())
    assert not torch.equal(*heads)


def batches_of(make_net, task, **options):
    recorder = Recorder(task.preprocess)
    fitted(make_net("finetune"), dataclasses.replace(task, preprocess=recorder), **options)
    return recorder.batches


def order_of(task, batches):
    """Which training images the batches hold; every image of the tiny tasks is different."""
    stored = {image.numpy().tobytes(): place for place, image in enumerate(task.train.pixels[task.train.rows])}
    return [stored[image.numpy().tobytes()] for batch in batches for image in batch]


def test_epochs_are_shuffled_anew_by_seed_task_and_epoch(make_net, make_task):
    task = make_task("dark")  # 48 images: 6 batches of 8
    order = order_of(task, batches_of(make_net, task))
    first, second = order[:48], order[48:]
    assert sorted(first) == sorted(second) == list(range(48))
    assert first != second
    assert first != list(range(48))
    assert order_of(task, batches_of(make_net, task)) == order
    assert order_of(task, batches_of(make_net, task, seed=1))[:48] != first
    assert order_of(task, batches_of(make_net, task, index=1))[:48] != first


def test_the_number_of_epochs_does_not_shift_the_order(make_net, make_task):
    task = make_task("dark")
    short, long = (order_of(task, batches_of(make_net, task, epochs=epochs)) for epochs in (1, 3))
    assert long[:48] == short


def test_dropout_is_drawn_anew_in_every_epoch_and_task_and_repeats_with_the_seed(make_net, make_task):
    def masks(**options):
        net, seen = make_net("finetune", dropout=0.5), []
        # Ones in: what comes out is the mask alone, whatever the features are.
        net.backbone[-1].register_forward_pre_hook(lambda module, args: torch.ones_like(args[0]))
        net.backbone[-1].register_forward_hook(lambda module, args, out: seen.append(out.clone()))
        fitted(net, make_task("dark"), batch_size=48, **options)
        return seen[:2]

    first, second = masks()
    assert not torch.equal(first, second)
    assert all(map(torch.equal, masks(), (first, second)))
    assert not torch.equal(masks(index=1)[0], first)
    assert not torch.equal(masks(seed=1)[0], first)


def test_the_hash_is_of_the_network_whatever_task_is_live(make_run):
    run = make_run()
    result = run.run()
    for task in ("dark", "minus", "bright"):
        run.net.eval()
        run.net.prepare(task)
        assert network_sha256(run.net) == result.final_sha256


@pytest.mark.parametrize("part", ["convolution", "row of the first task"])
def test_the_hash_sees_a_single_number(make_run, part):
    run = make_run()
    result = run.run()
    with torch.no_grad():
        if part == "convolution":
            run.net.backbone[0].weight[0, 0, 0, 0] += 1e-6
        else:
            run.net.tasks["dark"].row[0] += 1e-6
    assert network_sha256(run.net) != result.final_sha256
