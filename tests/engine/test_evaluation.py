"""Accuracy against what it is by definition."""

import pytest
import torch

from confitune.engine import TrainSettings, evaluate, fit
from confitune.engine.evaluation import evaluate_joined
from confitune.tasks import Images

SETTINGS = TrainSettings(epochs=5, batch_size=8, lr=0.05, device="cpu")


@pytest.mark.parametrize("method", ["confit", "finetune", "task-bn", "linear-probe"])
def test_accuracy_is_the_share_of_right_answers(make_net, sequence, method):
    net = make_net(method)
    for task in sequence:
        fit(net, task, method, SETTINGS)
    for task in sequence:
        found = evaluate(net, task, SETTINGS)
        net.eval()
        right = 0
        with torch.no_grad():
            for row, label in zip(task.test.rows, task.test.labels, strict=True):
                logits = net(task.preprocess(task.test.pixels[row][None]), task.name)  # one image at a time
                right += int(logits[0].tolist().index(max(logits[0].tolist())) == label)
        assert found == pytest.approx(100 * right / len(task.test))


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_accuracy_does_not_depend_on_the_batch(make_net, make_task, size):
    net, task = make_net("confit"), make_task("dark")
    fit(net, task, settings=SETTINGS)
    assert evaluate(net, task, TrainSettings(eval_batch_size=size, device="cpu")) == evaluate(net, task, SETTINGS)


def test_other_images_can_be_evaluated(make_net, make_task):
    net, task = make_net("confit"), make_task("dark", (24, 16))
    fit(net, task, settings=TrainSettings(epochs=20, batch_size=8, lr=0.05, device="cpu"))
    on_train = evaluate(net, task, images=task.train)
    wrong = Images(task.train.pixels, task.train.rows, 1 - task.train.labels)
    assert on_train > 80
    assert evaluate(net, task, images=wrong) == pytest.approx(100 - on_train)


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_leaves_no_trace(make_net, sequence, training):
    net = make_net("confit")
    fit(net, sequence[0], settings=SETTINGS)
    net.train(training)
    before = {name: (entry.row.clone(), entry.facts) for name, entry in net.tasks.items()}
    weights = [p.detach().clone() for p in net.parameters()]
    evaluate(net, sequence[0], SETTINGS)
    assert net.training is training
    assert all(torch.equal(*pair) for pair in zip(weights, net.parameters(), strict=True))
    for name, (row, seen) in before.items():
        assert torch.equal(net.tasks[name].row, row)
        assert net.tasks[name].facts == seen


def test_accuracy_of_merged_tasks_is_measured_within_each(make_net, sequence):
    (joint,) = sequence.joined()
    net = make_net("finetune")
    fit(net, joint, "joint", SETTINGS)
    found = evaluate_joined(net, joint, sequence.tasks, SETTINGS)
    net.eval()
    expected = []
    for task, (first, stop) in zip(sequence, joint.groups, strict=True):
        with torch.no_grad():
            logits = net(task.preprocess(task.test.pixels[task.test.rows]), "joint")[:, first:stop]
        expected.append(100 * (logits.argmax(1) == task.test.labels).double().mean().item())
    assert found == pytest.approx(expected)
    sizes = [len(task.test) for task in sequence]
    mean = sum(a * n for a, n in zip(expected, sizes, strict=True)) / sum(sizes)
    assert evaluate(net, joint, SETTINGS) == pytest.approx(mean)
