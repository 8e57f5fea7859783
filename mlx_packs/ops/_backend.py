"""Choose whether a kernel computes a call of an op, and launch it.

The kernels of an op ask their `KernelSpec` before they are launched. What `packs doctor` measured
on this device decides, else a rule of the op. A kernel instance (what the device compiles as one
program) is compared with its reference when it is first used; if it does not compile or is wrong,
its op stays with the reference in this process, and a warning is logged once.
"""

import functools
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import measurements
from ..runtime import dtype_name, mx
from . import dispatch
from ._check import Check, first_fault

MAKERS = {"metal": mx.fast.metal_kernel, "cuda": mx.fast.cuda_kernel}
_SUFFIX = {"metal": "metal", "cuda": "cu"}
# How the two languages name what a body needs: {shared} {group} {thread} in its text.
_WORDS = {
    "metal": {
        "shared": "threadgroup",
        "group": "threadgroup_position_in_grid",
        "thread": "thread_index_in_threadgroup",
    },
    "cuda": {"shared": "__shared__", "group": "blockIdx", "thread": "threadIdx.x"},
}
_MEASURED = "kernel"
THREADS = 256  # of a group, unless a kernel has its own number
_PACKAGE = Path(__file__).parents[1]
_log = logging.getLogger("mlx_packs")

Call = tuple[str, tuple, int, tuple]  # op, instance, rows, sizes

_checked: set[tuple] = set()  # backend, op, instance: agreed with their reference
_fallbacks: dict[str, str] = {}  # by op: why its kernels are off in this process
_decided: dict[tuple, str] = {}  # the backend, by everything that it depends on
_launched: set[Call] = set()  # since `start_record`


def start_record() -> None:
    """Clear the record of calls; a run that reports them begins here."""
    _launched.clear()


def record() -> dict:
    """Return the implementations of the calls since `start_record`, for reports.

    They are ``backend``; ``kernels``, the kinds of calls that ran as kernels; ``fallbacks``, ops
    whose kernel failed in this process, and why.
    """
    kinds = {f"{op} {_words(instance)} · {_words(sizes)}" for op, instance, _, sizes in _launched}
    return {
        "backend": dispatch.forced() or dispatch.detect(),
        "kernels": sorted(kinds),
        "fallbacks": dict(_fallbacks),
    }


def summary() -> str:
    """Return the result of `record` in one line."""
    known = record()
    if known["backend"] == "reference":
        return "plain MLX"

    line = f"{known['backend']} for {len(known['kernels'])} kinds of calls, plain MLX for others"
    if known["fallbacks"]:
        line += f" · failed here: {', '.join(known['fallbacks'])}"
    return line


def _words(value: object) -> str:
    if isinstance(value, mx.Dtype):
        return dtype_name(value)
    if hasattr(value, "_asdict"):
        parts = []
        for key, part in value._asdict().items():
            text = _words(part)
            if key not in ("kernel", "dtype"):
                text = f"{key.replace('_', ' ')} {text}"
            parts.append(text)
        return ", ".join(parts)

    if isinstance(value, tuple):
        return "/".join(map(_words, value))
    return str(value)


@dataclass(frozen=True)
class KernelSpec:
    """The kernels of an op: how they are compared with its reference, and when they are faster.

    Attributes:
        op: Its name.
        checks: For a backend and an instance, inputs for which it is compared with its reference.
        slower: For an instance, rows and sizes, whether plain MLX is expected to be faster where
            nothing was measured.
        workload: For a backend, an instance, rows and sizes, inputs of these sizes.
    """

    op: str
    checks: Callable[[str, Any], list[Check]]
    slower: Callable[[Any, int, Any], bool] = lambda *_: False
    workload: Callable[[str, Any, int, Any], Check] | None = None

    def choose(self, instance: tuple, rows: int, sizes: tuple, supported: bool = True) -> str:
        """Return the backend that computes one call of the op.

        Args:
            instance: What the device compiles as one program, a named tuple: dtype, ranks, tile.
            rows: The cost depends on them.
            sizes: A named tuple of all else that the cost depends on.
            supported: Whether the op has a kernel for this call.
        """
        wanted = dispatch.forced()
        name = wanted or dispatch.detect()
        if name == "reference" or not supported:
            return "reference"

        call = (self.op, instance, rows, sizes)
        decision = _decided.get((name, wanted, call))
        if decision is None:
            decision = _decided[(name, wanted, call)] = _decide(self, name, wanted, call)
        if decision != "reference":
            _launched.add(call)
        return decision


@dataclass(frozen=True)
class Instance:
    """A kernel instance that people are likely to meet, for the doctor and for tests.

    Attributes:
        call: What `KernelSpec.choose` is asked for it: the instance, rows and sizes.
    """

    spec: KernelSpec
    name: str
    call: tuple[tuple, int, tuple]

    @property
    def op(self) -> str:
        return self.spec.op

    def checks(self, backend: str) -> list[Check]:
        return self.spec.checks(backend, self.call[0])

    def workload(self, backend: str) -> Check:
        return self.spec.workload(backend, *self.call)


def _decide(spec: KernelSpec, name: str, wanted: str | None, call: Call) -> str:
    op, instance, *_ = call
    if op in _fallbacks or (wanted is None and _is_slower(spec, name, call)):
        return "reference"

    if (name, op, instance) not in _checked:
        try:
            fault = first_fault(spec.checks(name, instance))
        except Exception as error:  # compilers and devices raise what they like
            fault = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if fault is not None:
            _fall_back(op, f"{name} kernel ({_words(instance)}): {fault}")
            return "reference"
        _checked.add((name, op, instance))
    return name


