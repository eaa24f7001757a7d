"""A net becomes a bundle, a predictor, a file for another runtime, a server."""

from confitune.deploy.bundle import Bundle as Bundle, BundleError as BundleError
from confitune.deploy.bundle.change import changing as changing, go_back as go_back
from confitune.deploy.checks import check_tasks as check_tasks, examine as examine
from confitune.deploy.export.export import export_bundle as export_bundle, export_network as export_network
from confitune.deploy.folding import folded as folded
from confitune.deploy.grow import grow as grow, remove_class as remove_class
from confitune.deploy.learn import LearnReport as LearnReport, LearnSettings as LearnSettings, learn as learn
from confitune.deploy.predictor import Prediction as Prediction, Predictor as Predictor
