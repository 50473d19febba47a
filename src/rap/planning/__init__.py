"""Statistics to a plan: scores, budgets, folding and subspaces, as pure functions of tensors.

In: statistics and weights, layer by layer.
Out: a Plan, plain data that says which slots and directions every layer keeps.
"""
