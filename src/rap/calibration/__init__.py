"""Text to statistics: what layers compute, and what the loss asks of them, streamed.

In: a dense model and windows of tokens.
Out: Statistics, reduced sums per layer; no activation or gradient is kept.
"""
