"""RWalk: the running Fisher and the path score against a few steps by hand."""

import numpy as np
import pytest
import torch

from confitune.experiments.paper.numbers import chosen_options
from confitune.methods.rwalk import RWalk


@pytest.fixture
def walk(linear_model, float_task, context_of):
    """Steps of given gradients and moves, with Eq. 7 and 8 followed in numpy."""

    class Walk:
        def __init__(self, **options):
            self.draw = np.random.default_rng(5)
            self.rwalk = RWalk(**options)
            self.net = linear_model().net
            self.parameters = self.net.shared_parameters()
            self.share, self.epsilon = 0.9, 0.01
            self.fisher = {name: np.zeros(p.shape) for name, p in self.parameters.items()}
            self.score = {name: np.zeros(p.shape) for name, p in self.parameters.items()}
            self.tasks = 0

        def begin(self):
            self.context = context_of(self.net, float_task(f"task{self.tasks}"))
            self.rwalk.attach(self.net, self.tasks)
            self.rwalk.begin_task(self.context)

        def step(self, frozen=(), added=0.0):
            """One of each weight's numbers does not move, and one goes uphill; `added` is the pulls' gradient."""
            gradients = {}
            for name, p in self.parameters.items():
                p.grad = None
                if name not in frozen:
                    gradients[name] = self.draw.normal(0, 1, p.shape)
                    p.grad = torch.from_numpy(gradients[name].copy())
            self.rwalk.read_gradients(self.net)
            for name, g in gradients.items():
                self.parameters[name].grad += added
                moved = -0.2 * g
                moved.flat[0], moved.flat[1] = 0.0, 0.3 * g.flat[1]
                before = self.parameters[name].detach().clone()
                with torch.no_grad():
                    self.parameters[name] += torch.from_numpy(moved)
                moved = (self.parameters[name].detach() - before).numpy()
                g = g + added if self.rwalk.options.gradient == "total" else g
                self.fisher[name] = self.share * g**2 + (1 - self.share) * self.fisher[name]
                gain = -g * moved / (0.5 * self.fisher[name] * moved**2 + self.epsilon)
                self.score[name] = self.score[name] + (np.maximum(gain, 0) if self.rwalk.options.positive else gain)
            self.rwalk.after_step(self.net)

        def end(self):
            self.rwalk.end_task(self.context)
            self.net.finish_task()
            self.tasks += 1
            self.score = {name: score / 2 for name, score in self.score.items()}

        def assert_tracked(self):
            for name in self.parameters:
                for mine, expected in ((self.rwalk.fisher, self.fisher), (self.rwalk.score, self.score)):
                    np.testing.assert_allclose(mine[name].numpy(), expected[name], rtol=1e-11, atol=1e-14)

    return Walk


def test_fisher_and_score_follow_their_equations_over_two_tasks(walk):
    it = walk()
    for _ in range(2):
        it.begin()
        it.assert_tracked()  # neither starts anew with a task
        for _ in range(4):
            it.step(added=0.4)
            it.assert_tracked()
        it.end()
        it.assert_tracked()
    assert all(score.min() >= 0 and score.flat[0] == 0 for score in it.score.values())
    assert all(score.max() > 0.1 for score in it.score.values())


def test_a_path_may_be_of_the_total_gradient_and_go_uphill(walk):
    it = walk(gradient="total", positive=False)
    it.begin()
    for _ in range(3):
        it.step(added=0.4)
        it.assert_tracked()
    assert all(score.min() < -0.01 for score in it.score.values())


def test_the_score_is_halved_at_the_end_of_every_task(walk):
    it = walk()
    it.begin()
    it.step()
    whole = {name: tensor.clone() for name, tensor in it.rwalk.score.items()}
    for part in (1 / 2, 1 / 4):
        it.end()
        for name, tensor in it.rwalk.score.items():
            assert torch.equal(tensor, whole[name] * part)
        it.begin()


def test_frozen_weights_keep_fisher_and_score(walk):
    it = walk()
    it.begin()
    it.step()
    it.step(frozen=["0.weight"])
    it.step(frozen=["0.weight", "0.bias"])
    it.step(frozen=["0.bias"])
    it.assert_tracked()


def pulls(it):
    """The gradient that is added, by parameter."""
    for p in it.parameters.values():
        p.grad = torch.zeros_like(p)
    it.rwalk.attach(it.net, it.tasks)
    it.rwalk.add_gradients(it.net)
    return {name: p.grad.numpy().copy() for name, p in it.parameters.items()}


def test_the_pull_uses_what_held_at_the_end_of_the_last_task(walk):
    """2 lambda (F + s)(theta - theta*), with F and s of then, however they went on since."""
    it = walk(strength=7)
    for _ in range(2):
        it.begin()
        for _ in range(3):
            it.step()
        it.end()
        anchor = {name: p.detach().numpy().copy() for name, p in it.parameters.items()}
        held = {name: it.fisher[name] + it.score[name] for name in it.fisher}
        assert all((pull == 0).all() for pull in pulls(it).values())
        it.begin()
        for _ in range(3):
            it.step()
            for name, pull in pulls(it).items():
                expected = 2 * 7 * held[name] * (it.parameters[name].detach().numpy() - anchor[name])
                np.testing.assert_allclose(pull, expected, rtol=1e-11, atol=1e-13)
                assert np.abs(expected).max() > 0.1
        assert all(np.abs(it.fisher[name] + it.score[name] - held[name]).max() > 0.1 for name in held)
        it.end()


def test_in_the_first_task_nothing_pulls(walk):
    it = walk()
    it.begin()
    it.step()
    assert all((pull == 0).all() for pull in pulls(it).values())


def test_where_the_strength_is_the_papers_the_options_have_the_values_of_the_cpr_code():
    assert RWalk().options.model_dump() == {"strength": 10.0, "positive": True, "gradient": "loss"}
    chosen = RWalk(**chosen_options("flowers102")["rwalk"]).options
    assert chosen.model_dump() == {"strength": 100, "positive": False, "gradient": "total"}
