"""A plan and weights to smaller weights, in memory or shard by shard.

In: a dense model or checkpoint, and a Plan.
Out: the pruned model or checkpoint; the dense one is left untouched.
"""
