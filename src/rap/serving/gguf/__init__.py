"""GGUF files for llama.cpp and the programs built on it.

In: a dense checkpoint, or a pruned one of the stock profile.
Out: one .gguf file that unmodified llama.cpp runs.
"""
