"""Questions asked of whole models: methods side by side, analyses, and their report.

In: a dense model and a grid of methods, or result files.
Out: result files with tables, figures and pages.
"""
