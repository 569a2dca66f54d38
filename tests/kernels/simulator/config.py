"""The structure that Python and the runtime share: `Config` in runtime/state.h, field for field."""

from __future__ import annotations

import ctypes
from enum import IntFlag

BUFFERS = 40
WRITABLE, POISONED, COUNTED = 1, 2, 4  # modes of a buffer


class Flag(IntFlag):
    NONE = 0
    ANY_MEMORY = 1  # reads of uninitialised memory are let pass


_u32, _u64 = ctypes.c_uint32, ctypes.c_uint64


class Config(ctypes.Structure):
    """One launch: what Python fills in, then what the runtime reports."""

    _fields_ = [
        ("entry", _u64),
        ("grid", _u32 * 3),
        ("threadgroup", _u32 * 3),
        ("seed", _u64),
        ("flags", _u32),
        ("buffers", _u32),
        ("max_steps", _u64),
        ("seconds", _u64),
        ("stacks", _u64),
        ("threadgroup_limit", _u64),
        ("threadgroup_granule", _u32),
        ("mutant", _u32),
        ("size", _u64 * BUFFERS),
        ("mode", _u32 * BUFFERS),
        ("granule", _u32 * BUFFERS),
        ("source", _u64 * BUFFERS),
        ("name", _u64 * BUFFERS),
        ("first", _u64 * BUFFERS),
        ("skew", _u32 * BUFFERS),
        ("image_first", _u64),
        ("image_end", _u64),
        ("error", _u32),
        ("line", _u32),
        ("pc", _u64),
        ("other_pc", _u64),
        ("group", _u32 * 3),
        ("thread", _u32),
        ("other_thread", _u32),
        ("message", ctypes.c_char * 400),
        ("steps", _u64),
        ("unwritten", _u64 * BUFFERS),
        ("fetched", _u64 * BUFFERS),
        ("stored", _u64 * BUFFERS),
        ("loaded", _u64),
        ("matrix_operations", _u64),
        ("threadgroup_bytes", _u64),
    ]
