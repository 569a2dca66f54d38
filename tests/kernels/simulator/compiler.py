"""Finds clang, compiles a kernel to a shared object, and keeps it: in memory, and in a folder between runs.

Compilers, in this order: the words of DFLASH_SIMULATOR_CLANG, `zig clang` of the `ziglang` package, a clang of version
17 or newer on PATH. The folder is DFLASH_SIMULATOR_CACHE or one of the user's under the system's temporary folder.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.kernels.simulator import lint
from tests.kernels.simulator.errors import CompileError
from tests.kernels.simulator.lines import Lines
from tests.kernels.simulator.unit import Unit

HERE = Path(__file__).parent
_LANGUAGE = "-x cl -cl-std=clc++2021 -cl-no-stdinc -cl-single-precision-constant"
_CODE = (
    "-fPIC -fvisibility=hidden -fno-strict-aliasing -fno-stack-protector -ffp-contract=off -fno-math-errno "
    # Without loops that may not end, LLVM deletes endless ones; the checks skip accesses wider than 16 bytes.
    "-fno-finite-loops -fno-vectorize -fno-slp-vectorize -gline-tables-only -gdwarf-4 "
    "-Xclang -ffloat16-excess-precision=none -Xclang -fbfloat16-excess-precision=none"
)
_WARNINGS = (
    "-Wno-unknown-attributes -Wno-ignored-attributes -Wno-unused-value -ferror-limit=5 "
    "-Werror=return-type -Werror=uninitialized"
)
_CHECKS = (
    # Only the compiler's passes, which put a call before every access; the functions called are the runtime's.
    "-O1 -Xclang -fsanitize=thread -fsanitize=array-bounds,integer-divide-by-zero,float-cast-overflow "
    "-fsanitize-recover=all -mllvm -tsan-instrument-func-entry-exit=0 -mllvm -tsan-instrument-read-before-write=1"
)


def why_unavailable() -> str | None:
    """Why the simulator cannot run here, or None."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"the kernel simulator runs on x86-64 Linux, and this is {sys.platform} on {platform.machine()}"
    try:
        _tools()
    except RuntimeError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class Tools:
    """Command lines: of the compiler, and of the linker with its option for symbols bound inside."""

    compiler: tuple[str, ...]
    linker: tuple[str, ...]


@cache
def _tools() -> Tools:
    named = tuple(os.environ.get("DFLASH_SIMULATOR_CLANG", "").split())
    found = importlib.util.find_spec("ziglang")
    if not named and found and found.origin:
        named = (str(Path(found.origin).parent / "zig"), "clang")
    if named:
        zig = named[1:] == ("clang",)
        return Tools(named, (named[0], "ld.lld", "-Bsymbolic") if zig else (*named, "-nostdlib", "-Wl,-Bsymbolic"))
    for suffix in (*(f"-{version}" for version in range(30, 16, -1)), ""):
        path = shutil.which("clang" + suffix)
        if path and (suffix or _version(path) >= 17):
            return Tools((path,), (path, "-nostdlib", "-Wl,-Bsymbolic"))
    raise RuntimeError(
        "the kernel simulator found no compiler: it needs `ziglang`, which `pip install -e .[dev]` brings, or a clang "
        "of version 17 or newer on PATH or in DFLASH_SIMULATOR_CLANG"
    )


def _version(clang: str) -> int:
    said = subprocess.run([clang, "--version"], capture_output=True, text=True).stdout
    match = re.search(r"clang version (\d+)", said)
    return int(match[1]) if match else 0


@cache
def _options() -> tuple[str, ...]:
    half = ["-mf16c"] if " f16c " in Path("/proc/cpuinfo").read_text() else []
    return (*f"{_LANGUAGE} {_CODE} {_WARNINGS} {_CHECKS}".split(), *half)


@dataclass(frozen=True)
class Image:
    """A compiled kernel in memory. first, end: its addresses, to which `lines` are relative."""

    library: ctypes.CDLL
    entry: int
    first: int
    end: int
    lines: Lines

    def line(self, address: int) -> str | None:
        """`kernel:12` for a return address inside, or None."""
        return self.lines.at(address - self.first) if self.first <= address < self.end else None


