"""A cut model back towards the dense one: closed forms, then distillation.

In: a pruned model, its dense teacher, windows of tokens.
Out: the recovered model, kept only if it is better, and a report.
"""
