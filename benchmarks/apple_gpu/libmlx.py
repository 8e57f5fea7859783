"""MLX's CPU build on Linux x86-64, made to lay out in this process what its Metal build would.

Whether a primitive is fused, or laid out as a chain of others, is decided by small functions of
libmlx that the CPU build answers with no. Their code is overwritten here with a Metal build's
answer; in Python, MLX answers that its device is a GPU. A process that did this lays graphs out and
cannot evaluate them.

The answers are those of MLX 0.32.4 at head widths up to 128: norms, RoPE and cross entropy are
fused, and so is attention with its gradient, unless its mask is an array.
"""

import ctypes
import math
import platform
import sys
from collections.abc import Callable, Sequence
from ctypes import c_int, c_size_t, c_void_p
from importlib.metadata import version
from mmap import PAGESIZE, PROT_EXEC, PROT_READ, PROT_WRITE
from pathlib import Path

import numpy as np

from . import lazy_graph

MLX = "0.32.4"
KernelCost = Callable[[str, list[tuple], list[tuple], dict], tuple[int | None, float | None, bool]]

_YES = bytes.fromhex("b801000000 c3")  # mov eax, 1; ret
_NO = bytes.fromhex("31c0 c3")  # xor eax, eax; ret
_NOTHING = bytes.fromhex("c3")  # ret
# An array as mask, while gradients are traced: has_arr_mask && output_logsumexp && !force_fused,
# which are r8 and the third and fourth arguments on the stack (System V ABI).
_MASK_IN_TRAINING = bytes.fromhex(
    "8a442420"  # mov al, [rsp + 32]
    "3401"  # xor al, 1
    "22442418"  # and al, [rsp + 24]
    "4420c0"  # and al, r8b
    "0fb6c0"  # movzx eax, al
    "c3"  # ret
)
_FAST = "_ZN3mlx4core4fast"
_ANSWERS = {
    "_ZN3mlx4core3gpu12is_availableEv": _YES,
    "_ZN3mlx4core3gpu12device_countEv": _YES,
    "_ZN3mlx4core3gpu10new_streamENS0_6StreamE": _NOTHING,
    "_ZN3mlx4core3gpu24new_thread_unsafe_streamENS0_6StreamE": _NOTHING,
    "_ZN3mlx4core3gpu11synchronizeENS0_6StreamE": _NOTHING,
    "_ZN3mlx4core6detail28compile_available_for_deviceERKNS0_6DeviceE": _YES,
    f"{_FAST}7RMSNorm12use_fallbackENS0_6StreamE": _NO,
    f"{_FAST}9LayerNorm12use_fallbackENS0_6StreamE": _NO,
    f"{_FAST}4RoPE12use_fallbackENS0_6StreamE": _NO,
    f"{_FAST}12CrossEntropy12use_fallbackENS0_6StreamE": _NO,
    f"{_FAST}28ScaledDotProductAttentionVJP12use_fallbackERKNS0_5arrayENS0_6StreamE": _NO,
    f"{_FAST}25ScaledDotProductAttention12use_fallbackERKNS0_5arrayES5_S5_bbbbbbbNS0_6StreamE": (
        _MASK_IN_TRAINING
    ),
}
_SECTION = np.dtype(
    [("name", "<u4"), ("type", "<u4"), ("flags", "<u8"), ("address", "<u8"), ("offset", "<u8")]
    + [("size", "<u8"), ("link", "<u4"), ("info", "<u4"), ("align", "<u8"), ("entry", "<u8")]
)
_SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2")]
    + [("value", "<u8"), ("size", "<u8")]
)
_SYMBOL_TABLE = 2


class Unsupported(Exception):
    """This machine or this MLX cannot lay out the graph of a Metal build."""


