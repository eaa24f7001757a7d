"""AFEC: the free copy is plain fine-tuning of the task at hand, and the pull is towards it."""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

from confitune.methods import Method, create_method
from confitune.methods.afec import AFEC

TINY = 1e-30  # copies are trained, and their pull is lost in rounding


class Watch(Method):
    """Keeps, at hooks of its own, what AFEC holds, the network that is trained, and the order of its images."""

    def __init__(self, afec):
        super().__init__()
        self.afec, self.nets, self.contexts, self.epochs = afec, [], [], []

    def begin_task(self, context):
        self.nets.append(copy.deepcopy(context.net))
        self.contexts.append(context)

    def begin_epoch(self, context, epoch):
        self.epochs.append((context.index, epoch, self.held()))

    def held(self):
        return copy.deepcopy((self.afec.anchor, self.afec.weight))


@pytest.fixture
def afec_run(make_run):
    """A run of `name` with AFEC's options, and a watch over it."""

    def make(name="mas-afec", *, tasks=None, epochs=2, **options):
        method = create_method(name, {"afec": options})
        (afec,) = (hook for hook in method.hooks if isinstance(hook, AFEC))
        watch = Watch(afec)
        more = {} if tasks is None else {"tasks": tasks}
        return make_run(method, hooks=[watch], epochs=epochs, **more), watch

    return make


def weights_of(net):
    return {name: p.detach() for name, p in net.shared_parameters().items()}


def batch_fisher(net, context):
    """Squared gradients of the mean loss of 20 images in evaluation mode, times 20, summed, by the images."""
    net = copy.deepcopy(net).eval()
    parameters = net.shared_parameters()
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for x, labels in context.batches(20):
        loss = cross_entropy(net(x, context.task.name), labels)
        for name, gradient in zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True):
            total[name] += 20 * gradient**2 / context.images
    return total


def assert_all_equal(found, expected):
    assert list(found) == list(expected)
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def assert_all_close(found, expected):
    assert list(found) == list(expected)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("base", ["mas", "finetune"])
def test_without_lambda_e_it_is_the_method_without_it_to_the_bit(make_run, base):
    alone = make_run(base, epochs=2).run().final_sha256
    assert make_run(f"{base}+afec", {"afec": {"strength": 0}}, epochs=2).run().final_sha256 == alone
    assert make_run(f"{base}+afec", epochs=2).run().final_sha256 != alone


@pytest.mark.parametrize("base", ["mas", "confit"])
def test_the_copies_leave_the_network_its_heads_statistics_and_random_numbers_alone(make_run, base):
    """With dropout, and a pull that rounding swallows: what the copies do must not show."""
    settings = {"epochs": 5 if base == "confit" else 2, "dropout": 0.3}
    alone = make_run(base, **settings).run()
    found = make_run(f"{base}+afec", {"afec": {"strength": TINY}}, **settings).run()
    assert found.final_sha256 == alone.final_sha256
    assert found.accuracy_matrix == alone.accuracy_matrix


@pytest.mark.parametrize("base", ["mas", "confit"])
def test_the_free_copy_is_an_independent_fine_tuning_of_the_network_as_it_was(afec_run, make_fit, tasks, base):
    """In every task but the first: theta_e its weights, F_e its Fisher on the task."""
    epochs = 5 if base == "confit" else 2
    run, watch = afec_run(f"{base}+afec", strength=5, epochs=epochs)
    run.run()
    for index in (1, 2):
        free = watch.nets[index]
        make_fit(free, tasks[index], "confit" if base == "confit" else "finetune", index, epochs=epochs).fit()
        held = [held for task, _, held in watch.epochs if task == index]
        assert len(held) == epochs
        for anchor, weight in held:  # the same throughout the task
            assert_all_equal(anchor, weights_of(free))
            assert_all_close(weight, batch_fisher(free, watch.contexts[index]))
        assert max(weight.abs().max().item() for weight in held[0][1].values()) > 1e-4


def test_the_first_task_is_that_of_the_method_without_it(afec_run, make_run, tasks):
    run, _ = afec_run(tasks=tasks[:1])
    assert run.run().final_sha256 == make_run("mas", tasks=tasks[:1], epochs=2).run().final_sha256


@pytest.fixture
def second(make_net, tasks, context_of):
    """A network that has learned one task, and the context of another."""

    def second():
        net = make_net("finetune")
        context_of(net, tasks[0])
        net.finish_task()
        return net, context_of(net, tasks[1])

    return second


def begun(net, context, **options):
    afec = AFEC(**options)
    afec.attach(net, context.index)
    afec.begin_task(context)
    return afec


def test_the_pull_is_lambda_e_times_fisher_times_distance(second):
    net, context = second()
    afec = begun(net, context, strength=4)
    assert max((p - afec.anchor[name]).abs().max().item() for name, p in net.shared_parameters().items()) > 1e-3
    for index, pulls in ((1, True), (0, False)):  # in a first task not even with what another run left
        afec.attach(net, index)
        for p in net.shared_parameters().values():
            p.grad = torch.full_like(p, 0.125)
        afec.add_gradients(net)
        for name, p in net.shared_parameters().items():
            expected = 0.125 + pulls * 4 * afec.weight[name] * (p.detach() - afec.anchor[name])
            torch.testing.assert_close(p.grad, expected, rtol=1e-6, atol=1e-9)


def test_a_task_begins_without_the_last_ones_pull(second):
    """The copy starts from the network as it is: nothing of what it was before is left in the pull."""
    net, context = second()
    expected = begun(net, context)
    net, context = second()
    afec = AFEC()
    afec.attach(net, 1)
    before = [p.detach().clone() for p in net.shared_parameters().values()]
    with torch.no_grad():
        torch._foreach_add_(list(net.shared_parameters().values()), 0.1)
        with torch.enable_grad():
            afec.begin_task(context)
        torch._foreach_copy_(list(net.shared_parameters().values()), before)
    assert not torch.equal(afec.anchor["0.weight"], expected.anchor["0.weight"])
    afec.begin_task(context)
    assert_all_equal(afec.anchor, expected.anchor)
    assert_all_equal(afec.weight, expected.weight)


def test_it_draws_a_network_that_is_held_back_towards_what_the_task_would_have_it_be(afec_run, tasks):
    distances = {}
    for base, strength in (("finetune", TINY), ("mas", TINY), ("mas", 100.0)):
        run, watch = afec_run(f"{base}+afec", tasks=tasks[:2], strength=strength, epochs=4)
        run.run()
        anchor, weight = watch.held()
        gap = sum((weight[name] * (p - anchor[name]) ** 2).sum() for name, p in weights_of(run.net).items())
        distances[base, strength] = gap.item()
    assert distances["finetune", TINY] == 0  # unpenalised, from the same start, in the same order: the copy itself
    assert 1e-6 < distances["mas", 100.0] < 0.8 * distances["mas", TINY]


def test_nothing_is_kept_between_tasks(make_run):
    run = make_run("mas-afec", epochs=1)
    run.run()
    assert run.method.added[0].storage() == 0


def test_measuring_in_training_mode_with_dropout_gives_the_same_every_time(make_run):
    found = []
    for seed in (0, 1):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # of whatever ran before
            options = {"afec": {"mode": "train"}}
            found.append(make_run("mas-afec", options, epochs=2, dropout=0.5).run().final_sha256)
    assert found[0] == found[1]
