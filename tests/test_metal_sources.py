"""Reading Metal sources: what is compiled is one text."""

from __future__ import annotations

import pytest

from dflash_mlx import metal

HEADER = (metal.files(metal.__package__) / "common.h").read_text()


def test_a_kernel_source_is_one_text():
    """MLX compiles a string: an include of our own left in it would fail on the first Mac, and only there."""
    assert metal.names()
    for name in metal.names():
        assert '#include "' not in metal.source(name), name


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
