"""A predictor over HTTP: answers in batches, bounded memory, a page to try it on."""

from confitune.deploy.server.app import create_app as create_app, serve as serve
from confitune.deploy.server.limits import Limits as Limits
