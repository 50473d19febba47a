"""llama.cpp itself, from the wheel xllamacpp, in a separate process.

In: a GGUF file.
Out: what the engine makes of prompts and texts, and a check of that against transformers.
"""
