"""What EWC, SI, RWalk, MAS and AFEC have in common: a pull on shared weights, and what is kept for it."""

import copy

import pytest
import torch
from torch import nn

from confitune.engine import DivergedError, Listener
from confitune.experiments.paper.plan import Scope
from confitune.experiments.runs.recipe import make_recipe
from confitune.methods import Method, create_method
from confitune.methods.pull import Pull

WITHOUT = {
    "ewc": {"ewc": {"strength": 0}},
    "si": {"si": {"strength": 0}},
    "rwalk": {"rwalk": {"strength": 0}},
    "mas": {"mas": {"strength": 0}},
    "mas-cpr": {"mas": {"strength": 0}, "cpr": {"beta": 0}},
    "mas-afec": {"mas": {"strength": 0}, "afec": {"strength": 0}},
}
PULLS = ("ewc", "si", "rwalk", "mas")
WEIGHT = {"ewc": "fisher", "si": "omega", "rwalk": "weight", "mas": "omega"}  # what the pull is stronger by


def pulls_of(method):
    """Those of its hooks that pull, with where to and how strongly."""
    return [
        (type(hook).name, hook.options.strength, hook.anchor, getattr(hook, WEIGHT[type(hook).name]))
        for hook in method.hooks
        if type(hook).name in WEIGHT
    ]


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
    ("method", "expected"),
    [
        ("finetune", ["0.weight", "1.weight", "1.bias", "3.weight", "3.bias", "4.weight", "4.bias"]),
        ("confit", ["0.weight", "3.weight", "3.bias"]),
        ("task-bn", ["0.weight", "3.weight", "3.bias"]),
    ],
)
def test_shared_are_no_heads_and_no_batch_norms_that_tasks_have_for_themselves(make_net, method, expected):
    net = make_net(method)
    assert list(net.shared_parameters()) == expected  # with no task yet, too
    for classes in (3, 2):
        net.add_task(f"task{classes}", classes)
    found = net.shared_parameters()
    assert list(found) == expected
    for name, parameter in found.items():
        assert parameter is net.backbone.get_parameter(name)
    heads = {id(p) for p in net.head.parameters()}
    assert not heads & {id(p) for p in found.values()}


FACTOR = {"ewc": 1 / 2, "si": 1, "rwalk": 1, "mas": 1 / 2}  # of strength * weight * distance^2 in the loss


@pytest.mark.parametrize("name", [*PULLS, "ewc+si", "mas+rwalk"])
def test_the_pull_is_a_term_of_the_loss(make_net, tasks, make_method, make_fit, record_steps, train_by_hand, name):
    """A second task by autograd on cross entropy + sum of factor * strength * weight * (theta - theta*)^2."""
    steps = record_steps()
    method, net = make_method(name, hooks=[steps]), make_net("finetune")
    make_fit(net, tasks[0], method, epochs=2).fit()
    weights = {key: p.detach().clone() for key, p in net.shared_parameters().items()}
    held = copy.deepcopy(pulls_of(method))
    for _, _, anchor, weight in held:
        assert all(torch.equal(anchor[key], weights[key]) for key in weights)
        assert all(tensor.max() > 0 for tensor in weight.values())
    steps.inputs.clear()
    steps.labels.clear()
    fitting = make_fit(net, tasks[1], method, epochs=2)
    twin = nn.Sequential(copy.deepcopy(net.backbone), copy.deepcopy(net.head.linear))
    free = copy.deepcopy(twin)
    fitting.fit()

    def pull(backbone, logits):
        total = 0.0
        for pulls, strength, anchor, weight in held:
            way = [(weight[key] * (p - anchor[key]) ** 2).sum() for key, p in backbone.named_parameters()]
            total = total + FACTOR[pulls] * strength * sum(way)
        return total

    train_by_hand(twin, steps, 0.05, pull)
    train_by_hand(free, steps, 0.05, lambda backbone, logits: 0.0)
    far = []
    for found, expected, other in zip(
        (*net.backbone.parameters(), *net.head.linear.parameters()), twin.parameters(), free.parameters(), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=5e-6)
        far.append((found - other).abs().max().item())
    assert max(far) > 5e-4  # and it does matter


def test_a_pull_adds_to_the_gradients_there_are_and_to_no_other(make_net):
    net, ewc = make_net("finetune"), create_method("ewc")
    net.add_task("one", 2)
    ewc.attach(net, 1)
    for tensor in ewc.fisher.values():
        tensor.fill_(1e-3)
    for name, p in net.shared_parameters().items():
        p.grad = torch.ones_like(p) if name.startswith("1.") else None
    ewc.add_gradients(net)
    for name, p in net.shared_parameters().items():
        if name.startswith("1."):
            torch.testing.assert_close(p.grad, 1 + 300 * 1e-3 * p.detach())
        else:
            assert p.grad is None
    assert [p.grad for p in net.head.parameters()] == [None, None]
    for p in net.shared_parameters().values():
        p.grad = None
    ewc.add_gradients(net)  # nothing is trained: nothing to do
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("base", ["finetune", "confit"])
def test_what_is_kept_between_tasks(make_run, base):
    """Two numbers a shared weight, RWalk four."""
    for name, numbers in (("ewc", 2), ("si", 2), ("mas", 2), ("rwalk", 4), ("cpr", 0)):
        run = make_run(f"{base}+{name}", epochs=1)
        run.run()
        (added,) = run.method.added
        assert added.storage() == numbers * sum(p.numel() for p in run.net.shared_parameters().values())
        assert run.method.storage() == 0


