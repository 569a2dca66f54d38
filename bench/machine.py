"""What the numbers were measured on. Names of chips and versions only: no host names, no paths. Unknown is None."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def card() -> dict[str, Any]:
    """The machine, the versions and the state of the tree, for a result file."""
    import mlx.core as mx

    from dflash_mlx import blas

    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "chip": _chip(),
        "cores": os.cpu_count(),
        "gpu_cores": gpu_cores(_said("system_profiler", "SPDisplaysDataType", "-json")),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "macos": platform.mac_ver()[0] or None,
        "device": str(mx.default_device()),
        "blas": blas.status().note,
        "load_average_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("mlx", "mlx-lm", "numpy", "transformers", "dflash-metal")},
        "commit": _commit(),
    }


def conditions() -> dict[str, Any]:
    """What changes on a machine while it measures: at the beginning and at the end of a run. All but the load is a
    Mac's."""
    return {
        "power_source": power_source(_said("pmset", "-g", "batt")),
        "low_power_mode": low_power_mode(_said("pmset", "-g")),
        "thermal_pressure": thermal_pressure(_said("pmset", "-g", "therm")),
        "load_average": round(os.getloadavg()[0], 2),
    }


def power_source(text: str | None) -> str | None:
    """ "AC Power" or "Battery Power", of `pmset -g batt`."""
    found = re.search(r"drawing from '([^']+)'", text or "")
    return found[1] if found else None


def low_power_mode(text: str | None) -> bool | None:
    """Of `pmset -g`: its line is `lowpowermode 1`, or `powermode 1` where there is a high-power mode (2) too."""
    found = re.search(r"^\s*(?:low)?powermode\s+(\d)", text or "", re.M)
    return found[1] == "1" if found else None


def thermal_pressure(text: str | None) -> str | None:
    """Of `pmset -g therm`: "nominal", or what it says of a warning or of a limited CPU."""
    if not text:
        return None
    limits = dict(re.findall(r"(\w+_(?:Speed|Scheduler)_Limit)\s*=\s*(\d+)", text))
    warnings = re.findall(r"^\s*(?:Thermal|Performance) [Ww]arning [Ll]evel[^\d\n]*([1-9]\d*)", text, re.M)
    said = [f"{name} {value}%" for name, value in limits.items() if int(value) < 100]
    said += [f"warning level {level}" for level in warnings]
    return ", ".join(said) or "nominal"


def gpu_cores(text: str | None) -> int | None:
    """Of `system_profiler SPDisplaysDataType -json`."""
    try:
        displays = json.loads(text or "")["SPDisplaysDataType"]
        return next((int(each["sppci_cores"]) for each in displays if "sppci_cores" in each), None)
    except (ValueError, KeyError, TypeError):
        return None


def _said(*command: str) -> str | None:
    """What a Mac's command prints; None elsewhere, and where it fails."""
    return _output(command) if sys.platform == "darwin" else None


def _output(command: Sequence[str], folder: Path | None = None) -> str | None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _chip() -> str | None:
    if sys.platform == "darwin":
        return _said("sysctl", "-n", "machdep.cpu.brand_string")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or None)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path
        return None


def _commit() -> str | None:
    """The tree's commit, with a plus sign if it has been changed since; None of an installed package, which may lie in
    somebody else's tree."""
    if not (HERE.name == "bench" and (HERE.parent / "dflash_mlx" / "__init__.py").is_file()):
        return None
    return _output(["git", "describe", "--always", "--dirty=+"], HERE)
