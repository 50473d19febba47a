"""Quality: perplexity, use of context, zero-shot tasks, attention error by parts.

In: a causal LM and a text or tasks.
Out: figures as plain data.
"""
