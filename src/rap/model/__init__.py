"""What a checkpoint ships: the pruned model itself, flat, as remote code follows `from .x` only.

In: a family's own attention module and the widths of a config's `rap` section.
Out: Rap<Family>ForCausalLM, whose cache holds kept pairs and a value subspace.
"""
