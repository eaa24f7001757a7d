"""What EWC, SI, RWalk, MAS and AFEC have in common: a pull on shared weights, and what is kept for it."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from confitune.engine import Listener, TaskFit
from confitune.methods import Penalty, create_method, shared_parameters
from confitune.methods.quadratic import QuadraticPenalty

WITHOUT = {
    "ewc": {"ewc": {"strength": 0}},
    "si": {"si": {"strength": 0}},
    "rwalk": {"rwalk": {"strength": 0}},
    "mas": {"mas": {"strength": 0}},
    "mas-cpr": {"mas": {"strength": 0}, "cpr": {"beta": 0}},
    "mas-afec": {"mas": {"strength": 0}, "afec": {"strength": 0}},
}
PULLS = ("ewc", "si", "rwalk", "mas")


@pytest.mark.parametrize("name", WITHOUT)
def test_with_no_strength_it_is_fine_tuning_to_the_bit(make_run, finetuned, name):
    assert make_run(name, WITHOUT[name], epochs=2).run().final_sha256 == finetuned
    assert make_run(name, epochs=2).run().final_sha256 != finetuned


@pytest.mark.parametrize("name", ["confit+ewc", "confit+si", "confit+rwalk", "confit+mas"])
def test_with_no_strength_on_confit_it_is_confit_to_the_bit(make_run, name):
    alone = make_run("confit", epochs=5).run().final_sha256
    part = name.split("+")[1]
    assert make_run(name, {part: {"strength": 0}}, epochs=5).run().final_sha256 == alone
    assert make_run(name, epochs=5).run().final_sha256 != alone


@pytest.mark.parametrize("name", PULLS)
def test_the_first_task_is_that_of_fine_tuning(make_run, tasks, name):
    alone = make_run("finetune", tasks=tasks[:1]).run().final_sha256
    assert make_run(name, tasks=tasks[:1]).run().final_sha256 == alone


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        ("shared", ["0.weight", "1.weight", "1.bias", "3.weight", "3.bias", "4.weight", "4.bias"]),
        ("xconv", ["0.weight", "3.weight", "3.bias"]),
        ("task", ["0.weight", "3.weight", "3.bias"]),
    ],
)
def test_shared_are_no_heads_and_no_batch_norms_that_tasks_have_for_themselves(make_net, norm, expected):
    net = make_net(norm)
    for classes in (3, 2):
        net.add_task(f"task{classes}", classes)
    found = net.shared_parameters()
    assert list(found) == expected
    for name, parameter in found.items():
        assert parameter is net.backbone.get_parameter(name)
    heads = {id(p) for p in net.heads.parameters()}
    assert not heads & {id(p) for p in found.values()}


class Keeps(Method):
    """At the end of every task, once the other penalties are done: what they hold, and the weights."""

    def __init__(self):
        super().__init__()
        self.others, self.held = (), []

    def end_task(self, context):
        weights = {name: p.detach().clone() for name, p in context.net.shared_parameters().items()}
        self.held.append((weights, [copy.deepcopy((p.anchor, p.weight)) for p in self.others]))


FACTOR = {"ewc": 1 / 2, "si": 1, "rwalk": 1, "mas": 1 / 2}  # of strength * weight * distance^2 in the loss


@pytest.mark.parametrize("name", [*PULLS, "ewc+si", "mas+rwalk"])
def test_the_pull_is_a_term_of_the_loss(make_net, tasks, make_method, make_settings, record_steps, train_by_hand, name):
    """A second task by autograd on cross entropy + sum of factor * strength * weight * (theta - theta*)^2."""
    method, keeps, settings = make_method(name), Keeps(), make_settings(epochs=2)
    keeps.others = method.hooks
    net = make_net("finetune")
    TaskFit(
        net, tasks[0], dataclasses.replace(method, penalties=(*method.hooks, keeps)), settings, Listener()
    ).run()
    weights, held = keeps.held[0]
    for anchor, weight in held:
        assert all(torch.equal(anchor[key], weights[key]) for key in weights)
        assert all(tensor.max() > 0 for tensor in weight.values())
    steps = record_steps(net)
    fitting = TaskFit(
        net, tasks[1], dataclasses.replace(method, penalties=(*method.hooks, steps)), settings, Listener()
    )
    twin = nn.Sequential(copy.deepcopy(net.backbone), copy.deepcopy(net.head))
    free = copy.deepcopy(twin)
    fitting.run()

    def pull(backbone, logits):
        total = 0.0
        for penalty, (anchor, weight) in zip(method.hooks, held, strict=True):
            way = [(weight[key] * (p - anchor[key]) ** 2).sum() for key, p in backbone.named_parameters()]
            total = total + FACTOR[penalty.name] * penalty.options.strength * sum(way)
        return total

    twin[0]._forward_pre_hooks.clear()
    free[0]._forward_pre_hooks.clear()
    train_by_hand(twin, steps, settings.lr, pull)
    train_by_hand(free, steps, settings.lr, lambda backbone, logits: 0.0)
    far = []
    for found, expected, other in zip(
        (*net.backbone.parameters(), *net.head.linear.parameters()), twin.parameters(), free.parameters(), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=5e-6)
        far.append((found - other).abs().max().item())
    assert max(far) > 5e-4  # and it does matter


def test_a_pull_adds_to_the_gradients_there_are_and_to_no_other(make_net):
    net = make_net("finetune")
    net.add_task("one", 2)
    penalty = create_method("ewc").hooks[0]
    penalty.attach(net)
    penalty.anchored = True
    for tensor in penalty.weight.values():
        tensor.fill_(1e-3)
    for name, p in net.shared_parameters().items():
        p.grad = torch.ones_like(p) if name.startswith("1.") else None
    head = [p.grad for p in net.head.linear.parameters()]
    penalty.add_gradients(net)
    for name, p in net.shared_parameters().items():
        if name.startswith("1."):
            torch.testing.assert_close(p.grad, 1 + 300 * 1e-3 * p.detach())
        else:
            assert p.grad is None
    assert head == [p.grad for p in net.head.linear.parameters()] == [None, None]
    for p in net.shared_parameters().values():
        p.grad = None
    penalty.add_gradients(net)  # nothing is trained: nothing to do
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("base", ["finetune", "confit"])
def test_what_is_kept_between_tasks(make_run, base):
    """Two numbers a shared weight, RWalk four."""
    for name, numbers in (("ewc", 2), ("si", 2), ("mas", 2), ("rwalk", 4), ("cpr", 0)):
        run = make_run(f"{base}+{name}", epochs=1)
        run.run()
        (penalty,) = run.method.hooks
        assert penalty.storage() == numbers * sum(p.numel() for p in run.net.shared_parameters().values())


@pytest.mark.parametrize("name", [*PULLS, "afec"])
def test_what_is_kept_stays_where_it_is(make_run, make_method, tasks, name):
    """A captured step reads the addresses it was captured with."""
    method = make_method(name)
    (penalty,) = method.hooks
    make_run(method, tasks=tasks[:2], epochs=1).run()
    fields = ("anchor", "weight", "fisher", "score", "previous", "gradient", "path")
    before = {f: {k: t.data_ptr() for k, t in getattr(penalty, f).items()} for f in fields if hasattr(penalty, f)}
    make_run(method, epochs=1).run()
    assert {f: {k: t.data_ptr() for k, t in getattr(penalty, f).items()} for f in before} == before


class Stages(Method):
    """After every step: whether the shared weights moved, and the other penalties' anchors and weights."""

    def __init__(self, others):
        super().__init__()
        self.others, self.steps, self.anchors, self.ends = others, [], [], []

    def begin_task(self, context):
        self.before = {name: p.detach().clone() for name, p in context.net.shared_parameters().items()}
        self.held = copy.deepcopy([(p.anchored, p.anchor, p.weight) for p in self.others])

    def after_step(self, net):
        now = {name: p.detach().clone() for name, p in net.shared_parameters().items()}
        self.steps.append(any(not torch.equal(now[name], self.before[name]) for name in now))
        self.before = now
        self.anchors.append(copy.deepcopy([(p.anchored, p.anchor, p.weight) for p in self.others]))

    def end_task(self, context):
        now = {name: p.detach().clone() for name, p in context.net.shared_parameters().items()}
        self.ends.append((now, [p.anchored for p in self.others], copy.deepcopy([p.anchor for p in self.others])))


