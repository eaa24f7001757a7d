"""A net becomes a bundle, a predictor, a file for another runtime, a server."""

from confitune.deploy.bundle import Bundle, BundleError, Network, TaskRecord, changing, go_back
from confitune.deploy.checks import check_tasks, examine
from confitune.deploy.export import check_export, export_bundle, export_network
from confitune.deploy.folding import folded
from confitune.deploy.grow import grow, remove_class
from confitune.deploy.learn import LearnReport, LearnSettings, learn
from confitune.deploy.predictor import Prediction, Predictor, image_files, predict_files
