"""Attention of the baselines, whose checkpoints need the package: latents, bases, single channels.

In: a dense attention module and a layer's widths with their `kind`.
Out: a subclass of RapAttention, registered in modeling.KINDS.
"""
