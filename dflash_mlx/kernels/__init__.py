"""Custom Metal kernels: for every operation a reference in MLX, a kernel of the same arguments, and what may use it.

`operation` says what a kernel is, one file per operation holds its contract, `choice` decides which runs. Nothing here
is called by the decode loop: targets, draft and acceptance call operations.
"""
