"""Recovery of a pruned model towards the dense model: closed forms, then distillation.

In: a pruned model, its dense teacher, windows of tokens.
Out: the recovered model, kept only if it is better, and a report.
"""
