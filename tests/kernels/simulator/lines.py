"""Which line of the source an address of a shared object belongs to: its ELF sections and DWARF 4 line table."""

from __future__ import annotations

import bisect
import struct
from collections.abc import Iterator

Row = tuple[int, str | None, int]  # address, file (None: end of a sequence), line


class Lines:
    """The line table of one 64-bit little-endian ELF file.

    size: bytes that it takes in memory.
    """

    def __init__(self, data: bytes) -> None:
        self.size = _memory_size(data)
        self._rows = sorted(_rows(_section(data, b".debug_line")), key=lambda row: row[0])
        self._addresses = [row[0] for row in self._rows]

    def at(self, address: int) -> str | None:
        """`file:line` of the call that returns to `address`, or None."""
        index = bisect.bisect_right(self._addresses, address - 1) - 1
        while index >= 0 and self._rows[index][2] == 0 and self._rows[index][1]:
            index -= 1  # line 0 is code of nobody's, such as the compiler's own
        if index < 0 or self._rows[index][1] is None:
            return None
        return f"{self._rows[index][1]}:{self._rows[index][2]}"


def _memory_size(data: bytes) -> int:
    (table,), (count,) = struct.unpack_from("<Q", data, 32), struct.unpack_from("<H", data, 56)
    headers = [struct.unpack_from("<IIQQQQQQ", data, table + 56 * index) for index in range(count)]
    return max(address + size for kind, _, _, address, _, _, size, _ in headers if kind == 1)  # PT_LOAD


def _section(data: bytes, name: bytes) -> bytes:
    (table,), (count, names) = struct.unpack_from("<Q", data, 40), struct.unpack_from("<HH", data, 60)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, table + 64 * index) for index in range(count)]
    strings = headers[names][4]
    for header in headers:
        start = strings + header[0]
        if data[start : data.index(b"\0", start)] == name:
            return data[header[4] : header[4] + header[5]]
    return b""


def _rows(table: bytes) -> Iterator[Row]:
    """The rows of all units. Source: DWARF 4, 6.2."""
    at = 0
    while at < len(table):
        (length,) = struct.unpack_from("<I", table, at)
        (version,) = struct.unpack_from("<H", table, at + 4)
        if version <= 4:
            yield from _unit(_Reader(table[: at + 4 + length], at))
        at += 4 + length


class _Reader:
    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at

    def take(self, form: str) -> int:
        (value,) = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize(form)
        return int(value)

    def leb(self, signed: bool = False) -> int:
        result = shift = 0
        while True:
            byte = self.take("B")
            result |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return result - (1 << shift) if signed and byte & 64 else result

    def string(self) -> str:
        end = self.data.index(b"\0", self.at)
        text = self.data[self.at : end].decode()
        self.at = end + 1
        return text


def _unit(read: _Reader) -> Iterator[Row]:
    """One unit's rows: its header, then the program."""
    read.take("I")
    version, rest = read.take("H"), read.take("I")
    program = read.at + rest
    step = read.take("B")
    if version >= 4:
        read.take("B")
    read.take("B")
    base, span, first_special = read.take("b"), read.take("B"), read.take("B")
    operands = [read.take("B") for _ in range(first_special - 1)]
    while read.string():
        pass  # folders
    files = ["?"]
    while name := read.string():
        files.append(name)
        for _ in range(3):
            read.leb()
    read.at = program

    address, file, line = 0, 1, 1
    while read.at < len(read.data):
        code = read.take("B")
        if code >= first_special:
            address += (code - first_special) // span * step
            line += base + (code - first_special) % span
            yield address, files[file], line
        elif code == 0:  # extended
            length = read.leb()
            end, kind = read.at + length, read.take("B")
            if kind == 1:
                yield address, None, 0
                address, file, line = 0, 1, 1
            elif kind == 2:
                address = read.take("Q")
            read.at = end
        elif code == 1:
            yield address, files[file], line
        elif code == 2:
            address += read.leb() * step
        elif code == 3:
            line += read.leb(signed=True)
        elif code == 4:
            file = read.leb()
        elif code == 8:
            address += (255 - first_special) // span * step
        elif code == 9:
            address += read.take("H")
        else:  # column, flags, instruction set: nothing that is used here
            for _ in range(operands[code - 1]):
                read.leb()
