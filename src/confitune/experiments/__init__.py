"""Recipe -> runs -> summary and pictures."""

from confitune.experiments.models import ModelReport, matching_models, report_model
from confitune.experiments.recipe import Recipe, make_recipe, merge_options, read_recipe
from confitune.experiments.runner import run_folder, run_recipe
from confitune.experiments.summary import collect_results, draw_pictures, summary_table, write_summary

__all__ = [
    "ModelReport",
    "Recipe",
    "collect_results",
    "draw_pictures",
    "make_recipe",
    "matching_models",
    "merge_options",
    "read_recipe",
    "report_model",
    "run_folder",
    "run_recipe",
    "summary_table",
    "write_summary",
]
