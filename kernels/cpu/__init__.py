"""The CPU's own kernels: bfloat16 in C++, a whole decoder step in one native call.

*.h, unit.cpp   the ops, compiled once per instruction set (plain, avx2, avx512, amx)
entry.cpp       what is exported, and which of those sets this CPU runs
build.py        compiles them once per machine into the user's cache
library.py      loads the result through ctypes
"""
