"""Kernels: one folder per operation, with a plain reference, a Triton version, and the choice.

The choice is made per call: CUDA tensors of a floating type of 32 bits or less take Triton where it
is installed, everything else the reference. `interface` registers both operations as the attention
implementation "rap". Nothing here is needed to load, run or train a pruned model.
"""