@pytest.mark.parametrize("name", [*PULLS, "afec"])
def test_what_is_kept_stays_where_it_is(make_net, make_fit, make_method, tasks, name):
    """A captured step reads the addresses it was captured with."""
    method, net, places = make_method(name), make_net("finetune"), []
    for task in tasks:
        make_fit(net, task, method, epochs=1).fit()
        fields = (*method.kept, *method.running, *method.scratch)
        places.append({field: {k: t.data_ptr() for k, t in getattr(method, field).items()} for field in fields})
    assert len(places[0]) >= 2
    assert places[0] == places[1] == places[2]


class Watch(Method):
    """After every step: whether the shared weights moved, and what another hook pulls to."""

    def __init__(self, other):
        super().__init__()
        self.other, self.steps, self.pulls, self.ends = other, [], [], []

    def held(self):
        return copy.deepcopy(pulls_of(self.other))

    def begin_task(self, context):
        self.before = {name: p.detach().clone() for name, p in context.net.shared_parameters().items()}
        self.begun = self.held()

    def after_step(self, net):
        now = {name: p.detach().clone() for name, p in net.shared_parameters().items()}
        self.steps.append(any(not torch.equal(now[name], self.before[name]) for name in now))
        self.before = now
        self.pulls.append(self.held())

    def end_task(self, context):
        self.ends.append(
            ({name: p.detach().clone() for name, p in context.net.shared_parameters().items()}, self.held())
        )


@pytest.mark.parametrize("name", PULLS)
def test_on_confit_stages_that_freeze_shared_weights_leave_the_pull_consistent(
    make_run, make_method, assert_same, tasks, name
):
    method = make_method(f"confit+{name}")
    watch = Watch(method.added[0])
    make_run(method, hooks=[watch], epochs=5, tasks=tasks[:2]).run()
    # 27 and 25 images are 3 steps an epoch each; convolutions are trained in the last 3 of 5 epochs.
    assert watch.steps == ([False] * 6 + [True] * 9) * 2
    for step in watch.pulls[15:]:
        assert_same(step, watch.begun)
    (_, _, anchor, weight), first = watch.begun[0], watch.ends[0][0]
    assert list(anchor) == list(weight) == ["0.weight", "3.weight", "3.bias"]
    assert_same(anchor, first)
    assert all(tensor.abs().max() > 0 for key, tensor in weight.items() if key != "3.bias")
    for now, ((_, _, anchor, _),) in watch.ends:
        assert_same(anchor, now)


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
    follow = Follow(method.added[0])
    method.added = (follow, *method.added)
    make_run(method, epochs=5).run()
    assert follow.ends == 3


@pytest.mark.parametrize("name", [*PULLS, "afec"])
def test_a_state_can_be_loaded_before_there_is_a_network(make_net, tasks, context_of, assert_same, name):
    net = make_net("finetune")
    context, first, second = context_of(net, tasks[0]), create_method(name), create_method(name)
    first.attach(net, 0)
    first.begin_task(context)
    first.end_task(context)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert_same(second.state_dict(), first.state_dict())
    second.attach(net, 0)
    assert_same(second.state_dict(), first.state_dict())


# ---- the limit of a pull ---------------------------------------------------------------------------------------------


class Notes(Listener):
    def __init__(self):
        self.said = []

    def note(self, message):
        self.said.append(message)


@pytest.mark.parametrize("name", PULLS)
def test_a_pull_that_would_swing_up_is_limited(make_run, name):
    options = {name: {"strength": 1e9}}
    with pytest.raises(DivergedError):
        make_run(name, options, epochs=2).run()
    notes = Notes()
    run = make_run(name, options, epochs=2, pull_limit=1.0, listeners=(notes,))
    run.run()
    assert all(bool(parameter.isfinite().all()) for parameter in run.net.parameters())
    assert any(f"{name}: lr x strength x importance reaches" in note and "limited to 1" in note for note in notes.said)


def test_a_limited_pull_goes_to_its_anchor_in_one_step():
    net = Method().network(nn.Sequential(nn.Conv2d(3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    net.add_task("one", 2)
    parameter = net.backbone[0].bias
    parameter.grad = torch.zeros_like(parameter)
    anchor = {"0.bias": parameter.detach() - torch.tensor([1.0, 2.0])}
    Pull(anchor, {"0.bias": torch.tensor([3.0, 500.0])}, 10.0).add_gradient(net, most=100.0)  # 1 / lr
    torch.testing.assert_close(parameter.grad, torch.tensor([30.0, 200.0]))


@pytest.mark.parametrize("name", PULLS)
def test_pulls_that_are_stable_are_not_changed_by_the_limit(make_run, name):
    notes, options = Notes(), {name: {"strength": 1e-3}}
    limited = make_run(name, options, epochs=2, pull_limit=1.0, listeners=(notes,)).run()
    assert limited.final_sha256 == make_run(name, options, epochs=2).run().final_sha256
    assert not notes.said


def test_runs_have_the_limit_and_the_papers_have_none(tmp_path):
    recipe = make_recipe({"dataset": "photos", "methods": ["ewc", "confit"]})
    assert recipe.train_settings(0, "ewc").pull_limit == 1.0
    assert recipe.train_settings(0, "confit").pull_limit is None
    paper = Scope(tmp_path).recipe("flowers102", "ewc")
    assert paper.train_settings(0, "ewc").pull_limit is None
    assert "pull_limit" not in paper.identity("ewc", 0, "0" * 64)  # results of before are still theirs
