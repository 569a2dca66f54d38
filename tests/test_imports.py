"""The package stays light to import, and its layers point one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "dflash_mlx"
# A module may import from its own line and from the lines above it.
LAYERS = [
    {"errors", "stats", "proposal", "stops", "segments", "templates", "threads", "blocksize", "files"},
    {"hang_up", "drawing"},
    {"config", "spellings", "machine", "chips", "served", "stored_weights"},
    {"hub", "layer_sizes"},
    {"piece"},
    {"fit"},
    {"regime"},
    {"elf", "openblas", "blas", "cpu", "demo"},
    {"kernels"},
    {"sampling", "layer_state"},
    {"cache"},
    {"targets", "draft", "accept"},
    {"proposers", "prompt_cache", "quantized_kv", "exact", "pairing", "rounding"},
    {"prompt_file"},
    {"session", "options"},
    {"decode"},
    {"fallback", "health"},
    {"request", "load_target", "load", "report", "conversion", "convert"},
    {"generate"},
    {"divergence"},
    {
        "cli",
        "needs",
        "plan",
        "planned",
        "generate_command",
        "models_command",
        "plan_command",
        "convert_command",
        "doctor_command",
        "environment",
        "self_test",
    },
    {"training"},
    {"train_command"},
    {"bench"},
    {"bench_command"},
    {"app"},
    {"chat"},
    {"__main__"},
]


def test_importing_the_package_imports_no_mlx() -> None:
    code = (
        "import sys, dflash_mlx, dflash_mlx.cli, dflash_mlx.errors; dir(dflash_mlx);"
        "print([m for m in ('mlx', 'mlx_lm', 'numpy', 'textual', 'transformers', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    "module",
    [
        "generate",
        "chat",
        "__main__",
        "__main__ models",
        "__main__ plan",
        "__main__ doctor",
        "__main__ train",
        "__main__ bench",
    ],
)
def test_help_imports_no_mlx(module: str) -> None:
    name, *words = module.split()
    code = (
        f"import sys, runpy; sys.argv = ['x', *{words}, '--help']\n"
        f"try: runpy.run_module('dflash_mlx.{name}', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'mlx.core' not in sys.modules and 'textual' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def test_functions_win_over_the_modules_of_the_same_name() -> None:
    """`dflash_mlx.generate` is the function however the module was imported, as in mlx_lm."""
    code = (
        "import dflash_mlx.generate, dflash_mlx.load, dflash_mlx\n"
        "from dflash_mlx.generate import stream_generate\n"
        "from dflash_mlx import generate, load\n"
        "assert callable(generate) and callable(load) and dflash_mlx.generate is generate\n"
        "assert dflash_mlx.stream_generate is stream_generate"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_is_an_attribute_error() -> None:
    import dflash_mlx

    with pytest.raises(AttributeError, match="has no attribute 'nope'"):
        _ = dflash_mlx.nope


def imports_of(path: Path) -> set[str]:
    """First component below dflash_mlx of everything imported, also inside functions.

    Left out: what is imported for types only, and by a module that is run as a program.
    """
    found = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'"):
            node.body.clear()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "dflash_mlx":
            rest = node.module.split(".")[1:]
            found |= {rest[0]} if rest else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("dflash_mlx.")}
    return found


def test_imports_point_one_way() -> None:
    rank = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    files = {f.relative_to(PACKAGE).parts[0].removesuffix(".py"): [] for f in PACKAGE.rglob("*.py")}
    for file in PACKAGE.rglob("*.py"):
        files[file.relative_to(PACKAGE).parts[0].removesuffix(".py")].append(file)
    for name, paths in files.items():
        if name == "__init__":
            continue
        assert name in rank, f"{name} has no layer: add it to LAYERS"
        for path in paths:
            for other in imports_of(path) - {"__version__"}:
                assert rank.get(other, -1) <= rank[name], f"{path.name} imports {other}, which is above it"


def test_the_app_imports_no_mlx_at_module_level() -> None:
    for path in (PACKAGE.parent / "app").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            heavy = [n for n in names if n.split(".")[0] in ("mlx", "mlx_lm", "numpy", "transformers")]
            assert not heavy, f"{path.name} imports {heavy[0]}"
