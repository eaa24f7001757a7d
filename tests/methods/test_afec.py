"""AFEC: the free copy is plain fine-tuning of the task at hand, and the pull is towards it."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from confitune.engine import network_sha256
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


@pytest.mark.parametrize("form", ["first", "alternating"])
@pytest.mark.parametrize("base", ["mas", "finetune"])
def test_without_lambda_e_it_is_the_method_without_it_to_the_bit(make_run, base, form):
    alone = make_run(base, epochs=2).run().final_sha256
    options = {"strength": 0, "form": form}
    assert make_run(f"{base}+afec", {"afec": options}, epochs=2).run().final_sha256 == alone
    assert make_run(f"{base}+afec", {"afec": {"form": form}}, epochs=2).run().final_sha256 != alone


@pytest.mark.parametrize("form", ["first", "alternating"])
@pytest.mark.parametrize("base", ["mas", "confit"])
def test_the_copies_leave_the_network_its_heads_statistics_and_random_numbers_alone(make_run, base, form):
    """With dropout, and a pull that rounding swallows: what the copies do must not show."""
    settings = {"epochs": 5 if base == "confit" else 2, "dropout": 0.3}
    alone = make_run(base, **settings).run()
    options = {"afec": {"strength": TINY, "form": form}}
    found = make_run(f"{base}+afec", options, **settings).run()
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


@pytest.mark.parametrize("form", ["first", "alternating"])
def test_the_first_task_is_that_of_the_method_without_it(afec_run, make_run, tasks, form):
    run, _ = afec_run(tasks=tasks[:1], form=form)
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


def test_alternating_trains_one_epoch_per_epoch_and_never_starts_anew(afec_run, make_net, make_fit, make_method, tasks):
    """The copy goes its own way through all tasks: plain fine-tuning of the sequence, epoch by epoch."""
    run, watch = afec_run(form="alternating", strength=5)
    run.run()
    free, expected = make_net("finetune"), {}

    class Epochs(Method):
        def begin_epoch(self, context, epoch):
            if epoch:
                expected[context.index, epoch - 1] = copy.deepcopy(context.net)

        def end_task(self, context):
            expected[context.index, 1] = copy.deepcopy(context.net)

    method = make_method("finetune", hooks=[Epochs()])
    for task in tasks:
        make_fit(free, task, method, epochs=2).fit()
    assert [(index, epoch) for index, epoch, _ in watch.epochs] == [(i, e) for i in range(3) for e in range(2)]
    for index, epoch, (anchor, weight) in watch.epochs:
        if index:
            assert_all_equal(anchor, weights_of(expected[index, epoch]))
            assert_all_close(weight, batch_fisher(expected[index, epoch], watch.contexts[index]))
        else:
            assert not any(tensor.any() for tensor in (*anchor.values(), *weight.values()))
    assert network_sha256(run.net) != network_sha256(free)


def test_the_two_forms_differ(make_run):
    found = {
        form: make_run("mas-afec", {"afec": {"form": form}}, epochs=2).run().final_sha256
        for form in ("first", "alternating")
    }
    assert found["first"] != found["alternating"]


def test_what_is_kept_between_tasks(make_run):
    """Nothing, but the copy that is never reset."""
    stored = {}
    for form in ("first", "alternating"):
        run = make_run("mas-afec", {"afec": {"form": form}}, epochs=1)
        run.run()
        stored[form] = run.method.added[0].storage()
        backbone = sum(tensor.numel() for tensor in run.net.backbone.state_dict().values())
    assert stored == {"first": 0, "alternating": backbone}


@pytest.mark.parametrize("form", ["first", "alternating"])
def test_measuring_in_training_mode_with_dropout_gives_the_same_every_time(make_run, form):
    found = []
    for seed in (0, 1):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # of whatever ran before
            options = {"afec": {"form": form, "mode": "train"}}
            found.append(make_run("mas-afec", options, epochs=2, dropout=0.5).run().final_sha256)
    assert found[0] == found[1]


def test_a_state_with_a_copy_goes_in_and_out_before_there_is_a_network(make_run, assert_same):
    run = make_run("afec", {"afec": {"form": "alternating"}}, epochs=1)
    run.run()
    first = run.method
    second = AFEC(form="alternating")
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert_same(second.state_dict(), first.state_dict())


def test_alternating_a_pass_takes_whole_batches_as_training_does(make_run, make_task):
    """17 images in batches of 8 leave one, on a network whose batch norm sees planes of one pixel."""
    tasks = (make_task("one", (9, 8)), make_task("two", (9, 8)))
    layers = nn.Conv2d(3, 4, 3, 2), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(4), nn.Flatten()
    method = create_method("confit+afec", {"afec": {"form": "alternating"}, "confit": {"statistics": "pass"}})
    run = make_run(method, net=method.network(nn.Sequential(*layers)), tasks=tasks, epochs=5)
    assert len(run.run().tasks) == 2
