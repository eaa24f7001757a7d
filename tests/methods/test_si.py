"""SI: its path integral is the fall of the loss, and its importances are Eq. 5's."""

import numpy as np
import pytest
import torch

from confitune.methods import Method, Stage
from confitune.methods.si import SI


class Look(Method):
    """Trains no head; sees the path integral before it is turned into importances, and the loss on the way."""

    def __init__(self, si, loss):
        super().__init__()
        self.si, self.loss_of = si, loss

    def stages(self, epochs, index):
        return (Stage("backbone", epochs, frozenset({"norms", "weights"})),)

    def begin_task(self, context):
        self.start = self.loss_of()

    def end_task(self, context):
        self.path = {name: tensor.clone() for name, tensor in self.si.path.items()}
        self.fall = self.start - self.loss_of()


def path_and_fall(model, task, lr, epochs, make_fit, loss):
    si = SI()
    look = Look(si, loss)
    look.added = (si,)
    make_fit(model.net, task, look, epochs=epochs, lr=lr, batch_size=len(task.train)).fit()
    return sum(tensor.sum().item() for tensor in look.path.values()), look.fall


def test_the_path_integral_tends_to_the_fall_of_the_loss(linear_model, float_task, make_fit, numpy_softmax):
    """Steps a tenth as long, ten times as many: a tenth of the error, the loss's fall the same."""
    task = float_task(images=30, spread=2.0)
    x, labels = task.train.pixels.mean((2, 3)).numpy(), task.train.labels.numpy()
    errors, falls = [], []
    for lr, epochs in ((0.2, 20), (0.02, 200)):
        model = linear_model()

        def loss(model=model):
            return -np.log(numpy_softmax(model.logits(x))[np.arange(len(x)), labels]).mean()

        path, fall = path_and_fall(model, task, lr, epochs, make_fit, loss)
        errors.append(path - fall)
        falls.append(fall)
    assert falls[0] == pytest.approx(falls[1], rel=0.05)
    assert falls[0] > 0.2
    assert 0 < errors[0] < 0.3 * falls[0]  # a convex loss falls by less than its tangents say
    assert errors[1] == pytest.approx(errors[0] / 10, rel=0.2)


@pytest.fixture
def walk(linear_model, float_task, context_of):
    """A walk of given gradients and moves; what is expected of it, in numpy."""

    class Walk:
        def __init__(self, si):
            self.draw = np.random.default_rng(3)
            self.model, self.si = linear_model(), si
            self.net = self.model.net
            self.parameters = self.net.shared_parameters()
            self.task = 0
            self.omega = {name: np.zeros(p.shape) for name, p in self.parameters.items()}

        def begin(self):
            self.context = context_of(self.net, float_task(f"task{self.task}"))
            self.si.attach(self.net, self.task)
            self.si.begin_task(self.context)
            self.start = self.weights()
            self.path = {name: np.zeros(p.shape) for name, p in self.parameters.items()}

        def weights(self):
            return {name: p.detach().numpy().copy() for name, p in self.parameters.items()}

        def step(self, frozen=(), added=0.0, total=False):
            """`added` stands for what penalties add to the gradients."""
            moves = {}
            for name, p in self.parameters.items():
                p.grad = None if name in frozen else torch.from_numpy(self.draw.normal(0, 1, p.shape))
            read = {name: p.grad.numpy().copy() for name, p in self.parameters.items() if p.grad is not None}
            self.si.read_gradients(self.net)
            for name, p in self.parameters.items():
                if p.grad is not None:
                    p.grad += added
                    moves[name] = self.draw.normal(-0.3 * p.grad.numpy(), 0.5)
                    with torch.no_grad():
                        p += torch.from_numpy(moves[name])
            self.si.after_step(self.net)
            for name, moved in moves.items():
                self.path[name] -= (read[name] + (added if total else 0)) * moved

        def end(self, damping=0.1, positive=True):
            self.si.end_task(self.context)
            self.net.finish_task()
            self.task += 1
            for name, now in self.weights().items():
                new = self.path[name] / ((now - self.start[name]) ** 2 + damping)
                self.omega[name] += np.maximum(new, 0) if positive else new

        def assert_path(self):
            for name, expected in self.path.items():
                np.testing.assert_allclose(self.si.path[name].numpy(), expected, rtol=1e-12, atol=1e-12)

        def assert_omega(self):
            assert any((tensor < 0).any() for tensor in self.path.values())
            for name, expected in self.omega.items():
                np.testing.assert_allclose(self.si.omega[name].numpy(), expected, rtol=1e-12, atol=1e-12)
                np.testing.assert_array_equal(self.si.anchor[name].numpy(), self.weights()[name])

    return Walk


def test_importances_are_the_positive_part_of_path_over_way_summed_over_tasks(walk):
    it = walk(SI())
    for _ in range(3):
        it.begin()
        for _ in range(4):
            it.step()
        it.assert_path()
        it.end()
        it.assert_omega()
    assert all((tensor >= 0).all() for tensor in it.si.omega.values())


def test_the_damping_is_an_option(walk):
    it = walk(SI(damping=0.01))
    it.begin()
    for _ in range(3):
        it.step()
    it.end(damping=0.01)
    it.assert_omega()


def test_importances_may_be_left_negative(walk):
    it = walk(SI(positive=False))
    for _ in range(2):
        it.begin()
        for _ in range(3):
            it.step()
        it.end(positive=False)
        it.assert_omega()
    assert any((tensor < 0).any() for tensor in it.si.omega.values())


@pytest.mark.parametrize("gradient", ["loss", "total"])
def test_the_gradient_is_the_losss_or_the_total_one(walk, gradient):
    it = walk(SI(gradient=gradient))
    it.begin()
    for _ in range(3):
        it.step(added=0.7, total=gradient == "total")
    it.assert_path()


def test_frozen_weights_bring_nothing_about(walk):
    it = walk(SI())
    it.begin()
    it.step()
    before = it.si.path["0.weight"].clone()
    it.step(frozen=["0.weight"])
    assert torch.equal(it.si.path["0.weight"], before)
    it.step(frozen=["0.weight", "0.bias"])
    it.step()
    it.assert_path()
    it.end()
    it.assert_omega()


def test_the_path_starts_anew_where_the_weights_were_moved_between_tasks(walk):
    it = walk(SI())
    it.begin()
    it.step()
    it.end()
    with torch.no_grad():
        it.parameters["0.bias"] += 5
    it.begin()
    it.step()
    it.assert_path()


def test_the_pull_is_twice_c_times_omega_times_distance(walk):
    """c * Omega * (theta - theta*)^2 has no half in front."""
    it = walk(SI(strength=3))
    it.begin()
    for _ in range(3):
        it.step()
    it.end()
    anchor = it.weights()
    with torch.no_grad():
        for p in it.parameters.values():
            p += torch.from_numpy(it.draw.normal(0, 1, p.shape))
            p.grad = torch.full_like(p, 0.25)
    it.si.attach(it.net, 1)
    it.si.add_gradients(it.net)
    for name, p in it.parameters.items():
        expected = 0.25 + 2 * 3 * it.omega[name] * (p.detach().numpy() - anchor[name])
        np.testing.assert_allclose(p.grad.numpy(), expected, rtol=1e-12)


def test_the_options_have_the_papers_values():
    assert SI().options.model_dump() == {"strength": 10.0, "damping": 0.1, "positive": True, "gradient": "loss"}
