"""Cost: bytes of the cache, parameters, FLOPs and time, counted from the tensors.

In: a causal LM, on a device or the meta device.
Out: figures as plain data.
"""
