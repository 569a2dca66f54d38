"""The BLAS binding is the process's, so each test that binds runs in a child; the parity tests run unbound.

What would break for a user: a wrong product (every answer), a crash on an unknown machine, or a silent slow BLAS.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from dflash_mlx import blas, elf, openblas

LINUX_CPU = (
    sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64") and mx.default_device() == mx.Device(mx.cpu)
)
linux_cpu = pytest.mark.skipif(not LINUX_CPU, reason="the binding is for mlx's CPU backend on Linux")

PRELUDE = """
import ctypes, json, sys, threading
import mlx.core as mx, numpy as np
from dflash_mlx import blas, elf, openblas

def product():
    rng = np.random.default_rng(1)
    x, w = (mx.array(rng.standard_normal(s).astype(np.float32)) for s in ((64, 576), (96, 576)))
    return np.array(mx.matmul(x, w.T, stream=mx.cpu)), np.array(x) @ np.array(w).T

def where():  # file that each slot of mlx leads to
    mx.eval(product()[0])
    library = next(m.path for m in elf.mappings() if m.path.endswith("libmlx.so"))
    slots = elf.import_slots(library, openblas.SYMBOLS)
    return {name: [elf.mapping_at(elf.read_slot(a)).path for a in there] for name, there in slots.items()}

def raw():
    library = next(m.path for m in elf.mappings() if m.path.endswith("libmlx.so"))
    slots = elf.import_slots(library, openblas.SYMBOLS)
    return {name: [elf.read_slot(a) for a in there] for name, there in slots.items()}
"""


def child(code: str, **env: str) -> Any:
    """Run `code` in a fresh interpreter; it prints one line of JSON."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code], capture_output=True, text=True, timeout=120, env=os.environ | env
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def system_openblas() -> str:
    """The path of the machine's own libopenblas.so.0."""
    path = child(
        "try: ctypes.CDLL(openblas.SYSTEM_NAME)\nexcept OSError: pass\n"
        "print(json.dumps(next((m.path for m in elf.mappings() if 'libopenblas' in m.path), '')))"
    )
    if not path:
        pytest.skip("no system OpenBLAS")
    return str(path)


@linux_cpu
def test_products_after_binding_equal_numpy_and_run_in_openblas() -> None:
    got = child("""
before = where()
status = blas.bind()
mine, numpys = product()
print(json.dumps([before, where(), status.active, status.fast, status.library, status.threads, status.note,
                  float(abs(mine - numpys).max()), blas.status() == status]))
""")
    before, after, active, fast, library, threads, note, error, same = got
    assert set(after) == set(openblas.SYMBOLS)
    assert not any("openblas" in path for paths in before.values() for path in paths)
    assert all("openblas" in path for paths in after.values() for path in paths)
    assert active and fast and same
    assert error < 1e-3
    assert library in note and f"{threads} thread" in note


@linux_cpu
def test_release_gives_bit_identical_reference_products_again() -> None:
    got = child("""
product()
reference, slots = product()[0], raw()
blas.bind()
bound, bound_slots = product()[0], raw()
released = blas.release()
print(json.dumps([slots == raw(), slots != bound_slots, bool((product()[0] == reference).all()),
                  released.active, released.fast]))
""")
    assert got == [True, True, True, False, False]


@linux_cpu
def test_binding_twice_and_from_many_threads_still_releases_to_the_original() -> None:
    got = child("""
product()
slots = raw()
results = []
threads = [threading.Thread(target=lambda: results.append(blas.bind())) for _ in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
first = blas.bind()
two = blas.bind(2)
again = blas.bind()
blas.release(); blas.release()
print(json.dumps([all(r == first for r in results), two.threads, again.threads, slots == raw(), blas.bind().active]))
""")
    assert got == [True, 2, 2, True, True]


@linux_cpu
@pytest.mark.parametrize(
    ("patch", "said"),
    [
        ("sys.platform = 'darwin'", "Accelerate"),
        ("sys.platform = 'freebsd14'", "freebsd14"),
        ("blas.platform.machine = lambda: 'riscv64'", "riscv64"),
        ("openblas._candidates = lambda: []", "pip install scipy-openblas32"),
        ("openblas._candidates = lambda: [('a stray file', '/dev/null', '')]", "pip install scipy-openblas32"),
        ("blas.elf.import_slots = lambda *a: {}", "not called through a shared library"),
        ("blas.elf.read_slot = lambda address: 4096", "leads somewhere else"),
    ],
)
def test_an_unsuitable_machine_is_a_note_and_nothing_is_touched(patch: str, said: str) -> None:
    got = child(f"""
product()
slots, read, find = raw(), elf.read_slot, elf.import_slots
{patch}
status = blas.bind()
elf.read_slot, elf.import_slots = read, find
mine, numpys = product()
print(json.dumps([status.active, status.note, slots == raw(), float(abs(mine - numpys).max())]))
""")
    active, note, untouched, error = got
    assert not active and untouched and error < 1e-3
    assert said in note and note.startswith("mlx's own BLAS runs: ")


@linux_cpu
def test_a_library_with_wrong_products_is_taken_back() -> None:
    """A 64-bit-integer or miscompiled build must not stay bound."""
    got = child("""
product()
slots = raw()
address = openblas.OpenBlas.address
openblas.OpenBlas.address = lambda self, symbol: address(self, symbol.replace("dgemm", "sgemm"))
status = blas.bind()
print(json.dumps([status.active, status.note, slots == raw(), blas.status().fast]))
""")
    active, note, restored, fast = got
    assert not active and restored and not fast
    assert "wrong products" in note


@linux_cpu
def test_nothing_is_bound_before_anybody_asks() -> None:
    got = child("print(json.dumps([blas.status().active, blas.status().fast, blas.status().note]))")
    assert got == [False, False, "mlx's own BLAS runs: nobody asked to replace it."]


