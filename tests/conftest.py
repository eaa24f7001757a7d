"""Settings and fixtures for the whole suite."""

import pytest
import timm
import torch
from hypothesis import settings

# No deadline: the first example of a test pays for torch's start. The same examples every time: a red run can be
# repeated, and a green one stays green until the code changes.
settings.register_profile("confitune", deadline=None, derandomize=True)
settings.load_profile("confitune")


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Threads that wait for one another cost more than these small tensors, all the more on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def weights(tmp_path_factory):
    """A weights file for timm's test_byobnet."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        state = timm.create_model("test_byobnet").state_dict()
    path = tmp_path_factory.mktemp("weights") / "start.pth"
    torch.save(state, path)
    return path
