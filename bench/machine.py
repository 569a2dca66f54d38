"""What the numbers were measured on. Names of chips and versions only: no host names, no paths."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def card() -> dict[str, Any]:
    """The machine, the versions and the state of the tree, for a result file."""
    import mlx.core as mx

    from dflash_mlx import blas

    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "chip": _chip(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "device": str(mx.default_device()),
        "blas": blas.status().note,
        "load_average_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("mlx", "mlx-lm", "numpy")},
        "commit": _commit(),
    }


def _chip() -> str:
    if sys.platform == "darwin":
        return subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True
        ).stdout.strip()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def _commit() -> str | None:
    """The tree's commit, with a plus sign if it has been changed since."""
    here = Path(__file__).parent
    done = subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=here, capture_output=True, text=True)
    return done.stdout.strip() or None
