"""The propositions' checks: right where the assumptions hold, wrong where one is broken, and each part on its own."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from scipy.linalg import null_space, subspace_angles
from scipy.signal import correlate2d

from confitune.files import run_file

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples/propositions.py"
propositions = run_file(str(FILE))
check_proposition1 = propositions.check_proposition1
check_proposition2 = propositions.check_proposition2
check_proposition3 = propositions.check_proposition3


@pytest.mark.parametrize("seed", [0, 1])
def test_proposition1_holds(seed):
    found = check_proposition1(seed)
    assert found["holds"]
    assert found["worst_violation"] < 1e-12


@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (2, 3), (4, 2), (1, 2)])
def test_proposition1_with_scipy(kernel, stride):
    """One channel: the mean of the strided 'full' correlation equals that of the map of phase means."""
    chance = np.random.default_rng(kernel + 10 * stride)
    a, weight = chance.normal(2, 1, (7, 9)), chance.normal(size=(kernel, kernel))
    flat = a.copy()
    for p in range(stride):
        for q in range(stride):
            flat[p::stride, q::stride] = a[p::stride, q::stride].mean()
    mean, of_flat = (correlate2d(x, weight, "full")[::stride, ::stride].mean() for x in (a, flat))
    assert mean == pytest.approx(of_flat, abs=1e-13)
    if stride > 1 and kernel > 1:  # one mean for all phases is not enough
        constant = np.full_like(a, a.mean())
        assert abs(correlate2d(constant, weight, "full")[::stride, ::stride].mean() - mean) > 1e-3


def test_the_constant_map():
    a = torch.arange(16.0).reshape(2, 2, 2, 2)
    assert torch.equal(
        propositions.constant_map(a, torch.ones(1, 1, 2, 2)),
        torch.tensor([5.5, 9.5])[None, :, None, None].expand(2, 2, 2, 2),
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_proposition2_holds(seed):
    found = check_proposition2(seed, instances=25)
    assert found["holds"]
    assert found["worst_violation"] <= 0
    assert found["instances"] == 150
    assert found["tighter_with_better_features"]
    best, worst = found["levels"][0], found["levels"][-1]
    assert best["distance"] < 1e-12
    assert worst["distance"] == pytest.approx(2 * np.sin(0.5))
    assert 0.05 < best["tightness"] < 1
    assert worst["bound"] == 0.0


def test_proposition2_needs_one_frame(monkeypatch):
    """Taken as printed, heads are compared although their features are turned against each other."""
    bound = propositions._bound
    turned = np.array([[0.0, 1.0], [-1.0, 0.0]])
    monkeypatch.setattr(propositions, "_bound", lambda head, own, *given: bound(head, own @ turned, *given))
    found = check_proposition2(instances=25)
    assert not found["holds"]
    assert found["worst_violation"] > 0.01


def test_the_bound_in_a_case_by_hand():
    """k = 1, d = 4: B = e1, samples along (e1 + e2) / sqrt 2 and e3, so that half of e1 is outside."""
    x = np.array([[[1, 1, 0, 0], [0, 0, 1, 0]]]) / np.sqrt([[2], [1]])
    features = np.array([[[1.0, 0, 0, 0]]])
    cosine = propositions.smallest_cosine(features, x)
    assert cosine == pytest.approx(np.sqrt(0.5))
    head, best_head, target = np.array([[0.5]]), np.array([[2.0]]), np.array([[2.0, 0, 0, 0]])
    phi2 = abs((0.5 * 2) ** 2 - 4**2)  # 15: phi = 3.87, phi^2 / 2 = 7.5
    assert propositions._bound(head, best_head, target, cosine) == pytest.approx(np.sqrt(0.5) * np.sqrt(phi2) / 9)
    head = np.array([[1.99]])
    phi2 = 16 - 3.98**2  # below 1: phi^2 / 2 is the smaller
    assert propositions._bound(head, best_head, target, cosine) == pytest.approx(np.sqrt(0.5) * phi2 / 2 / 9)


@pytest.fixture
def drawn():
    chance = np.random.default_rng(3)
    features = propositions.orthonormal_rows(chance, 4, 2, 9)
    x = propositions.inputs(chance, 4, 5, 9)
    return chance, features, chance.normal(size=(4, 2)), x, chance.normal(size=(4, 5)) / 3


def test_fine_tuning_follows_gradient_flow(drawn):
    _, features, head, x, y = drawn
    after, head_after = propositions.fine_tune(features, head, x, y, steps=20000, tolerance=1e-10)
    for i in range(4):

        def flow(_, z, i=i):
            b, v = z[:-2].reshape(2, 9), z[-2:]
            r = x[i] @ b.T @ v - y[i]
            return -np.concatenate([np.outer(v, x[i].T @ r).ravel(), b @ x[i].T @ r])

        z = solve_ivp(flow, (0, 2000), [*features[i].ravel(), *head[i]], rtol=1e-8, atol=1e-10, method="LSODA").y[:, -1]
        np.testing.assert_allclose(head_after[i], z[-2:], atol=0.03)
        np.testing.assert_allclose(after[i], z[:-2].reshape(2, 9), atol=0.03)
        np.testing.assert_allclose(x[i] @ after[i].T @ head_after[i], y[i], atol=1e-6)
        # What flow conserves, and what no sample reaches
        kept = after[i] @ after[i].T - np.outer(head_after[i], head_after[i])
        np.testing.assert_allclose(kept, np.eye(2) - np.outer(head[i], head[i]), atol=0.06)
        np.testing.assert_allclose((after[i] - features[i]) @ null_space(x[i]), 0, atol=1e-12)


def test_parts_of_the_linear_model(drawn):
    chance, features, head, x, y = drawn
    np.testing.assert_allclose(features @ features.swapaxes(1, 2), np.broadcast_to(np.eye(2), (4, 2, 2)), atol=1e-14)
    probed = propositions.probed_head(features, x, y)
    cosines = propositions.smallest_cosine(features, x)
    others = propositions.orthonormal_rows(chance, 4, 2, 9)
    rotation = propositions.best_rotation(features, others)
    turns = np.linspace(0, 2 * np.pi, 4001)
    plain = np.array([[np.cos(turns), -np.sin(turns)], [np.sin(turns), np.cos(turns)]]).transpose(2, 0, 1)
    every = np.concatenate([plain, plain * [1, -1]])  # reflections, too
    for i in range(4):
        expected = np.linalg.lstsq(x[i] @ features[i].T, y[i], rcond=None)[0]
        np.testing.assert_allclose(probed[i], expected, atol=1e-12)
        angles = subspace_angles(features[i].T, null_space(x[i]))
        assert cosines[i] == pytest.approx(np.cos(angles.max()), abs=1e-12)
        nearest = np.linalg.norm(features[i] - every @ others[i], ord=2, axis=(1, 2)).min()
        found = np.linalg.norm(features[i] - rotation[i] @ others[i], ord=2)
        assert found <= nearest + 1e-9
        assert found == pytest.approx(nearest, abs=1e-3)
    points = chance.normal(size=(20000, 9))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    target = chance.normal(size=(4, 9))
    gap = np.einsum("ikd,ik->id", features, head) - target
    worst = propositions.worst_case_error(features, head, target)
    assert (np.abs(points @ gap.T).max(0) <= worst + 1e-12).all()
    towards = gap / np.linalg.norm(gap, axis=1, keepdims=True)
    np.testing.assert_allclose((towards * gap).sum(1), worst)


def test_proposition3_holds_and_plain_fine_tuning_forgets():
    found = check_proposition3()
    assert found["holds"]
    assert found["worst_violation"] < 1e-12
    assert max(found["probing_first"]) < 1e-12
    assert found["plain"][-1] > 0.05
    assert len(found["plain"]) == 5


def test_proposition3_needs_the_probed_head(monkeypatch):
    probed = propositions.probed_head
    monkeypatch.setattr(propositions, "probed_head", lambda *given: probed(*given) + 0.1)
    found = check_proposition3(instances=8, tasks=3)
    assert not found["holds"]
    assert found["worst_violation"] > 1e-3


def test_the_same_seed_gives_the_same_numbers():
    for check, options in (
        (check_proposition1, {"cases": 5}),
        (check_proposition2, {"instances": 4}),
        (check_proposition3, {"instances": 3, "tasks": 2}),
    ):
        assert check(5, **options) == check(5, **options) != check(6, **options)


def test_the_program_writes_the_pages_that_are_committed(tmp_path):
    assert f"python examples/{FILE.name} --out results/theory" in FILE.read_text()
    subprocess.run([sys.executable, FILE, "--out", tmp_path], check=True)
    made, there = (json.loads((folder / "outcomes.json").read_text()) for folder in (tmp_path, ROOT / "results/theory"))
    assert [*made] == [*there] == ["theory"]
    claims = [[(claim["text"], claim["holds"]) for claim in found["theory"]["claims"]] for found in (made, there)]
    assert claims[0] == claims[1]
    assert [holds for _, holds in claims[0]] == [True] * 4
    assert (tmp_path / "reproduction.md").exists()
    assert "python examples/propositions.py --out" in (tmp_path / "README.md").read_text()
