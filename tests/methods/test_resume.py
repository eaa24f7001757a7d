"""Everything a method keeps is in its state: a run that was killed and resumed equals one that was not."""

import copy

import pytest

from confitune.methods import Method
from killed import Killed, Killer, Starts

CASES = {
    "ewc": ("ewc", {}, {}),
    "ewc train mode": ("ewc", {"ewc": {"mode": "train"}}, {}),
    "si": ("si", {}, {}),
    "si total": ("si", {"si": {"gradient": "total", "positive": False, "strength": 0.1}}, {}),
    "rwalk": ("rwalk", {}, {}),
    "mas": ("mas", {}, {}),
    "mas-cpr": ("mas-cpr", {}, {}),
    "mas-afec": ("mas-afec", {}, {}),
    "ewc+cpr": ("ewc+cpr", {}, {}),
    "confit+mas": ("confit+mas", {}, {"epochs": 5}),
    "confit+si+afec": ("confit+si+afec", {}, {"epochs": 5}),
    "confit+rwalk": ("confit+rwalk", {"rwalk": {"strength": 1}}, {"epochs": 5, "dropout": 0.3}),
    "task-bn+ewc": ("task-bn+ewc", {}, {}),
    "mas-afec with dropout": ("mas-afec", {}, {"dropout": 0.3}),
    "ccll": ("ccll", {}, {"lr_schedule": "step"}),
    "ccll identity frozen": ("ccll", {"ccll": {"start": "identity", "frozen": "always"}}, {}),
}


def states(run):
    return copy.deepcopy([hook.state_dict() for hook in run.method.hooks])


@pytest.mark.parametrize(("method", "options", "settings"), CASES.values(), ids=CASES)
def test_resumed_equals_undisturbed(make_run, tmp_path, assert_same, method, options, settings):
    whole = make_run(method, options, **settings)
    reference = whole.run()
    last = settings.get("epochs", 3) - 1
    for task, epoch in ((1, None), (1, last), (0, 1)):
        folder = tmp_path / f"killed in {task} at {epoch}"
        folder.mkdir()
        with pytest.raises(Killed):
            make_run(method, options, folder=folder, listeners=(Killer(task, epoch),), **settings).run()
        starts = Starts()
        run = make_run(method, options, folder=folder, listeners=(starts,), **settings)
        assert run.resume()
        found = run.run()
        assert starts.tasks[0] == (task, epoch or 0)
        assert found.final_sha256 == reference.final_sha256
        assert found.accuracy_matrix == reference.accuracy_matrix
        assert_same(states(run), states(whole))


@pytest.mark.parametrize("method", ["ewc", "si", "rwalk", "mas", "mas-afec"])
def test_without_its_state_a_resumed_run_would_differ(make_run, tmp_path, method):
    """What the test above rests on: the state matters."""
    whole = make_run(method).run()
    with pytest.raises(Killed):
        make_run(method, folder=tmp_path, listeners=(Killer(1, 2),)).run()
    run = make_run(method, folder=tmp_path)
    fresh = make_run(method).method.hooks
    for hook, empty in zip(run.method.hooks, fresh, strict=True):
        hook.load_state_dict = lambda state, empty=empty, mine=hook: type(mine).load_state_dict(
            mine, empty.state_dict()
        )
    assert run.resume()
    assert run.run().final_sha256 != whole.final_sha256


class HeldToTheStart(Method):
    """A pull towards the pre-trained weights, which are copied where `copied` says."""

    kept = ("start",)

    def __init__(self, copied):
        super().__init__()
        self.copied = copied
        self.attached = []

    def attach(self, net, index):
        super().attach(net, index)
        self.attached.append(index)
        self._copy(net, index, "attach")

    def begin_task(self, context):
        self._copy(context.net, context.index, "begin_task")

    def _copy(self, net, index, where):
        if index == 0 and where == self.copied:
            for name, p in net.shared_parameters().items():
                self.start[name].copy_(p.detach())

    def add_gradients(self, net):
        for name, p in net.shared_parameters().items():
            if p.grad is not None:
                p.grad.add_(p.detach() - self.start[name])


@pytest.mark.parametrize(("copied", "same"), [("begin_task", True), ("attach", False)])
def test_attach_is_called_again_when_a_task_goes_on_and_begin_task_is_not(make_run, tmp_path, copied, same):
    whole = make_run("finetune", hooks=[HeldToTheStart(copied)]).run()
    with pytest.raises(Killed):
        make_run("finetune", hooks=[HeldToTheStart(copied)], folder=tmp_path, listeners=[Killer(0, 1)]).run()
    method = HeldToTheStart(copied)
    run = make_run("finetune", hooks=[method], folder=tmp_path)
    assert run.resume()
    assert (run.run().final_sha256 == whole.final_sha256) == same
    assert method.attached == [0, 1, 2]