@linux_cpu
def test_the_system_library_is_used_where_the_wheel_is_missing(system_openblas: str) -> None:
    got = child("""
openblas.WHEEL = "no_such_wheel"
status = blas.bind()
mine, numpys = product()
print(json.dumps([status.active, status.library, status.version is not None, float(abs(mine - numpys).max())]))
""")
    assert got[:3] == [True, "the system's OpenBLAS", True]
    assert got[3] < 1e-3


@linux_cpu
def test_a_preloaded_openblas_is_left_alone(system_openblas: str) -> None:
    got = child(
        "status = blas.bind()\nprint(json.dumps([status.active, status.fast, status.note]))",
        LD_PRELOAD=system_openblas,
    )
    assert got[:2] == [False, True]
    assert "already" in got[2]


def test_zero_threads_are_refused_with_the_value() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        blas.bind(0)


def _fake_library(config: bytes, without: str = "") -> Any:
    """Stands for ctypes.CDLL: C functions by name, a config string."""
    text = ctypes.create_string_buffer(config)
    describe = ctypes.CFUNCTYPE(ctypes.c_void_p)(lambda: ctypes.addressof(text))
    count = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 1)

    class Library:
        def __getitem__(self, name: str) -> Any:
            if name == without:
                raise AttributeError(name)
            return describe if name.endswith("get_config") else count

    return Library()


def test_only_an_openblas_with_32_bit_integers_is_accepted() -> None:
    good = openblas._accept("x", "p", "", _fake_library(b"OpenBLAS 0.3.30 DYNAMIC_ARCH Zen"))
    wide = openblas._accept("x", "p", "", _fake_library(b"OpenBLAS 0.3.30 USE64BITINT Zen"))
    other = openblas._accept("x", "p", "", _fake_library(b"", without="openblas_get_config"))
    assert isinstance(good, openblas.OpenBlas) and good.version == "0.3.30"
    assert isinstance(wide, str) and "64-bit integers" in wide
    assert isinstance(other, str) and "lacks openblas_get_config" in other


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (3, 3), (8, 8), (64, 8)])
def test_default_threads_leave_small_machines_at_one_and_stop_at_eight(cores: int, threads: int) -> None:
    assert openblas.default_threads(cores) == threads


def test_cores_are_counted_where_there_is_no_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has no such call; mypy knows, and so should a run on a Mac's CPU."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert openblas.usable_cores() == os.cpu_count()


def test_hyperthreads_and_foreign_processors_are_not_counted(tmp_path: Path) -> None:
    blocks = [f"processor\t: {i}\nphysical id\t: {i // 4}\ncore id\t\t: {i % 2}\nflags\t: a b" for i in range(8)]
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("\n\n".join(blocks) + "\n\n")
    assert openblas._physical_cores(cpuinfo, set(range(8))) == 4
    assert openblas._physical_cores(cpuinfo, {0, 2}) == 1
    cpuinfo.write_text("processor\t: 0\nBogoMIPS\t: 50.00\n")
    assert openblas._physical_cores(cpuinfo, {0}) == 0


@pytest.mark.parametrize(("text", "cores"), [("max 100000\n", None), ("150000 100000\n", 2), ("50000 100000\n", 1)])
def test_a_containers_quota_is_rounded_up_to_whole_cores(tmp_path: Path, text: str, cores: int | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert openblas._cgroup_quota(tmp_path / "cpu.max") == cores
    assert openblas._cgroup_quota(tmp_path / "absent") is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_writing_a_read_only_slot_leaves_the_page_read_only(tmp_path: Path) -> None:
    """Full RELRO: the page is opened for one store and closed again."""
    (tmp_path / "page").write_bytes(bytes(4096))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    with open(tmp_path / "page", "rb") as file:
        address = libc.mmap(None, 4096, 1, 2, file.fileno(), 0)  # PROT_READ, MAP_PRIVATE
    elf.write_slot(address + 16, 0x1234)
    mapped = elf.mapping_at(address)
    assert elf.read_slot(address + 16) == 0x1234
    assert mapped is not None and mapped.protection == 1
    libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(4096))
    with pytest.raises(elf.LayoutError):
        elf.read_slot(address + 16)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("content", [b"\0" * 200, b"\x7fELF\x02" + b"\0" * 200, b"\x7fELF\x01" + b"\0" * 200, b"x"])
def test_a_file_that_is_no_loaded_elf_is_a_layout_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "lib.so").write_bytes(content)
    with pytest.raises(elf.LayoutError):
        elf.import_slots(str(tmp_path / "lib.so"), openblas.SYMBOLS)


ENSURE = """
from dflash_mlx import cpu
from mlx_lm.models.activations import swiglu
note = cpu.ensure_compile()
x = mx.arange(6).reshape(1, 6).astype(mx.float32)
got = np.array(swiglu(x, x)); want = np.array(x) ** 2 / (1 + np.exp(-np.array(x)))
print(json.dumps([note, float(abs(got - want).max())]))
"""


@linux_cpu
def test_a_broken_compiler_turns_compile_off_instead_of_ending_the_forward(tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "fatal error: cmath not found"\nexit 1\n')
    compiler.chmod(0o755)
    note, error = child(ENSURE, TMPDIR=str(tmp_path), PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert "mx.compile is off" in note and error < 1e-5


@linux_cpu
def test_without_a_compiler_mlx_runs_uncompiled_by_itself(tmp_path: Path) -> None:
    """If this fails, mlx stopped falling back and ensure_compile has to turn compile off here too."""
    note, error = child(ENSURE, TMPDIR=str(tmp_path), PATH=str(tmp_path))
    assert note is None and error < 1e-5
