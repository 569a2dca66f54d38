"""The terminal chat: a Textual front end around one engine thread.

Invariant: nothing in this package imports MLX at module level, and only `library.mlx_backend`, called inside
the engine thread, imports it at all. Arrays, generators and tokenizers stay in that thread; strings, numbers
and frozen dataclasses of them cross. Start at `messages.py` (what crosses) and `engine.py` (who sends it).
"""
