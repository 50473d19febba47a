"""Text to windows of tokens: sources, splits, BOS, repetition, and what a model writes itself.

In: the names of texts, and a tokenizer.
Out: windows to calibrate, train and evaluate on, kept apart.
"""
