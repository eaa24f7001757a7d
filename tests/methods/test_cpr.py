"""CPR: its term is minus beta times the entropy of the prediction."""

import numpy as np
import pytest
import torch
from scipy.special import softmax
from scipy.stats import entropy

from confitune.methods import Step, create_method
from confitune.methods.cpr import CPR


def of(logits, beta):
    """The term for these logits."""
    return CPR(beta=beta).loss(Step(None, None, logits, None, None))


LOGITS = np.random.default_rng(0).normal(0, 3, (7, 5))


def test_the_term_is_minus_beta_times_the_mean_entropy():
    term = of(torch.from_numpy(LOGITS), 0.3)
    assert term.item() == pytest.approx(-0.3 * entropy(softmax(LOGITS, 1), axis=1).mean(), rel=1e-6)


def test_the_term_is_the_divergence_from_uniform_up_to_a_constant():
    p = softmax(LOGITS, 1)
    divergence = entropy(p, np.full_like(p, 1 / 5), axis=1).mean()
    term = of(torch.from_numpy(LOGITS), 1)
    assert term.item() + np.log(5) == pytest.approx(divergence, rel=1e-6)


def test_its_gradient():
    """Of the mean over n images: beta / n * p_k (log p_k + entropy)."""
    logits = torch.from_numpy(LOGITS).requires_grad_()
    of(logits, 0.3).backward()
    p = softmax(LOGITS, 1)
    expected = 0.3 / 7 * p * (np.log(p) + entropy(p, axis=1)[:, None])
    np.testing.assert_allclose(logits.grad.numpy(), expected, rtol=1e-5, atol=1e-8)


def test_certain_predictions_have_no_entropy():
    logits = torch.tensor([[1e4, 0.0, -1e4]], requires_grad=True)
    term = of(logits, 1)
    term.backward()
    assert term.item() == 0
    assert (logits.grad == 0).all()


def test_sgd_on_the_term_alone_makes_predictions_uniform():
    logits = torch.from_numpy(LOGITS).requires_grad_()
    optimizer = torch.optim.SGD([logits], 20)
    for _ in range(200):
        optimizer.zero_grad()
        of(logits, 1).backward()
        optimizer.step()
    np.testing.assert_allclose(logits.softmax(1).detach().numpy(), 1 / 5, atol=0.01)


@pytest.mark.parametrize("base", ["finetune", "mas", "si", "confit"])
def test_without_beta_it_is_the_method_without_it_to_the_bit(make_run, base):
    epochs = 5 if base == "confit" else 2
    alone = make_run(base, epochs=epochs).run().final_sha256
    assert make_run(f"{base}+cpr", {"cpr": {"beta": 0}}, epochs=epochs).run().final_sha256 == alone
    assert make_run(f"{base}+cpr", epochs=epochs).run().final_sha256 != alone


def test_it_acts_in_the_first_task_too(make_run, tasks):
    plain, regularised = (make_run(name, tasks=tasks[:1]).run() for name in ("finetune", "cpr"))
    assert plain.final_sha256 != regularised.final_sha256


def test_predictions_become_less_certain(make_run, tasks):
    certainty = []
    for beta in (0, 1):
        run = make_run("cpr", {"cpr": {"beta": beta}}, epochs=15)
        run.run()
        net, task = run.net.eval(), tasks[-1]
        with torch.no_grad():
            p = net(task.preprocess(task.train.pixels[task.train.rows]), task.name).softmax(1).numpy()
        certainty.append(entropy(p, axis=1).mean())
    assert certainty[1] > certainty[0] + 0.1


def test_it_keeps_nothing(make_run):
    run = make_run("cpr", epochs=1)
    run.run()
    (cpr,) = run.method.hooks
    assert cpr.storage() == 0
    assert cpr.state_dict() == {}
    (default,) = create_method("cpr").hooks
    assert default.options.model_dump() == {"beta": 0.05}