def _is_slower(spec: KernelSpec, name: str, call: Call) -> bool:
    """Return whether plain MLX is faster for a call, by a measurement or else the op's rule."""
    if (times := measured(name, call)) is not None:
        kernel, plain = times
        return kernel >= plain
    return spec.slower(*call[1:])


def measured(name: str, call: Call) -> tuple[float, float] | None:
    """Return the microseconds of a backend's kernel and of plain MLX, if this device has them."""
    known = measurements.recall(_MEASURED, _subject(name, call))
    return known and (known["kernel_us"], known["plain_us"])


def keep_measured(name: str, call: Call, kernel_us: float, plain_us: float) -> None:
    """Let measured times of a call decide from now on."""
    times = {"kernel_us": kernel_us, "plain_us": plain_us}
    measurements.remember(_MEASURED, _subject(name, call), times)
    _decided.clear()


def _subject(name: str, call: Call) -> dict:
    """Return the facts on which a call's times depend; rows count up to a power of two."""
    op, instance, rows, sizes = call
    return {
        "backend": name,
        "op": op,
        "instance": _words(instance),
        "rows": 1 << max(0, rows - 1).bit_length(),
        "sizes": _words(sizes),
        "text": _text_hash(name),
    }


def _fall_back(op: str, reason: str) -> None:
    """Compute an op by its reference for the rest of this process, and log a warning once."""
    _fallbacks[op] = reason
    _decided.clear()  # steps that were compiled before keep the kernels that passed their check

    short = reason[:240] + " …" if len(reason) >= 240 else reason
    _log.warning("packs: %s is computed by plain MLX from here on: %s", op, short)


@functools.cache
def _text_hash(name: str) -> str:
    files = sorted(_kernels_folder().glob(f"*/*.{_SUFFIX[name]}"))
    return hashlib.sha256(b"\0".join(f.read_bytes() for f in files)).hexdigest()[:16]


@functools.cache
def source(op: str, suffix: str) -> str:
    """Return the text of ``kernels/<op>/<op>.<suffix>``."""
    return (_kernels_folder() / op / f"{op}.{suffix}").read_text(encoding="utf-8")


def _kernels_folder() -> Path:
    """Return the folder of kernels: of the wheel or of a checkout."""
    folder = _PACKAGE / "_kernels"
    return folder if folder.is_dir() else _PACKAGE.parent / "kernels"


@dataclass(frozen=True)
class Kernel:
    """A kernel of ``kernels/<op>/``: its name, buffers, and the body that calls its functions.

    The body is the same for both languages; ``{shared}``, ``{group}`` and ``{thread}`` stand for
    what differs. Every launch consists of complete groups of ``threads`` threads.

    Attributes:
        includes: Other ops whose text precedes the text of this op.
    """

    op: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str
    threads: int = THREADS
    includes: tuple[str, ...] = ()

    def launch(
        self,
        backend: str,
        inputs: Sequence[mx.array],
        template: Mapping[str, int | mx.Dtype],
        groups: tuple[int, int, int],
        outputs: Sequence[tuple[Sequence[int], mx.Dtype]],
    ) -> list[mx.array]:
        """Return outputs of these shapes and dtypes; ``groups`` counts groups of threads.

        Inputs of fewer than 8 numbers are padded: MLX puts shorter ones into Metal's ``constant``
        address space, and the functions take ``device`` pointers.
        """
        return self.prepared(backend, template, groups, outputs)(inputs=list(map(padded, inputs)))

    def prepared(
        self,
        backend: str,
        template: Mapping[str, int | mx.Dtype],
        groups: tuple[int, int, int],
        outputs: Sequence[tuple[Sequence[int], mx.Dtype]],
    ) -> Callable[..., list[mx.array]]:
        """Return `launch` for many calls: of ``inputs`` that are `padded`, a list."""
        return functools.partial(
            _built(backend, self),
            template=list(template.items()),
            grid=(groups[0] * self.threads, groups[1], groups[2]),
            threadgroup=(self.threads, 1, 1),
            output_shapes=[tuple(shape) for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
        )


def padded(value: mx.array) -> mx.array:
    """Return an array that has 8 numbers at least, as kernels need it."""
    if value.size >= 8:
        return value
    return mx.pad(value.flatten(), (0, 8 - value.size))


@functools.cache
def _built(backend: str, kernel: Kernel) -> Callable[..., list[mx.array]]:
    """Return the launchable object, built when first used: without CUDA, building one raises."""
    body = kernel.body
    for word, text in _WORDS[backend].items():
        body = body.replace("{" + word + "}", text)

    texts = [source(op, _SUFFIX[backend]) for op in (*kernel.includes, kernel.op)]
    return MAKERS[backend](
        name=f"mlx_packs_{kernel.name}",
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=body,
        header="\n".join(texts),
    )


def with_plain_gradient(
    kernel: Callable[..., Sequence[mx.array]], plain: Callable[..., Sequence[mx.array]]
) -> Callable[..., Sequence[mx.array]]:
    """Return a kernel as an op with the gradient of plain MLX; both take the same arrays."""
    op = mx.custom_function(kernel)

    @op.vjp
    def op_vjp(
        primals: Sequence[mx.array], cotangents: Sequence[mx.array], _: object
    ) -> list[mx.array]:
        return mx.vjp(plain, list(primals), list(cotangents))[1]

    return op


@functools.cache
def table(values: tuple[float, ...], dtype: mx.Dtype = mx.int32) -> mx.array:
    """Return a few numbers for a kernel, at least 8 with zeros; the same array each time."""
    return mx.array([*values, *[0] * (8 - len(values))], dtype=dtype)
