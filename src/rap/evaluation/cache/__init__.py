"""What goes on top of pruning: caches with fewer bits or fewer tokens.

In: a causal LM and a way to compress its cache.
Out: perplexity, recall, and the bytes really held.
"""
