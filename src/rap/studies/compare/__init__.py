"""Methods side by side at the same cache, cell by cell, resumable.

In: a dense model, methods, retain ratios, recoveries.
Out: one record a cell, and tables over them.
"""
