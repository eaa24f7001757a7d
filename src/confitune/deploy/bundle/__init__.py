"""A folder with one network and what it has learned so far."""

from confitune.deploy.bundle.bundle import Bundle
from confitune.deploy.bundle.change import BundleChange, changing, go_back
from confitune.deploy.bundle.format import BundleError, DamagedError, MethodOptions, Network, StoredFile, TaskRecord
