"""CUDA: the text that MLX would generate for a call of ``mx.fast.cuda_kernel``, and its C++ text.

That function cannot even be built without a CUDA back end, so its few rules stand here again, as
mlx/backend/cuda/custom_kernel.cpp (0.32) has them: every input is ``const T*``, templates are lines
at the top of the body, header and body stand after MLX's own includes.
"""

import re

import mlx.core as mx

from .launch import Call, Definition, Program
from .metal_source import SHARED_ARRAY, rewrite_shared

_DEFAULT_HEADER = """
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

#define inf cuda::std::numeric_limits<float>::infinity()

"""
_TYPES = {
    mx.bool_: "bool",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.float32: "float",
}
_SHAPE_SUFFIXES = (("_shape", "Shape"), ("_strides", "Strides"), ("_ndim", "int"))


def prepare(definition: Definition, call: Call) -> Program:
    """The C++ text of a call."""
    name = f"custom_kernel_{definition.name}"
    parameters = _parameters(definition, call)
    signature = ",\n".join(f"    {kind} {parameter}" for kind, parameter in parameters)
    constants = "".join(_constant_line(*argument) for argument in call.template)
    source = (
        f"{_DEFAULT_HEADER}{definition.header}namespace mlx::core::cu {{\n\n"
        "namespace cg = cooperative_groups;\n\n"
        f"__global__ void {name}(\n{signature}) {{\n{constants}\n{definition.source}\n"
        "}\n\n} // namespace mlx::core::cu\n"
    )
    shared = re.compile(r"(?:\bstatic\s+)?\b__shared__" + SHARED_ARRAY)
    arguments = []
    for index, (kind, _) in enumerate(parameters):
        cast = kind.removeprefix("const __grid_constant__ ")
        value = f"({cast})buffers[{index}]"
        arguments.append(value if cast.endswith("*") else f"*({cast}*)buffers[{index}]")
    return Program(
        name=definition.name,
        source=source,
        run_text=(
            f'#include <cuda.h>\n#line 1 "kernel.cu"\n{rewrite_shared(source, shared)}\n'
            '#line 1 "entry"\nusing namespace mlx::core::cu;\n'
            'extern "C" __attribute__((visibility("default"))) EMU_RAW\n'
            f"void emu_entry(void** buffers) {{ {name}({', '.join(arguments)}); }}\n"
        ),
        buffers=tuple(parameter for _, parameter in parameters),
    )


def _parameters(definition: Definition, call: Call) -> list[tuple[str, str]]:
    """(type, name) of each parameter, in order."""
    parameters = []
    for name, array in zip(definition.input_names, call.inputs, strict=True):
        parameters.append((f"const {_type(array.dtype)}*", name))
        for suffix, kind in _SHAPE_SUFFIXES:
            if array.ndim > 0 and name + suffix in definition.source:
                parameters.append((f"const __grid_constant__ {kind}", name + suffix))
    for name, dtype in zip(definition.output_names, call.output_dtypes, strict=True):
        parameters.append((f"{_type(dtype)}*", name))
    return parameters


def _type(dtype: mx.Dtype) -> str:
    return _TYPES.get(dtype) or f"{str(dtype).rpartition('.')[2]}_t"


def _constant_line(name: str, value: int | bool | mx.Dtype) -> str:
    if isinstance(value, mx.Dtype):
        return f"  using {name} = {_type(value)};\n"
    kind, text = ("bool", str(value).lower()) if isinstance(value, bool) else ("int", str(value))
    return f"  constexpr {kind} {name} = {text};\n"
