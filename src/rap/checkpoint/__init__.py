"""Directories, files and what they record: read with clear errors, written whole or not at all.

In: a directory, a hub name, or a model to save.
Out: models, tokenizers, tensor files, provenance and the model card.
"""
