"""A predictor over HTTP: answers in batches, bounded memory, a page to try it on."""

from confitune.deploy.server.app import create_app
from confitune.deploy.server.limits import Limits
from confitune.deploy.server.packages import require_server_packages
from confitune.deploy.server.serve import running_server, serve

__all__ = ["Limits", "create_app", "require_server_packages", "running_server", "serve"]
