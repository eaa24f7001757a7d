"""Recipe -> runs -> summary and pictures."""

from confitune.experiments.job import run_folder
from confitune.experiments.methods import method_options, method_page, methods_table
from confitune.experiments.models import matching_models, report_model
from confitune.experiments.place import Place, open_place
from confitune.experiments.recipe import Recipe, make_recipe, merge_settings, read_recipe
from confitune.experiments.report import write_report
from confitune.experiments.reproduce import Scope, read_scope, reproduce
from confitune.experiments.runner import run_recipe
from confitune.experiments.summary import collect_results, comparison_page, draw_pictures, summary_table, write_summary
from confitune.experiments.tables import terminal_table
from confitune.experiments.tune import Point, edge_note, plan_search, run_search, search_table, winner

__all__ = [
    "Place",
    "Point",
    "Recipe",
    "Scope",
    "collect_results",
    "comparison_page",
    "draw_pictures",
    "edge_note",
    "make_recipe",
    "matching_models",
    "merge_settings",
    "method_options",
    "method_page",
    "methods_table",
    "open_place",
    "plan_search",
    "read_recipe",
    "read_scope",
    "report_model",
    "reproduce",
    "run_folder",
    "run_recipe",
    "run_search",
    "search_table",
    "summary_table",
    "terminal_table",
    "winner",
    "write_report",
    "write_summary",
]
