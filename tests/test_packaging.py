"""What is built is what is in the tree, and a bare checkout works too."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DATA = (".py", ".metal", ".h", ".tcss", ".json", ".safetensors", ".typed", ".md", ".toml", ".txt")


def tree_files() -> set[str]:
    """Package files of the checkout under the names they are imported by."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    names = set()
    for name in listed:
        top, _, rest = name.partition("/")
        if top == "dflash_mlx" and name.endswith(DATA):
            names.add(name)
        elif top in ("app", "metal") and rest.endswith(DATA):
            names.add(f"dflash_mlx/{top}/{rest}")
        elif top == "bench" and (rest.endswith(".py") or rest.startswith(("README.md", "presets.toml", "prompts/"))):
            names.add(f"dflash_mlx/{top}/{rest}")  # results and trainings stay behind
    return names


def test_every_subpackage_is_listed() -> None:
    """The mapping of app/, metal/ and bench/ needs each of them by name."""
    import tomllib

    packages = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = set()
    for base in ("dflash_mlx", "app", "metal", "bench"):
        parents = () if base == "dflash_mlx" else ("dflash_mlx",)
        for init in (ROOT / base).rglob("__init__.py"):
            found.add(".".join((*parents, *init.parent.relative_to(ROOT).parts)))
    assert packages == found


@pytest.mark.slow
def test_the_wheel_holds_the_tree(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    wheel = next(tmp_path.glob("dflash_metal-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.startswith("dflash_mlx/")}
    assert held == tree_files()


def test_a_bare_checkout_finds_app_and_metal_whatever_lies_in_the_working_directory(tmp_path: Path) -> None:
    """Without an install, and with an app.py of the user's in the way."""
    (tmp_path / "app.py").write_text("raise SystemExit('hijacked')")
    code = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f).lower()];"
        f"sys.path[:] = ['', {str(ROOT)!r}, *sys.path];"
        "import dflash_mlx.app, dflash_mlx.metal, dflash_mlx.bench.record;"
        "print(dflash_mlx.app.__file__); dflash_mlx.metal.names()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == ROOT / "app" / "__init__.py"


def test_a_missing_metal_source_is_named() -> None:
    from dflash_mlx import metal

    with pytest.raises(KeyError, match="No Metal source named 'nope'"):
        metal.source("nope")
