"""The CUDA twins of the ops in kernels/, written in Triton: one op, one file.

Nobody but kernels/<op>.py imports these, and only once a tensor is on a GPU: a machine without
one needs no triton. Inside, `import triton` is the package on PyPI.

Configurations are constants of a kernel's file, not chosen by a race at run time: two nodes that
timed differently would add up in different orders. `python -m bench.gpu_check --tune` times each
kernel's whole space on the machine at hand; the winner is written down here.
"""
