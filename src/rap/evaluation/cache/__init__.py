"""Cache compression in addition to pruning: quantized caches and token eviction.

In: a causal LM and a way to compress its cache.
Out: perplexity, recall, and the bytes really held.
"""
