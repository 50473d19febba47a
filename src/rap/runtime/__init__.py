"""What every stage needs: progress, hooks and modes restored, precision, memory, layers one by one.

In: a model in memory, or weights in files.
Out: the same, worked on layer by layer, in another precision, or left as it was found.
"""
