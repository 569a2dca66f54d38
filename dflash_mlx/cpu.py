"""Making sure that `mx.compile` works on the CPU backend.

mlx-lm's layers are compiled functions. On Linux mlx builds them with g++ into the temporary folder; without
g++ it runs them uncompiled by itself, but an incomplete g++ or a temporary folder that forbids execution ends
every forward pass with a RuntimeError (mlx 0.32.4). Uncompiled costs nothing measurable: SmolLM2-135M in
float32, 2 vCPU Xeon, OpenBLAS one thread, 2026-11-29, A B B A of 20 steps each: 91/90/90/92 ms per token,
131/132/131/128 ms per block of 6.
"""

from __future__ import annotations

import mlx.core as mx


def ensure_compile() -> str | None:
    """Compile and run one small function; if that fails, turn `mx.compile` off for this process.

    Returns:
        A sentence for the user when it was turned off, else None. Always None with a GPU: it needs no compiler.
    """
    if mx.default_device() != mx.Device(mx.cpu):
        return None
    try:
        probe = mx.compile(lambda x: mx.sigmoid(x) * x)
        mx.eval(probe(mx.ones(2)))  # the compiler runs inside eval
    except RuntimeError as error:
        mx.disable_compile()
        reason = str(error).splitlines()[0][:160]
        return f"mx.compile is off, its C++ compiler does not work here ({reason})."
    return None


def prefill_step_size() -> int:
    """Prompt tokens per forward for interactive use: cancelling waits for one.

    mlx_lm's 2048 on a GPU; 256 on a CPU, where that many take 1.8 s with the demo target (141 tokens per second over a
    prompt of 1,031 with `generate --json`; 2 vCPU Xeon, OpenBLAS one thread, 2026-11-29).
    """
    return 256 if mx.default_device() == mx.Device(mx.cpu) else 2048
