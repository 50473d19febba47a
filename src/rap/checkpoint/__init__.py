"""Directories, files and their records: read with clear errors, written atomically.

In: a directory, a hub name, or a model to save.
Out: models, tokenizers, tensor files, provenance and the model card.
"""
