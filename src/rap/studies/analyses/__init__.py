"""One question about a dense model each: numbers, a table, a figure.

In: a dense model, calibration windows, held-out tokens.
Out: a result file that `rap report` shows.
"""
