"""The server's packages are an extra: whoever only learns or predicts does not need them."""

from __future__ import annotations

from importlib.util import find_spec

from confitune.errors import ConfituneError

_PACKAGES = ("fastapi", "uvicorn", "python_multipart", "prometheus_client")


def require_server_packages() -> None:
    """Say how to install what the server needs, if it is missing."""
    if not all(map(find_spec, _PACKAGES)):
        raise ConfituneError("the server needs packages that are not installed: pip install 'confitune[serve]'")