@pytest.mark.parametrize("name", PULLS)
def test_on_confit_stages_that_freeze_shared_weights_leave_the_pull_consistent(
    make_run, make_method, assert_same, tasks, name
):
    method = make_method(f"confit+{name}")
    watch = Stages(method.hooks)
    run = make_run(dataclasses.replace(method, penalties=(*method.hooks, watch)), epochs=5, tasks=tasks[:2])
    run.run()
    # 27 and 25 images are 3 steps an epoch each; convolutions are trained in the last 3 of 5 epochs.
    assert watch.steps == ([False] * 6 + [True] * 9) * 2
    none, pulled = watch.anchors[:15], watch.anchors[15:]
    assert all(not anchored for step in none for anchored, _, _ in step)
    for step in pulled:
        assert_same(step, watch.held)
    (anchored, anchor, weight), first = watch.held[0], watch.ends[0][0]
    assert anchored
    assert list(anchor) == list(weight) == ["0.weight", "3.weight", "3.bias"]
    assert_same(anchor, first)
    assert all(tensor.abs().max() > 0 for key, tensor in weight.items() if key != "3.bias")
    for now, flags, anchors in watch.ends:
        assert flags == [True]
        assert_same(anchors, [now])


@pytest.mark.parametrize("name", ["si", "rwalk"])
def test_on_confit_the_path_is_that_of_the_steps_that_moved_shared_weights(make_run, tasks, name):
    """Followed beside it with the gradients of the loss and the weights before and after."""

    class Follow(Method):
        def __init__(self, other):
            super().__init__()
            self.other, self.path, self.ends = other, {}, 0

        def begin_task(self, context):
            self.path = dict.fromkeys(context.net.shared_parameters(), 0.0)

        def read_gradients(self, net):
            self.before = {
                key: (p.detach().clone(), None if p.grad is None else p.grad.clone())
                for key, p in net.shared_parameters().items()
            }

        def after_step(self, net):
            for key, p in net.shared_parameters().items():
                before, gradient = self.before[key]
                if gradient is not None:
                    self.path[key] = self.path[key] - gradient * (p.detach() - before)

        def end_task(self, context):
            self.ends += 1
            for key, expected in self.path.items():
                if name == "si":
                    torch.testing.assert_close(self.other.path[key], expected, rtol=1e-4, atol=1e-8)
                else:
                    last = self.before[key][1] ** 2
                    assert (self.other.fisher[key] >= 0.89 * last).all()

    method = create_method(f"confit+{name}", {name: {"strength": 0.01}})
    follow = Follow(method.hooks[0])
    make_run(dataclasses.replace(method, penalties=(follow, *method.hooks)), epochs=5).run()
    assert follow.ends == 3


def test_a_state_can_be_loaded_before_there_is_a_network(make_net, tasks, context_of, assert_same):
    net = make_net("finetune")
    context = context_of(net, tasks[0])
    for name in ("ewc", "si", "rwalk", "mas", "afec"):
        (first,), (second,) = create_method(name).hooks, create_method(name).hooks
        assert isinstance(first, QuadraticPenalty)
        first.attach(net)
        first.begin_task(context)
        first.end_task(context)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        assert_same(second.state_dict(), first.state_dict())
        second.attach(net)
        assert_same(second.state_dict(), first.state_dict())


def test_an_early_states_pull_is_off(make_net):
    (penalty,) = create_method("ewc").hooks
    penalty.attach(make_net("finetune"))
    state = copy.deepcopy(penalty.state_dict())
    penalty.anchored = True
    penalty.load_state_dict(state)
    assert not penalty.anchored