@cache
def build(unit: Unit, linted: bool) -> Image:
    """Compile and load.

    Raises:
        CompileError: what the compiler or the lint says.
    """
    key = _digest(unit.prelude, unit.kernel, linted, *_tools().compiler, *_options(), *_sources())
    shared = _folder() / f"{key}.so"
    if not shared.exists():
        prelude, runtime = _prelude(unit.prelude), _runtime()
        with _locked(key), tempfile.TemporaryDirectory(dir=_folder()) as name:
            if not shared.exists():  # another process may have made it meanwhile
                work = Path(name)
                _compile(work, unit, prelude, linted)
                _run(*_tools().linker, "-shared", work / "kernel.o", runtime, "-o", work / "kernel.so")
                (work / "kernel.so").replace(shared)
    return _load(shared)


def _compile(work: Path, unit: Unit, prelude: Path, linted: bool) -> None:
    """Make `kernel.o`, and look over the syntax tree meanwhile."""
    source, tree = work / "kernel.cl", work / "tree"
    source.write_text(unit.kernel)
    command = (*_tools().compiler, *_options(), "-include-pch", str(prelude))
    dump = ("-fsyntax-only", "-Xclang", "-ast-dump", "-fno-color-diagnostics")
    with tree.open("w") as out:
        reading = subprocess.Popen([*command, *dump, source], stdout=out, stderr=subprocess.DEVNULL) if linted else None
        try:
            _run(*command, "-c", source, "-o", work / "kernel.o")
        except CompileError as error:
            raise CompileError(str(error).replace(str(source), "unit")) from None
        finally:
            if reading:
                reading.wait()
    found = lint.errors(tree.read_text(), unit.kernel) if linted else []
    if found:
        raise CompileError("\n".join(found))


def _prelude(text: str) -> Path:
    """The precompiled shim and prelude. clang refuses it once the text's file changes, hence the lock."""
    key = _digest(text, *_tools().compiler, *_options())
    compiled, source = _folder() / f"prelude-{key}.pch", _folder() / f"prelude-{key}.h"
    with _locked("prelude"):
        if not compiled.exists():
            part = compiled.with_suffix(".part")
            source.write_text(text)
            options = ["cl-header" if option == "cl" else option for option in _options()]
            _run(*_tools().compiler, *options, "-Xclang", "-fno-pch-timestamp", "-c", source, "-o", part)
            part.replace(compiled)
    return compiled


def _runtime() -> Path:
    """The compiled runtime, linked into every kernel."""
    half = [option for option in _options() if option == "-mf16c"]
    compiled = _folder() / f"runtime-{_digest(*_tools().compiler, *half, *_sources())}.o"
    options = ["-x", "c", "-O2", "-fPIC", "-fvisibility=hidden", "-fno-stack-protector", "-w"]
    with _locked("runtime"):
        if not compiled.exists():
            part = compiled.with_suffix(".part")
            _run(*_tools().compiler, *options, *half, "-c", HERE / "runtime" / "runtime.c", "-o", part)
            part.replace(compiled)
    return compiled


@cache
def _sources() -> tuple[str, ...]:
    """The texts of the runtime and of the lint, on which a kept object depends."""
    return tuple(path.read_text() for path in (*sorted((HERE / "runtime").iterdir()), HERE / "lint.py"))


def _digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:24]


@cache
def _folder() -> Path:
    named = os.environ.get("DFLASH_SIMULATOR_CACHE")
    folder = Path(named) if named else Path(tempfile.gettempdir()) / f"dflash-kernels-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(
            f"{folder} belongs to another user, and what it holds is loaded and run. Set DFLASH_SIMULATOR_CACHE to a "
            "folder of your own."
        )
    return folder


@contextmanager
def _locked(name: str) -> Iterator[None]:
    """One process at a time, for each name."""
    path = _folder() / f"{name}.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        path.unlink(missing_ok=True)  # who waits for it finds what was made


def _run(*command: object) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        raise CompileError(done.stderr)


def _load(shared: Path) -> Image:
    ctypes.CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)  # kernels call its functions
    library = ctypes.CDLL(str(shared))
    entry = ctypes.cast(library.msl_entry, ctypes.c_void_p).value
    lines = Lines(shared.read_bytes())
    ranges = [
        line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(shared))
    ]
    first = min(int(part.split("-")[0], 16) for part in ranges)
    assert entry is not None
    return Image(library, entry, first, first + lines.size, lines)
