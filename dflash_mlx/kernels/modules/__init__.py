"""Modules of a target with our operations inside: same call signature as mlx_lm's, made from one of them by `swap`."""
