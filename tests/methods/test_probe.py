"""When a task keeps the pre-trained state, and that deciding leaves no trace."""

import copy

import pytest
import torch

from confitune.engine import Listener, evaluate, fit, network_sha256
from confitune.errors import ConfituneError
from confitune.methods import METHODS, Penalty, create_method
from confitune.methods.linear import fit_head, unexplained
from confitune.methods.probe import Probe

NEVER = {"probe": {"worse": 1e9}}
ALWAYS = {"probe": {"worse": 0, "most": 1e9}}


class Hears(Listener):
    def __init__(self):
        self.notes, self.epochs, self.stages, self.steps = [], 0, 0, 0

    def note(self, message):
        self.notes.append(message)

    def stage_started(self, stage):
        self.stages += 1

    def step_done(self, step, steps):
        self.steps += 1

    def epoch_ended(self, end):
        self.epochs += 1


# ---- by name ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "cases"),
    [
        # what is unexplained with the pre-trained state, with the task's own -> stays
        ({}, {(0.07, 0.29): True, (0.28, 0.36): False, (0.2, 0.39): False, (0.2, 0.4): True, (0.0, 0.0): True}),
        ({}, {(0.5, 1.0): True, (0.51, 9.0): False, (0.5,): True, (0.51,): False}),
        ({"worse": 3}, {(0.1, 0.29): False, (0.1, 0.31): True}),
        ({"worse": 0}, {(0.4, 0.0): True, (0.6, 0.7): False}),
        ({"most": 0.2}, {(0.2, 0.5): True, (0.21, 0.9): False}),
        ({"worse": 0, "most": 9}, {(8.0, 0.0): True}),
    ],
)
def test_when_it_stays(options, cases):
    probe = Probe(**options)
    assert {case: probe.may_stay(*case) for case in cases} == cases
    assert all(type(probe.may_stay(*case)) is bool for case in cases)


def test_by_name_and_with_options():
    method = create_method("confit+probe", {"probe": {"worse": 3, "most": 0.4, "images": 64}})
    assert (method.norm, method.network) == ("xconv", {"keep_pretrained": True})
    assert method.hooks[0].options.model_dump() == {"worse": 3.0, "most": 0.4, "hold": True, "images": 64}
    alone = create_method("probe")
    assert (alone.name, alone.norm, alone.schedule) == ("probe", "xconv", METHODS["confit"].schedule)
    assert [part.name for part in alone.hooks] == ["probe"]
    best = METHODS["best"].network
    assert best == {**METHODS["best"].net_options, "keep_pretrained": True}
    assert create_method("best", {"probe": {"images": 7}}).hooks[0].options.images == 7
    assert METHODS["confit"].network == {}


@pytest.mark.parametrize("base", ["finetune", "task-bn", "bn-only", "hierarchical"])
def test_it_needs_xconv_batch_norm(base):
    with pytest.raises(ConfituneError, match=rf"{base}\+probe: probe is for networks with Xconv BN: confit\+probe"):
        create_method(f"{base}+probe")


@pytest.mark.parametrize("options", [{"worse": -0.5}, {"most": -1}, {"images": 1}, {"image": 3}])
def test_wrong_options_are_named(options):
    with pytest.raises(ConfituneError, match=r"options of probe: .*there are: worse, most, hold, images"):
        create_method("probe", {"probe": options})


def test_steps_of_all_tasks_are_captured_as_one():
    for penalty in create_method("best").hooks:
        assert penalty.captured_kind(1) == penalty.captured_kind(2)


def test_a_network_that_does_not_keep_the_state_is_refused(make_net, tasks, make_method, make_settings):
    with pytest.raises(ConfituneError, match="keep_pretrained=True"):
        fit(make_net("finetune-xconv"), tasks[0], make_method("confit+probe"), make_settings())


def test_what_is_kept_once_is_counted(make_net, make_method):
    probe = make_method("confit+probe").hooks[0]
    assert probe.storage() == 0
    probe.attach(make_net("finetune-xconv", keep_pretrained=True))
    # Weight, bias, mean and variance of 8 and 12 channels; windows of 3x3 of 3 and 8.
    assert probe.storage() == 4 * (8 + 12) + 9 * (3 + 8)
    assert probe.state_dict() == {}


