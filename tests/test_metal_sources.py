"""Reading Metal sources: what is compiled is one text."""

from __future__ import annotations

import re

import pytest

from dflash_mlx import metal
from dflash_mlx.kernels.registry import OPERATIONS

HEADER = (metal.files(metal.__package__) / "common.h").read_text()


def test_a_kernel_source_is_one_text():
    """MLX compiles a string: an include of our own left in it would fail on the first Mac, and only there."""
    assert metal.names()
    for name in metal.names():
        assert '#include "' not in metal.source(name), name


def test_sources_operations_and_the_table_of_the_readme_have_the_same_names():
    """A kernel without an operation never runs, and one that is missing in the table is not found by a reader."""
    readme = (metal.files(metal.__package__) / "README.md").read_text()
    assert metal.names() == sorted(OPERATIONS) == sorted(re.findall(r"^\| `(\w+)` \|", readme, re.M))


def test_every_source_is_plain_text_of_a_readable_width():
    """Apple's compiler is the one that nobody here can ask; a character beyond ASCII is a warning or an error there."""
    sources = [path for path in metal.files(metal.__package__).iterdir() if path.name.endswith((".metal", ".h"))]
    assert len(sources) > len(metal.names())
    for path in sources:
        for number, line in enumerate(path.read_bytes().decode("ascii").splitlines(), 1):
            assert len(line) <= 120 and "\t" not in line, f"{path.name}:{number}"


def test_a_header_is_put_in_where_it_was_included_and_once():
    """Twice would define its functions twice; anywhere but above their use they would be unknown."""
    text = metal.put_in('// a\n#include "common.h"\nint b;\n#include "common.h"\nint c;\n', "x.metal")
    assert text == f"// a\n{HEADER}int b;\nint c;\n"


def test_includes_of_the_metal_library_stay():
    """They are the compiler's business, and so is text in a comment."""
    text = '#include <metal_stdlib>\n// #include "common.h"\n'
    assert metal.put_in(text, "x.metal") == text


def test_a_header_that_is_not_there_is_named():
    """Otherwise the first sign of a misspelt include is a compiler's message on somebody's Mac."""
    with pytest.raises(FileNotFoundError, match=r'x\.metal includes "comon\.h".*correct the include'):
        metal.put_in('#include "comon.h"\n', "x.metal")


def test_an_unknown_kernel_is_named_with_the_known_ones():
    with pytest.raises(KeyError, match="No Metal source named 'qmm'; installed: "):
        metal.source("qmm")
