"""Accuracy and the joint loss against what they are by definition."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from confitune.engine import TrainSettings, evaluate, fit
from confitune.engine.evaluation import evaluate_groups
from confitune.engine.feed import batches
from confitune.engine.loss import classification_loss, count_right, within_own_task
from confitune.methods import METHODS
from confitune.tasks import Images

SETTINGS = TrainSettings(epochs=5, batch_size=8, lr=0.05, device="cpu")


@pytest.mark.parametrize("method", ["confit", "finetune", "task-bn", "linear-probe"])
def test_accuracy_is_the_share_of_right_answers(make_net, sequence, method):
    net = make_net(METHODS[method].norm)
    for task in sequence:
        fit(net, task, METHODS[method], SETTINGS)
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
    net, task = make_net("xconv"), make_task("dark")
    fit(net, task, settings=SETTINGS)
    assert evaluate(net, task, TrainSettings(eval_batch_size=size, device="cpu")) == evaluate(net, task, SETTINGS)


def test_other_images_can_be_evaluated(make_net, make_task):
    net, task = make_net("xconv"), make_task("dark", (24, 16))
    fit(net, task, settings=TrainSettings(epochs=20, batch_size=8, lr=0.05, device="cpu"))
    on_train = evaluate(net, task, images=task.train)
    wrong = Images(task.train.pixels, task.train.rows, 1 - task.train.labels)
    assert on_train > 80
    assert evaluate(net, task, images=wrong) == pytest.approx(100 - on_train)


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_leaves_no_trace(make_net, sequence, training):
    net = make_net("xconv")
    fit(net, sequence[0], settings=SETTINGS)
    net.train(training)
    before = {name: (entry.row.clone(), entry.batches) for name, entry in net.tasks.items()}
    weights = [p.detach().clone() for p in net.parameters()]
    evaluate(net, sequence[0], SETTINGS)
    assert net.training is training
    assert all(torch.equal(*pair) for pair in zip(weights, net.parameters(), strict=True))
    for name, (row, seen) in before.items():
        assert torch.equal(net.tasks[name].row, row)
        assert net.tasks[name].batches == seen


GROUPS = ((0, 3), (3, 5), (5, 8))


def random_batch(seed=0, count=50):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, 8, generator=generator) * 3
    return logits, torch.randint(0, 8, (count,), generator=generator)


def test_the_joint_loss_is_the_cross_entropy_of_every_image_within_its_own_task():
    logits, labels = random_batch()
    total = 0.0
    for first, stop in GROUPS:
        mine = (labels >= first) & (labels < stop)
        total += cross_entropy(logits[mine, first:stop], labels[mine] - first, reduction="sum").item()
    assert classification_loss(logits, labels, GROUPS).item() == pytest.approx(total / 50, rel=1e-6)
    assert classification_loss(logits, labels).item() == pytest.approx(cross_entropy(logits, labels).item(), rel=1e-6)


def test_gradients_of_the_joint_loss_stay_in_the_images_own_task():
    logits, labels = random_batch()
    logits.requires_grad_()
    classification_loss(logits, labels, GROUPS).backward()
    expected = torch.zeros(50, 8)
    for row, label in enumerate(labels.tolist()):
        first, stop = next(group for group in GROUPS if group[0] <= label < group[1])
        expected[row, first:stop] = logits[row, first:stop].detach().softmax(0) / 50
        expected[row, label] -= 1 / 50
    torch.testing.assert_close(logits.grad, expected)


def test_right_answers_are_counted_within_the_images_own_task():
    logits = torch.tensor([[1.0, 2, 0, 9, 9, 9, 9, 9], [9, 9, 9, 3, 4, 9, 9, 9], [9, 9, 9, 9, 9, 1, 1, 2]])
    labels = torch.tensor([1, 3, 7])
    assert count_right(logits, labels, GROUPS).tolist() == [True, False, True]
    assert count_right(logits, labels).tolist() == [False, False, False]


def test_the_loss_of_half_precision_logits_is_computed_in_float32():
    logits, labels = random_batch()
    loss = classification_loss(logits.bfloat16(), labels)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(cross_entropy(logits.bfloat16().float(), labels).item(), rel=1e-6)


def test_without_groups_logits_are_left_alone():
    logits, labels = random_batch()
    assert within_own_task(logits, labels, ()) is logits


def test_accuracy_of_merged_tasks_is_measured_within_each(make_net, sequence):
    (joint,) = sequence.joined()
    net = make_net("shared")
    fit(net, joint, METHODS["joint"], SETTINGS)
    found = evaluate_groups(net, joint, SETTINGS)
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


def test_batches_follow_the_order_and_keep_the_rest(make_task):
    task = make_task("dark", (3, 2))
    order = torch.tensor([4, 0, 3, 1, 2])
    made = list(batches(task.train, 2, torch.device("cpu"), order))
    assert [len(x) for x, _ in made] == [2, 2, 1]
    assert torch.cat([labels for _, labels in made]).tolist() == [1, 0, 1, 0, 0]
    assert torch.equal(torch.cat([pixels for pixels, _ in made]), task.train.pixels[task.train.rows][order])
