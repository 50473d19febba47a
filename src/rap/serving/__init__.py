"""A side branch: engines and their formats. The core never imports it.

In: a pruned checkpoint.
Out: a running engine, an export it reads, and a check of both against transformers.
"""
