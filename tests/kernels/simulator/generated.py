"""The text that MLX generates for a kernel and the arguments at hand, from MLX itself.

`mx.export_function` traces a function that calls the kernel, without Metal, and stores the generated text in its file.
"""

from __future__ import annotations

import re
import struct
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import mlx.core as mx

from dflash_mlx.kernels.operation import Launch, MetalKernel

_PARAMETER = re.compile(r"\s*(?P<type>[^\[\]]*?)(?P<reference>[*&])\s+(?P<name>\w+) \[\[buffer\(\d+\)\]\]")
_ATTRIBUTE = re.compile(r"\s*(?P<type>uint3?)\s+(?P<name>\w+) \[\[(?P=name)\]\]")
_INSTANCE = re.compile(
    r"\ntemplate \[\[host_name\(\"\w+\"\)\]\] \[\[kernel\]\] decltype\(\w+(?P<values><.*>)\) .*;\n\Z"
)
PROPERTIES = ("shape", "strides", "ndim")  # of an input, which a body can name as <input>_shape, ...


@dataclass(frozen=True)
class Parameter:
    """One buffer of the signature.

    array:    the input or output that it belongs to.
    role:     "input", "output", or one of PROPERTIES.
    type:     what it points to, with address space: "const device float".
    by_value: whether the parameter is a reference, not a pointer.
    """

    array: str
    role: str
    type: str
    by_value: bool


@dataclass(frozen=True)
class Generated:
    """MLX's text for one combination of kernel, dtypes, sizes below 8, and template values.

    header, signature, body: the text in its three parts, without the closing brace and the instantiation.
    values:     template values as "<bfloat16_t, 3>", or "".
    attributes: (type, name) of the thread attributes that the body names.
    """

    text: str
    name: str
    header: str
    signature: str
    body: str
    values: str
    parameters: tuple[Parameter, ...]
    attributes: tuple[tuple[str, str], ...]


def generated(kernel: MetalKernel, launch: Launch) -> Generated:
    """What MLX would compile for this launch.

    Raises:
        ValueError: MLX refuses the call, such as for a wrong number of inputs; its own message.
    """
    inputs = tuple((array.dtype, array.ndim, array.size >= 8) for array in launch.inputs)
    return _generated(kernel, inputs, launch.dtypes, launch.template)


@lru_cache(maxsize=4096)
def _generated(
    kernel: MetalKernel,
    inputs: tuple[tuple[mx.Dtype, int, bool], ...],
    outputs: tuple[mx.Dtype, ...],
    template: tuple[tuple[str, int | bool | mx.Dtype], ...],
) -> Generated:
    # Only the dtype, whether it is a scalar, and whether it has 8 elements can change the text.
    arrays = [
        mx.zeros(((8 if large else 1),) + (1,) * (ndim - 1) if ndim else (), dtype) for dtype, ndim, large in inputs
    ]
    text, name = _exported(kernel, arrays, outputs, template)
    start = len(kernel.header)
    body = text.index(") {\n", start) + len(") {\n")
    end = body + len(kernel.body)
    assert text.startswith(kernel.header) and text[body:end] == kernel.body, "MLX's text has another layout now"
    signature, instance = text[start:body], _INSTANCE.search(text, end)
    return Generated(
        text=text,
        name=name,
        header=kernel.header,
        signature=signature,
        body=kernel.body,
        values=instance["values"] if instance else "",
        parameters=tuple(
            _parameter(kernel, match) for match in _PARAMETER.finditer(signature[signature.index("(") + 1 :])
        ),
        attributes=tuple((match["type"], match["name"]) for match in _ATTRIBUTE.finditer(signature)),
    )


def _exported(
    kernel: MetalKernel,
    arrays: list[mx.array],
    outputs: tuple[mx.Dtype, ...],
    template: tuple[tuple[str, int | bool | mx.Dtype], ...],
) -> tuple[str, str]:
    """The generated text, and the name of the function in it."""
    built = mx.fast.metal_kernel(
        name=kernel.name,
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=kernel.body,
        header=kernel.header,
        ensure_row_contiguous=kernel.contiguous,
    )

    def call(*inputs: mx.array) -> list[mx.array]:
        return built(  # type: ignore[operator]
            inputs=list(inputs),
            template=list(template),
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(1,)] * len(outputs),
            output_dtypes=list(outputs),
        )

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.mlxfn"
        mx.export_function(str(path), call, *arrays)
        data = path.read_bytes()
    # A string is its length in 8 bytes and its characters; the text follows the name.
    start = data.index(b"custom_kernel_" + kernel.name.encode())
    (length,) = struct.unpack_from("<Q", data, start - 8)
    name = data[start : start + length].decode()
    (size,) = struct.unpack_from("<Q", data, start + length)
    return data[start + length + 8 :][:size].decode(), name


def _parameter(kernel: MetalKernel, match: re.Match[str]) -> Parameter:
    name, role = match["name"], "input"
    if name in kernel.outputs:
        role = "output"
    elif name not in kernel.inputs:
        name, _, role = name.rpartition("_")
    return Parameter(name, role, match["type"].lstrip(",\n "), match["reference"] == "&")
