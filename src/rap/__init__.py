"""RAP: a smaller KV cache for RoPE language models, by cutting whole RoPE pairs out of the weights."""

from ._version import __version__

__all__ = ["__version__"]