def check_supported() -> None:
    """Raises: Unsupported, with what to do."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise Unsupported(
            f"needs MLX's CPU build on Linux x86-64, and this is {sys.platform} "
            f"{platform.machine()}. A Mac measures: packs bench."
        )
    if (installed := version("mlx")) != MLX:
        raise Unsupported(
            f"knows what a Metal build of MLX {MLX} lays out, and {installed} is installed: "
            f"pip install 'mlx[cpu]=={MLX}', or teach benchmarks/apple_gpu/libmlx.py."
        )


class MetalBuild:
    """MLX of this process, as its Metal build lays graphs out. Cannot be undone.

    Args:
        kernel_cost: what a launch of an own kernel costs (`our_step.kernel_cost`).
    """

    def __init__(self) -> None:
        import mlx.core as mx

        check_supported()
        mx.set_default_device(mx.cpu)
        _overwrite(Path(mx.__file__).parent / "lib" / "libmlx.so")
        _check_fused(mx)
        self.kernel_cost: KernelCost | None = None
        self.kernels: dict[int, tuple] = {}
        self._launched: list = []  # kept, since the address of a primitive is its name
        self._replace(mx)

    def graph(self, outputs: Sequence, leaves: Sequence) -> list[lazy_graph.Node]:
        """Return the primitives from leaves to outputs; own kernels by ``kernel:`` and their name."""
        needed = {lazy_graph.address(output) for output in outputs}
        nodes = []
        for node in map(self._named, reversed(lazy_graph.read(outputs, leaves))):
            # nodes that only represent the results of a kernel are no part of the step
            if any(name in needed for name, *_ in node.outputs):
                needed.update(node.inputs)
                nodes.append(node)
        return nodes[::-1]

    def _named(self, node: lazy_graph.Node) -> lazy_graph.Node:
        if node.primitive not in self.kernels:
            return node
        name, cost = self.kernels[node.primitive]
        inputs = node.inputs[len(node.outputs) :]
        return lazy_graph.Node(f"kernel:{name}", node.primitive, inputs, node.outputs, list(cost))

    def _replace(self, mx: object) -> None:
        """Answer as on a Mac what programs ask MLX for, and evaluate nothing."""
        dequantize, gpu = mx.dequantize, mx.Device(mx.gpu)
        info = {
            "device_name": "Apple M3 Max",
            "architecture": "applegpu_g15s",
            "memory_size": 64 << 30,
            "max_recommended_working_set_size": 48 << 30,
            "max_buffer_length": 32 << 30,
        }
        answers = {
            "default_device": lambda: gpu,
            "device_info": lambda *_: dict(info),
            "dequantize": lambda *args, **options: dequantize(*args, **options | {"stream": gpu}),
            "eval": lambda *_: None,
            "async_eval": lambda *_: None,
            "set_wired_limit": lambda _: 0,
        }
        for name, answer in answers.items():
            setattr(mx, name, answer)
        mx.metal.is_available = lambda: True
        mx.metal.device_info = mx.device_info
        mx.fast.metal_kernel = self._metal_kernel

    def _metal_kernel(self, name: str, *_: object, **__: object) -> Callable:
        """Return the substitute of a kernel: its launch is one primitive of the graph.

        That primitive is the Depends of arrays of the right shapes on the kernel's inputs.
        """
        import mlx.core as mx

        def launch(
            *, inputs: list, output_shapes: list, output_dtypes: list, template=(), **_: object
        ) -> list[mx.array]:
            inputs = [mx.array(x) if isinstance(x, bool | int | float) else x for x in inputs]
            blank = [mx.zeros(s, d) for s, d in zip(output_shapes, output_dtypes, strict=True)]
            shapes = [x.shape for x in inputs], [x.shape for x in blank]
            cost = self.kernel_cost(name, *shapes, dict(template)) if self.kernel_cost else ()
            outputs = mx.depends(blank, inputs)
            self._launched.append(outputs)
            self.kernels[lazy_graph.primitive(outputs[0])] = name, cost or (None, None, False)
            return outputs

        return launch


def _functions(library: Path) -> dict[str, tuple[int, int]]:
    """Return address and size of each function in the symbol table of an ELF64 file."""
    data = library.read_bytes()
    at = int.from_bytes(data[40:48], "little")
    count = int.from_bytes(data[60:62], "little")
    sections = np.frombuffer(data, _SECTION, count, at)
    table = next((s for s in sections if s["type"] == _SYMBOL_TABLE), None)
    if table is None:
        return {}
    names = int(sections[table["link"]]["offset"])
    symbols = np.frombuffer(data, _SYMBOL, int(table["size"]) // _SYMBOL.itemsize, table["offset"])
    addresses = {}
    for symbol in symbols[(symbols["info"] & 15 == 2) & (symbols["section"] > 0)]:
        begin = names + int(symbol["name"])
        name = data[begin : data.index(b"\0", begin)].decode()
        addresses[name] = int(symbol["value"]), int(symbol["size"])
    return addresses


def _overwrite(library: Path) -> None:
    """Put the answers in the place of libmlx's functions, once all of them are found.

    Raises: Unsupported.
    """
    functions = _functions(library)
    for name, code in _ANSWERS.items():
        if functions.get(name, (0, 0))[1] < len(code):
            raise Unsupported(f"libmlx.so of MLX {version('mlx')} is another build: no {name}.")
    exported = next(iter(_ANSWERS))
    loaded = ctypes.cast(ctypes.CDLL(str(library))[exported], c_void_p).value
    base = loaded - functions[exported][0]
    mprotect = ctypes.CDLL(None, use_errno=True).mprotect
    mprotect.argtypes = [c_void_p, c_size_t, c_int]
    for name, code in _ANSWERS.items():
        at = base + functions[name][0]
        begin = at // PAGESIZE * PAGESIZE
        size = math.ceil((at + len(code) - begin) / PAGESIZE) * PAGESIZE
        if mprotect(begin, size, PROT_READ | PROT_WRITE | PROT_EXEC):
            raise Unsupported("this system lets no process change its own code.")
        ctypes.memmove(at, code, len(code))
        mprotect(begin, size, PROT_READ | PROT_EXEC)


def _check_fused(mx: object) -> None:
    """Raises: Unsupported if a small graph is not laid out, or not read, as it has to be."""
    x, mask = mx.zeros((1, 2, 3, 64), mx.bfloat16), mx.zeros((3, 3), mx.bfloat16)
    weight = mx.ones((64,), mx.bfloat16)

    def attention(mask: object) -> Callable:
        def forward(x: object) -> object:
            return mx.fast.scaled_dot_product_attention(x, x, x, scale=1.0, mask=mask).sum()

        return forward

    def norm(x: object) -> object:
        return mx.exp(mx.fast.rms_norm(x, weight, 1e-6) * 2).sum()

    def names(gradient: object) -> set[str]:
        return {node.name for node in lazy_graph.read([gradient], [x, weight, mask])}

    laid_out = [
        names(mx.grad(attention("causal"))(x)),
        names(mx.grad(attention(mask))(x)),
        names(mx.compile(mx.grad(norm))(x)),
    ]
    first, second = mx.split(x.swapaxes(2, 3), [2], axis=2)
    nodes = lazy_graph.read([second, first[..., ::2]], [x])
    read = [(node.name, node.attributes, [shape for _, shape, _ in node.outputs]) for node in nodes]
    expected = [
        ("leaf", None, [[1, 2, 3, 64]]),
        ("Transpose", [0, 1, 3, 2], [[1, 2, 64, 3]]),
        ("Split", None, [[1, 2, 2, 3], [1, 2, 62, 3]]),
        ("Slice", [1, 1, 1, 2], [[1, 2, 2, 2]]),
    ]
    fused = "ScaledDotProductAttentionVJP"
    if not (
        read == expected
        and fused in laid_out[0]
        and fused not in laid_out[1]
        and {"RMSNormVJP", "Compiled"} <= laid_out[2]
    ):
        raise Unsupported(f"MLX {version('mlx')} of this machine is laid out in another way.")