# ---- a task that settles ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("statistics", ["running", "pass"])
def test_a_task_that_settles_moves_nothing(make_net, tasks, make_method, make_settings, statistics):
    net = make_net("finetune-xconv", keep_pretrained=True, statistics=statistics, dropout=0.3)
    original, hears, task = copy.deepcopy(net.backbone).eval(), Hears(), tasks[0]
    before = copy.deepcopy(net.backbone.state_dict())
    fit(net, task, make_method("confit+probe", ALWAYS), make_settings(), hears)
    after = net.backbone.state_dict()
    assert list(after) == list(before)
    # Means are kept in terms of M, so that they can follow: they come back but for rounding.
    assert all(torch.equal(after[key], before[key]) for key in before if not key.endswith("running_mean"))
    net.eval().prepare()
    for key, value in net.backbone.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=1e-5, atol=1e-6)
    assert (hears.epochs, hears.stages, hears.steps, len(hears.notes)) == (0, 0, 0, 1)
    entry = net.tasks["dark"]
    assert (entry.finished, entry.pretrained, entry.row.numel()) == (True, True, 3 * 12 + 3)
    assert all(p.requires_grad and p.grad is None for p in net.parameters())
    # The head is the one that is fitted to what the original network makes of all training images, in stored order.
    x = task.inputs(task.train.pixels[task.train.rows])
    with torch.no_grad():
        features = original(x)
    weight, bias = fit_head(features, task.train.labels, 3)
    found = net.task_state_dict("dark")
    with torch.no_grad():
        torch.testing.assert_close(net(x), features @ weight.T + bias, rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(found["head.weight"], weight, rtol=0.02, atol=0.02 * weight.abs().max().item())
    assert evaluate(net, task, make_settings()) > 60


def test_the_note_says_what_was_left_unexplained(make_net, tasks, make_method, make_settings):
    """27 images in batches of 8: both classifiers are judged on the first 24 of a random order."""
    task, hears = tasks[0], Hears()
    net = make_net("finetune-xconv", keep_pretrained=True)
    original = copy.deepcopy(net.backbone)
    order = []
    sample = Probe.settles

    class Spy(Probe):
        def settles(self, context):
            order.append(context.sample(self.options.images))
            return sample(self, context)

    method = make_method("confit+probe", ALWAYS)
    object.__setattr__(method, "penalties", (Spy(**ALWAYS["probe"]),))
    fit(net, task, method, make_settings(), hears)
    (chosen,) = order
    assert len(chosen) == len(set(chosen.tolist())) == 24
    assert chosen.tolist() != sorted(chosen.tolist())
    x, labels = task.inputs(task.train.pixels[task.train.rows[chosen]]), task.train.labels[chosen]
    with torch.no_grad():
        pretrained = unexplained(original.eval()(x), labels, 3)
        for norm in (original[1], original[4]):
            norm.train()
        own = unexplained(original(x), labels, 3)
    (note,) = hears.notes
    assert note.startswith(f"task 'dark': a linear classifier leaves {pretrained:.0%} of left-out labels unexplained")
    assert f"with pre-trained statistics, {own:.0%} with the task's own" in note


def test_a_task_that_is_trained_on_is_not_asked_again(make_net, tasks, make_method, make_settings):
    net, hears = make_net("finetune-xconv", keep_pretrained=True), Hears()
    fit(net, tasks[0], make_method("confit+probe", NEVER), make_settings(epochs=5))
    net.reopen("dark")
    fit(net, tasks[0], make_method("confit+probe", ALWAYS), make_settings(epochs=5), hears)
    assert (hears.epochs, net.tasks["dark"].pretrained) == (5, False)


# ---- a task that does not --------------------------------------------------------------------------------------------


def at_random(task):
    """The same images with labels that say nothing."""
    labels = task.train.labels[torch.randperm(len(task.train.labels), generator=torch.Generator().manual_seed(0))]
    changed = copy.copy(task)
    object.__setattr__(changed, "train", type(task.train)(task.train.pixels, task.train.rows, labels))
    return changed


class Draws(Method):
    """Draws random numbers where methods may."""

    def __init__(self):
        super().__init__()
        self.drawn = []

    def begin_task(self, context):
        self.drawn.append(torch.rand(2).tolist())

    def begin_epoch(self, context, epoch):
        self.drawn.append(torch.rand(2).tolist())

    def end_task(self, context):
        self.drawn.append(torch.rand(2).tolist())


OF_NETS = {
    "running": {},
    "pass": {"statistics": "pass"},
    "phase": {"means": "phase"},
    "best": {"rank": 2, "statistics": "pass", "variance": "ratio"},
    "cumulative": {"momentum": None},
}


@pytest.mark.parametrize("of_net", OF_NETS.values(), ids=OF_NETS)
def test_a_task_that_does_not_settle_is_trained_as_without_the_probe(
    make_net, tasks, make_method, make_settings, assert_same, of_net
):
    found = []
    for name in ("confit", "confit+probe"):
        method, draws = make_method(name, NEVER), Draws()
        object.__setattr__(method, "penalties", (*method.hooks, draws))
        # Both keep the state: where variances follow, they follow from the first task on then.
        net, hears = make_net("finetune-xconv", keep_pretrained=True, dropout=0.3, **of_net), Hears()
        settings = make_settings(epochs=5, augmentation="flip-shift", momentum=0.9, lr=0.01)
        torch.manual_seed(5)
        for task in tasks[:2]:
            fit(net, at_random(task), method, settings, hears)
        assert hears.epochs == 10
        assert hears.notes == []
        assert all(entry.finished and not entry.pretrained for entry in net.tasks.values())
        state = copy.deepcopy(net.state_dict())
        measured = state["_extra_state"].pop("pretrained")
        assert int(measured["images"]) == (24 if "probe" in name else 0)  # before weights first move
        found.append({"state": state, "drawn": draws.drawn, "random": torch.get_rng_state()})
    assert_same(*found)


def test_an_ordinary_network_is_trained_to_the_same_bits(make_run, tasks):
    """Not even where the state is kept does the hash of a run differ, but for what is kept."""
    runs = {}
    for name in ("confit", "confit+probe"):
        run = make_run(name, NEVER, tasks=[at_random(task) for task in tasks], epochs=5)
        run.run()
        runs[name] = run.net
    plain, probed = runs.values()
    assert {name: entry.row.tolist() for name, entry in plain.tasks.items()} == {
        name: entry.row.tolist() for name, entry in probed.tasks.items()
    }
    for one, other in zip(plain.backbone.state_dict().values(), probed.backbone.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert network_sha256(plain) != network_sha256(probed)


@pytest.mark.parametrize("method", ["confit+probe", "best"])
def test_earlier_tasks_are_what_they_were_after_one_that_settles(make_run, method):
    """The first is trained (it does not ask), the others settle: nothing moves any more."""

    class Second(Probe):
        def settles(self, context):
            return context.index > 0 and super().settles(context)

    run = make_run(method, ALWAYS, epochs=5)
    second = tuple(Second(**ALWAYS["probe"]) if part.name == "probe" else part for part in run.method.hooks)
    object.__setattr__(run.method, "penalties", second)
    # A state that was never measured cannot follow: here the first task measures it without being settled by it.
    seen = []

    class Measured(Listener):
        def task_started(self, task, name, first_epoch):
            if task == 0:
                x = run.sequence[0].inputs(run.sequence[0].train.pixels[:8])
                with run.net.at_pretrained(8):
                    seen.append(run.net.features_of(x))

    run.listener._all = (*run.listener._all, Measured())
    result = run.run()
    assert [entry.pretrained for entry in run.net.tasks.values()] == [False, True, True]
    matrix = result.accuracy_matrix
    assert matrix[0][0] == matrix[0][1] == matrix[0][2]
    assert matrix[1][1] == matrix[1][2]
    assert [task["norm_numbers"] for task in result.tasks] == [run.net.numbers_per_task, 0, 0]
    assert seen[0].shape == (8, 12)


# ---- tasks that are trained while others rest on the pre-trained state ----------------------------------------------


@pytest.fixture
def rested(make_net, tasks, make_method, make_settings):
    """A network, with one task at rest and one that was trained then, and what changed of the one at rest."""

    def make(method="best", hold=True, **of_net):
        net, hears = make_net("finetune-xconv", **{**create_method(method).network, **of_net}), Hears()
        settings, x = make_settings(epochs=5, lr=0.05), tasks[0].test
        fit(net, tasks[0], make_method(method, ALWAYS), settings, hears)
        images = tasks[0].inputs(x.pixels[x.rows])
        before = net.eval()(images, tasks[0].name).detach().clone()
        weights = [p.detach().clone() for p in net.groups()["weights"]]
        never = {"probe": {**NEVER["probe"], "hold": hold}}
        hears.notes.clear()
        fit(net, tasks[1], make_method(method, never), settings, hears)
        assert [entry.pretrained for entry in net.tasks.values()] == [True, False]
        moved = sum(not torch.equal(p.detach(), w) for p, w in zip(net.groups()["weights"], weights, strict=True))
        return net, hears, moved, (net.eval()(images, tasks[0].name) - before).abs().max().item()

    return make


@pytest.mark.parametrize("method", ["best", "confit+probe"])
def test_a_task_at_rest_answers_to_the_bit_as_before(rested, method, tasks):
    net, hears, moved, difference = rested(method)
    assert (moved, difference) == (0, 0.0)
    assert hears.notes == [
        f"task {tasks[1].name!r}: convolutions stay as they are, for {tasks[0].name!r}; batch norms and a head are "
        "trained"
    ]
    assert evaluate(net, tasks[1]) > 60  # what is trained is enough for that
    named = net.task_state_dict(tasks[1].name)
    assert not torch.equal(named["1.weight"], torch.ones_like(named["1.weight"]))


def test_they_move_where_that_is_asked_for(rested):
    _, hears, moved, difference = rested(hold=False)
    assert moved == 2
    assert difference > 0
    assert hears.notes == []


def test_nothing_is_held_for_a_task_itself(make_net, tasks, make_method, make_settings):
    net = make_net("finetune-xconv", **create_method("best").network)
    fit(net, tasks[0], make_method("best", ALWAYS), make_settings(epochs=5))
    assert Probe().holds(net) == frozenset()
    net.add_task("more", 2)
    assert Probe().holds(net) == {"conv"}
    assert Probe(hold=False).holds(net) == frozenset()
