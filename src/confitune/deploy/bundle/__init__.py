"""A folder with one network and what it has learned so far."""

from confitune.deploy.bundle.bundle import Bundle as Bundle
from confitune.deploy.bundle.change import BundleChange as BundleChange, changing as changing, go_back as go_back
from confitune.deploy.bundle.format import BundleError as BundleError, Network as Network, TaskRecord as TaskRecord
