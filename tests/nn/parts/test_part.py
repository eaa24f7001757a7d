"""A part that nobody thought of: the protocol is all that it needs, and all that the network knows of it."""

import copy
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from confitune.nn import ContinualNet, Head, Norms, Part, XconvNorms


class FeatureScales(Part):
    """One factor for each feature, of each task's own; a task starts from ones, and one without has ones.

    A finished task's factors are made ready once, which has to be undone when another task comes to live.
    """

    name = "scales"

    def attach(self, backbone: nn.Module, flow) -> None:
        self.scale = nn.Parameter(torch.ones(flow.features[0]))
        self.ready: Tensor | None = None
        backbone.register_forward_hook(self.scaled)

    def scaled(self, backbone: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output * (self.scale if self.ready is None else self.ready)

    def live(self, finished: bool) -> dict[str, Tensor]:
        return {"scales": self.scale.detach()}

    def pretrained(self) -> dict[str, Tensor]:
        return {"scales": torch.ones_like(self.scale)}

    @torch.no_grad()
    def start(self, generator: torch.Generator | None) -> None:
        self.scale.fill_(1)

    def restore(self, facts: Mapping[str, tuple[int, ...]]) -> None:
        self.ready = None

    def prepare(self) -> None:
        self.ready = self.scale.detach().clone()

    def offered(self) -> list[nn.Parameter]:
        return [self.scale]


@pytest.fixture(params=[XconvNorms, Norms], ids=["xconv", "norms"])
def make(request, backbone):
    def make() -> ContinualNet:
        torch.manual_seed(0)
        return ContinualNet(backbone(), [request.param(), FeatureScales(), Head()])

    return make


def test_it_lives_as_the_others_do(make, learn, check_mixed, tmp_path):
    net = make()
    for seed, task in enumerate("abc"):
        learn(net, task, 2 + seed, seed=seed)
        assert net.groups()["scales"] == [net.parts["scales"].scale]
        assert net.storage()[task].parts["scales"] == 8
    states = {task: net.task_state_dict(task) for task in "abc"}
    assert not torch.equal(states["a"]["scales"], states["b"]["scales"])
    # Used: twice the scale is twice the features.
    x = torch.rand(6, 3, 8, 8)
    with torch.no_grad():
        features = net.eval().features(x)
        net.load_task_state_dict("c", states["c"] | {"scales": 2 * states["c"]["scales"]})
        torch.testing.assert_close(net.features(x), 2 * features)
    check_mixed(net)
    # Kept apart, saved, copied.
    expected = {task: net(x, task).detach() for task in "abc"}
    twin = make()
    torch.save(net.state_dict(), tmp_path / "net.pt")
    twin.load_state_dict(torch.load(tmp_path / "net.pt", weights_only=True))
    for network in (twin.eval(), copy.deepcopy(net)):
        assert all(torch.equal(network(x, task), logits) for task, logits in expected.items())
    assert "scales" not in net.shared_state_dict()
    # A new task starts as the part says, not from the last task.
    net.add_task("d", 2)
    assert torch.equal(net.parts["scales"].scale, torch.ones(8))
    net.reopen("a")
    assert torch.equal(net.parts["scales"].scale, states["a"]["scales"])


def test_a_task_may_do_without_it(make, learn, check_mixed):
    net = make()
    learn(net, "a", 2, seed=1, owns=["norms", "head"])
    learn(net, "b", 3, seed=2)
    assert "scales" not in net.storage()["a"].parts
    x = torch.rand(6, 3, 8, 8)
    with torch.no_grad():
        net.eval()(x, "b")  # makes its factors ready
        net.set_task("a")
        found = net.features(x)
        assert torch.equal(net.parts["scales"].scale, torch.ones(8))
        net.parts["scales"].ready = torch.ones(8)
        assert torch.equal(net.features(x), found)
    check_mixed(net)
