"""Where a loaded shared library keeps its pointers to imported functions, and writing one of them.

A call from libmlx.so to `cblas_sgemm` goes through a pointer (a GOT slot) that the dynamic linker fills.
`import_slots` finds these slots for a library in this process, from the file's dynamic section and
/proc/self/maps; `write_slot` stores another address there and leaves the page's protection as it was. 64-bit
little-endian ELF on Linux only; anything else raises LayoutError and nothing has been touched.

Sources: System V ABI (gABI) chapter 5 and its x86-64 and aarch64 supplements.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

# e_machine -> relocation types that are one plain address: GLOB_DAT and JUMP_SLOT.
_SLOT_TYPES = {62: (6, 7), 183: (1025, 1026)}  # x86-64, aarch64
_PT_LOAD, _PT_DYNAMIC, _PF_X = 1, 2, 1
_DT_PLTRELSZ, _DT_STRTAB, _DT_SYMTAB, _DT_RELA, _DT_RELASZ, _DT_JMPREL = 2, 5, 6, 7, 8, 23
_PROT_WRITE, _PROT_EXEC = 2, 4


class LayoutError(Exception):
    """The library or the process does not look as this module expects; for `blas`, never for the user."""


@dataclass(frozen=True)
class Mapping:
    """One line of /proc/self/maps."""

    start: int
    end: int
    protection: int  # PROT_READ | PROT_WRITE | PROT_EXEC
    offset: int
    path: str


def mappings() -> list[Mapping]:
    """What this process has mapped now, files only."""
    found = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[5].startswith("/"):
            start, end = (int(part, 16) for part in fields[0].split("-"))
            protection = sum(bit for letter, bit in zip(fields[1], (1, 2, 4), strict=False) if letter != "-")
            found.append(Mapping(start, end, protection, int(fields[2], 16), fields[5]))
    return found


def mapping_at(address: int) -> Mapping | None:
    """The mapped file that `address` lies in."""
    return next((m for m in mappings() if m.start <= address < m.end), None)


def import_slots(library: str, symbols: tuple[str, ...]) -> dict[str, list[int]]:
    """Addresses in this process of `library`'s slots for each imported symbol; absent symbols have no key.

    Raises:
        LayoutError: not a loaded 64-bit ELF of a known machine, or its tables are not where they should be.
    """
    with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image:
        try:
            elf = _Elf(image)
            bias = _load_bias(library, elf)
            return {name: [bias + offset for offset in where] for name, where in elf.slots(symbols).items()}
        except (struct.error, StopIteration, KeyError, ValueError) as error:
            raise LayoutError(f"{library} has no dynamic section of the expected form ({error!r})") from error


def write_slot(address: int, value: int) -> None:
    """Store `value` in the slot: one aligned 8-byte store, so a concurrent call sees the old or the new function."""
    mapped = mapping_at(address)
    if mapped is None or address % 8:
        raise LayoutError(f"no file is mapped at {address:#x}")
    page = address - address % mmap.PAGESIZE
    locked = not mapped.protection & _PROT_WRITE  # full RELRO; mlx 0.32's wheel has partial RELRO
    if locked:
        _mprotect(page, mapped.protection | _PROT_WRITE)
    ctypes.c_uint64.from_address(address).value = value
    if locked:
        _mprotect(page, mapped.protection)


def read_slot(address: int) -> int:
    """The address that the slot holds."""
    if mapping_at(address) is None or address % 8:
        raise LayoutError(f"no file is mapped at {address:#x}")
    return ctypes.c_uint64.from_address(address).value


class _Elf:
    """The few tables of an ELF image that name its imports."""

    def __init__(self, image: mmap.mmap) -> None:
        self.image = image
        kind, machine = struct.unpack_from("<5sxxxxxxxxxxxxxH", image, 0)
        if kind != b"\x7fELF\x02" or machine not in _SLOT_TYPES:
            raise LayoutError(f"not a 64-bit ELF for x86-64 or aarch64 (machine {machine})")
        self.slot_types = _SLOT_TYPES[machine]
        table, size, count = struct.unpack_from("<32xQ14xHH", image, 0)
        # (type, flags, offset, vaddr, paddr, filesz, memsz, align)
        headers = [struct.unpack_from("<IIQQQQQQ", image, table + i * size) for i in range(count)]
        self.loads = [(h[2], h[3], h[5]) for h in headers if h[0] == _PT_LOAD]  # offset, vaddr, bytes in the file
        self.code = next((h[2], h[3]) for h in headers if h[0] == _PT_LOAD and h[1] & _PF_X)  # offset, vaddr
        dynamic = next(h for h in headers if h[0] == _PT_DYNAMIC)
        self.dynamic = dict(struct.iter_unpack("<QQ", image[dynamic[2] : dynamic[2] + dynamic[5] // 16 * 16]))

    def slots(self, symbols: tuple[str, ...]) -> dict[str, list[int]]:
        """Link-time addresses of the slots by symbol."""
        found: dict[str, list[int]] = {}
        for table, size in ((_DT_JMPREL, _DT_PLTRELSZ), (_DT_RELA, _DT_RELASZ)):
            if table not in self.dynamic:
                continue
            start = self._offset(self.dynamic[table])
            for where, info, _ in struct.iter_unpack("<QQq", self.image[start : start + self.dynamic[size]]):
                if info & 0xFFFFFFFF in self.slot_types and (name := self._symbol(info >> 32)) in symbols:
                    found.setdefault(name, []).append(where)
        return found

    def _symbol(self, index: int) -> str:
        """Name of a dynamic symbol."""
        (name,) = struct.unpack_from("<I", self.image, self._offset(self.dynamic[_DT_SYMTAB]) + 24 * index)
        start = self._offset(self.dynamic[_DT_STRTAB]) + name
        return self.image[start : self.image.find(b"\0", start)].decode("ascii", "replace")

    def _offset(self, address: int) -> int:
        """File offset of a link-time address."""
        for offset, vaddr, size in self.loads:
            if vaddr <= address < vaddr + size:
                return offset + address - vaddr
        raise LayoutError(f"address {address:#x} is outside the file")


def _load_bias(library: str, elf: _Elf) -> int:
    """Distance from link-time addresses to those of this process.

    Told by the code segment: a mapping of the file's start may be somebody's reading of it, ours included.
    """
    offset, vaddr = elf.code
    page = offset % mmap.PAGESIZE
    for mapped in mappings():
        if mapped.protection & _PROT_EXEC and os.path.realpath(mapped.path) == library:
            if mapped.offset != offset - page:
                break
            return mapped.start + page - vaddr
    raise LayoutError(f"the code of {library} is not mapped as its header says")


def _mprotect(page: int, protection: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), ctypes.c_int(protection)
    if libc.mprotect(*arguments) != 0:
        raise LayoutError(f"mprotect refused ({os.strerror(ctypes.get_errno())})")
