"""A report of the runs below a folder: one page that needs nothing else, and its Markdown twin."""

from confitune.experiments.report.write import write_report

__all__ = ["write_report"]
