"""Where the task of a test image is not given: accuracy against what it is by definition."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from confitune.engine import Listener, evaluate, label_space as module
from confitune.engine.evaluation import outputs
from confitune.errors import ConfituneError
from confitune.methods import METHODS, create_method
from confitune.nn import state_sha256
from confitune.tasks import TaskSequence


def pixels_of(task, images):
    return task.preprocess(images.pixels[images.rows])


@torch.no_grad()
def features_of(make_net, task, images):
    """Of the network as pre-trained, which has one stage: square roots, smooth at zero, of length sqrt(F)."""
    x = make_net("finetune").backbone.eval()(pixels_of(task, images)).double().numpy()
    x = x / np.sqrt(np.abs(x) + 0.1 * np.abs(x).mean(1, keepdims=True))
    return x / np.linalg.norm(x, axis=1, keepdims=True) * math.sqrt(x.shape[1])


@torch.no_grad()
def by_definition(make_net, run, asks=True):
    """The last column of the matrix, image by image, from all training images at once."""
    tasks, net, chosen = run.original.tasks, run.net.eval(), run._space.gaussians()
    of_class = [(task, name) for task in tasks for name in task.classes]
    x = [features_of(make_net, task, task.train) for task in tasks]
    clouds = [x[n][task.train.labels.numpy() == k] for n, task in enumerate(tasks) for k in range(len(task.classes))]
    within = sum((cloud - cloud.mean(0)).T @ (cloud - cloud.mean(0)) for cloud in clouds) / sum(map(len, clouds))
    inverse = np.linalg.inv(within + chosen.ridge * within.diagonal().mean() * np.eye(len(within)))
    found = []
    for task in tasks:
        right = 0
        test, inputs = features_of(make_net, task, task.test), pixels_of(task, task.test)
        for y, image, label in zip(test, inputs, task.test.labels.tolist(), strict=True):
            distances = np.array([(y - c.mean(0)) @ inverse @ (y - c.mean(0)) for c in clouds])
            shares = np.exp(-(distances - distances.min()) / 2 / chosen.temperature)
            shares /= shares.sum()
            of_task = {
                t.name: sum(s for s, (owner, _) in zip(shares, of_class, strict=True) if owner is t) for t in tasks
            }
            named = dict.fromkeys((name for _, name in of_class), 0.0)
            for t in tasks:
                mine = [s for s, (owner, _) in zip(shares, of_class, strict=True) if owner is t]
                if asks and (of_task[t.name] >= 0.2 or of_task[t.name] == max(of_task.values())):
                    both = np.sqrt(np.array(mine) * net(image[None], t.name)[0].double().softmax(0).numpy())
                    mine = of_task[t.name] * both / both.sum()
                for name, share in zip(t.classes, mine, strict=True):
                    named[name] += share
            right += max(named, key=named.get) == task.classes[label]
        found.append(100 * right / len(task.test))
    return found


@pytest.mark.parametrize("method", ["finetune", "task-bn", "confit", "best", "lora", "lda"])
def test_accuracy_is_the_share_of_classes_named_right_among_all(make_run, make_net, sequence, method):
    result = (run := make_run(method, epochs=4, scenario="class")).run()
    assert result.matrix[:, -1].tolist() == pytest.approx(by_definition(make_net, run, asks=method != "lda"))
    assert result.as_learned is None
    # Earlier columns are the last ones of shorter sequences.
    shorter = make_run(method, epochs=4, scenario="class", tasks=sequence[:2])
    shorter_result = shorter.run()
    np.testing.assert_array_equal(result.matrix[:2, :2], shorter_result.matrix)
    assert shorter_result.matrix[:, -1].tolist() == pytest.approx(by_definition(make_net, shorter, method != "lda"))


def test_only_the_evaluation_is_another(make_run):
    given, not_given = (make_run("task-bn", scenario=scenario).run() for scenario in ("task", "class"))
    assert not_given.final_sha256 == given.final_sha256
    assert not_given.acc < given.acc


@pytest.mark.parametrize("scenario", ["task", "class"])
def test_lda_does_not_depend_on_the_order_and_trains_nothing(make_run, make_net, sequence, scenario):
    run = make_run("lda", scenario=scenario)
    result = run.run()
    assert state_sha256(run.net.backbone) == state_sha256(make_net("lda").backbone)
    turned = TaskSequence("turned", "own", tuple(reversed(sequence.tasks)))
    other = make_run("lda", scenario=scenario, tasks=turned).run()
    assert other.matrix[::-1, -1].tolist() == result.matrix[:, -1].tolist()
    assert result.acc > (80 if scenario == "task" else 60)


def test_lda_answers_within_the_task_where_it_is_given(make_run, make_net, sequence):
    run = make_run("lda")
    result, gaussians = run.run(), run._space.gaussians()
    for place, task in enumerate(sequence):
        logits = gaussians.logits(torch.from_numpy(features_of(make_net, task, task.test)))
        right = logits[:, gaussians.of_class == place].argmax(1) == task.test.labels
        assert result.matrix[place, -1] == pytest.approx(100 * right.double().mean().item())
        # Its head, which knows of no other task, is about as good.
        assert abs(evaluate(run.net, task) - result.matrix[place, -1]) < 15


def test_joint_answers_among_all_classes(make_run, sequence):
    run = make_run("joint", epochs=8, scenario="class")
    result = run.run()
    assert np.isnan(result.matrix[:, :-1]).all()
    names, net = run.sequence[0].classes, run.net.eval()
    assert names == tuple(name for task in sequence for name in task.classes)
    for task, accuracy in zip(sequence, result.matrix[:, -1], strict=True):
        with torch.no_grad():
            answers = net(pixels_of(task, task.test), "joint").argmax(1)
        wanted = torch.tensor([names.index(task.classes[label]) for label in task.test.labels])
        assert accuracy == pytest.approx(100 * (answers == wanted).double().mean().item())
    assert result.acc > 50  # chance is 12.5, and 39 with the task


@pytest.fixture
def domains(make_task):
    """The same three classes, dark and bright; the second names them in another order."""
    dark, bright = make_task("dark"), make_task("bright", base=150)
    return TaskSequence(
        "domains",
        "own",
        (replace(dark, classes=("red", "green", "blue")), replace(bright, classes=("red", "blue", "green"))),
    )


@pytest.mark.parametrize("method", ["task-bn", "lda"])
def test_classes_of_the_same_name_are_one(make_run, make_net, domains, method):
    runs = [make_run(method, epochs=4, scenario=scenario, tasks=domains) for scenario in ("class", "domain")]
    results = [run.run() for run in runs]
    assert results[0].accuracy_matrix == results[1].accuracy_matrix
    assert results[0].matrix[:, -1].tolist() == pytest.approx(by_definition(make_net, runs[0], method != "lda"))


def test_joint_has_one_class_of_a_name(make_run, domains):
    run = make_run("joint", epochs=8, scenario="domain", tasks=domains)
    result = run.run()
    whole = run.sequence[0]
    assert (whole.classes, whole.groups) == (("red", "green", "blue"), ())
    assert whole.test.labels.tolist()[len(domains[0].test) :] == [(0, 2, 1)[label] for label in domains[1].test.labels]
    assert result.acc == pytest.approx(np.mean(result.matrix[:, -1]))


def test_domains_with_other_classes_are_refused(make_run):
    with pytest.raises(
        ConfituneError,
        match=r"needs the same classes in every task; 'bright' has bright-0, bright-1, 'dark' has dark-0",
    ):
        make_run("task-bn", scenario="domain")


def test_a_network_for_each_task_is_refused(make_run):
    with pytest.raises(ConfituneError, match=r"single-task has a network for each task .* leave it out"):
        make_run("single-task", scenario="class")


class Killed(Exception):
    pass


class Killer(Listener):
    def task_started(self, task, name, first_epoch):
        if task == 2:
            raise Killed


@pytest.mark.parametrize("method", ["confit", "best"])
def test_a_run_that_goes_on_ends_with_the_same_matrix(make_run, tmp_path, method):
    options = {"epochs": 4, "scenario": "class", "config": {"what": "test"}}
    whole = make_run(method, **options).run()
    with pytest.raises(Killed):
        make_run(method, folder=tmp_path, listeners=(Killer(),), **options).run()
    run = make_run(method, folder=tmp_path, **options)
    assert run.resume()
    assert run.state.task == 2
    result = run.run()
    assert result.accuracy_matrix == whole.accuracy_matrix
    assert result.final_sha256 == whole.final_sha256


def test_pre_trained_features_are_taken_once_of_every_image(make_run, sequence, monkeypatch):
    seen = []

    def counted(network, task, images, *more):
        if not hasattr(network, "tasks"):
            seen.append((task.name, len(images)))
        return outputs(network, task, images, *more)

    monkeypatch.setattr(module, "outputs", counted)
    make_run("bn-only", scenario="class").run()
    assert seen == [(task.name, len(images)) for task in sequence for images in (task.train, task.test)]


def test_a_method_of_ones_own_can_be_tested_so(make_run, make_net, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from confitune.methods import Method\nfrom confitune.nn import Head, Norms\n\n\n"
        "class Mine(Method):\n    name = 'own-norms'\n\n    def parts(self):\n        return [Norms(), Head()]\n"
    )
    run = make_run(create_method(f"{file}:Mine"), scenario="class")
    METHODS.pop("own-norms")
    assert run.run().matrix[:, -1].tolist() == pytest.approx(by_definition(make_net, run))


def test_images_of_another_size_are_brought_to_the_size_of_the_task_that_is_asked(make_run, make_task, sequence):
    """ConFiT's tasks hold for images of one size."""
    small = make_task("small", (20, 20), (10, 10), base=100)
    small = replace(small, preprocess=replace(small.preprocess, resize=24))
    tasks = TaskSequence("sizes", "own", (sequence[0], small))
    result = make_run("confit", scenario="class", tasks=tasks).run()
    assert not np.isnan(result.matrix[:, -1]).any()


def test_what_parts_add_to_the_network_is_not_in_pre_trained_features(make_run, make_net, sequence):
    """CCLL's calibrations start at random."""
    method = create_method("ccll")
    pretrained = make_net("finetune").backbone
    run = make_run(method, scenario="class", pretrained=pretrained)
    run.run()
    (task, *_), space = sequence, run._space
    expected = torch.from_numpy(features_of(make_net, task, task.test))
    torch.testing.assert_close(space._test[0].double(), expected, rtol=0, atol=1e-4)
