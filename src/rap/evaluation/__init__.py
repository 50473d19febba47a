"""What a model is worth and what it costs.

In: any causal LM, dense or pruned.
Out: quality, cost counted from tensors, and how its cache compresses further.
"""
