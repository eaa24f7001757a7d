"""A small network to export."""

import pytest

from deploy.shared import small


@pytest.fixture
def net(trained):
    return trained(small(), size=8)
