"""Recipe -> runs -> summary and pictures."""

from confitune.experiments.catalog import matching_models, method_options, method_page, methods_table, models_table
from confitune.experiments.paper.plan import Scope, read_scope
from confitune.experiments.paper.reproduce import reproduce
from confitune.experiments.reporting.report import draw_overview, write_pages, write_report
from confitune.experiments.reporting.table import compare, sections_of, summary_table, terminal_table
from confitune.experiments.runs.identity import finished_runs
from confitune.experiments.runs.recipe import Recipe, make_recipe, merge_settings, read_recipe
from confitune.experiments.runs.runner import Place, open_place, run_recipe
from confitune.experiments.runs.tune import edge_note, plan_search, run_search, winner

__all__ = [
    "Place",
    "Recipe",
    "Scope",
    "compare",
    "draw_overview",
    "edge_note",
    "finished_runs",
    "make_recipe",
    "matching_models",
    "merge_settings",
    "method_options",
    "method_page",
    "methods_table",
    "models_table",
    "open_place",
    "plan_search",
    "read_recipe",
    "read_scope",
    "reproduce",
    "run_recipe",
    "run_search",
    "sections_of",
    "summary_table",
    "terminal_table",
    "winner",
    "write_pages",
    "write_report",
]
