"""Metal: the text that MLX itself generates for a call, and the two C++ texts made from it.

``mx.export_function`` walks a call of ``mx.fast.metal_kernel`` on a machine without Metal and hands
its callback the full generated source. So no signature rule of MLX is copied here: small inputs in
``constant`` memory, 0-d inputs as references, shapes and thread attributes named in the body,
``atomic<T>`` outputs and template lines are what MLX makes of them.
"""

import re

import mlx.core as mx

from .launch import Call, Definition, Program

_ATTRIBUTE = re.compile(r"\[\[[^\[\]]*\]\]")
_PARAMETER = re.compile(r"(?P<type>.*?)(?P<name>\w+)\s*\[\[(?P<attribute>\w+)[^\]]*\]\]", re.DOTALL)
_INSTANCE = re.compile(r"^template \[\[host_name.*\) \w+(<.*>);\s*$", re.MULTILINE)
_DECLARATOR = r"[A-Za-z_]\w*\s*(?:\[[^;={}]*\])*"
SHARED_ARRAY = (
    r"\s+(?P<type>(?:alignas\([^)]*\)\s*)?[A-Za-z_][\w:]*(?:\s*<[^;{{}}()]*?>)?"
    r"(?:\s+[A-Za-z_]\w*)*?)\s+"
    rf"(?P<names>{_DECLARATOR}(?:\s*,\s*{_DECLARATOR})*)\s*;"
).replace("{{}}", "{}")


def generated(definition: Definition, call: Call) -> tuple[str, str]:
    """(name of the kernel, source) as MLX generates them for this call."""
    kernel = mx.fast.metal_kernel(
        name=definition.name,
        input_names=list(definition.input_names),
        output_names=list(definition.output_names),
        source=definition.source,
        header=definition.header,
        ensure_row_contiguous=definition.ensure_row_contiguous,
        atomic_outputs=definition.atomic_outputs,
    )

    def traced(*inputs: mx.array) -> list[mx.array]:
        return kernel(
            inputs=list(inputs),
            template=list(call.template),
            grid=call.grid,
            threadgroup=call.threadgroup,
            output_shapes=list(call.output_shapes),
            output_dtypes=list(call.output_dtypes),
        )

    found: list[tuple[str, str]] = []

    def visit(entry: dict) -> None:
        if entry["type"] == "primitive" and entry["name"] == "CustomKernel":
            found.append((entry["arguments"][0], entry["arguments"][1]))

    # Stand-ins of the same shapes: the inputs may be tracers of a gradient.
    mx.export_function(visit, traced, *(mx.zeros(x.shape, x.dtype) for x in call.inputs))
    return found[0]


def prepare(definition: Definition, call: Call) -> Program:
    """Both C++ texts of a call."""
    name, source = generated(definition, call)
    start = source.index(f"void {name}(")
    end = source.index(") {", start)
    parameters = [
        match.groupdict()
        for match in _PARAMETER.finditer(source[start + len(f"void {name}(") : end])
    ]
    instance = _INSTANCE.search(source)
    shared = re.compile(r"\bthreadgroup" + SHARED_ARRAY)
    body = rewrite_shared(source[end:], shared)
    text = source[:end] + body
    return Program(
        name=definition.name,
        source=source,
        run_text=_run_text(name, _INSTANCE.sub("", text), instance, parameters),
        strict_text=f'#include <metal_stdlib>\n#line 1 "kernel.metal"\n{_ATTRIBUTE.sub("", text)}',
        buffers=tuple(p["name"] for p in parameters if p["attribute"] == "buffer"),
    )


def rewrite_shared(text: str, declaration: re.Pattern[str]) -> str:
    """Arrays that a threadgroup shares become references to memory of the run time."""

    def replace(match: re.Match[str]) -> str:
        lines = []
        for name in re.findall(_DECLARATOR, match["names"]):
            stem, bounds = re.match(r"(\w+)\s*(.*)", name, re.DOTALL).groups()
            element = f"emu_element_{stem}"
            lines.append(f"typedef {match['type']} {element}; ")
            lines.append(f"EMU_THREADGROUP({element}, {stem}, {' '.join(bounds.split())})")
        return "".join(lines) + "\n" * match[0].count("\n")

    return declaration.sub(replace, text)


def _run_text(
    name: str, text: str, instance: re.Match[str] | None, parameters: list[dict[str, str]]
) -> str:
    """The text, and an entry that casts the buffers and asks the run time for the thread."""
    arguments, buffers = [], 0
    for parameter in parameters:
        kind = parameter["type"].strip().removeprefix(",").strip()
        if parameter["attribute"] != "buffer":
            arguments.append(f"{kind}(emu::{parameter['attribute']}())")
            continue
        if kind.endswith("&"):
            arguments.append(f"*({kind[:-1].strip()}*)buffers[{buffers}]")
        else:
            arguments.append(f"({kind})buffers[{buffers}]")
        buffers += 1
    call = f"{name}{instance[1] if instance else ''}({', '.join(arguments)})"
    return (
        f'#include <metal_stdlib>\n#line 1 "kernel.metal"\n{_ATTRIBUTE.sub("", text)}\n'
        '#line 1 "entry"\nextern "C" __attribute__((visibility("default"))) EMU_RAW\n'
        f"void emu_entry(void** buffers) {{ {call}; }}\n"
    )
