"""The result of a run of a kernel: a report, or a fault that names the place."""

from dataclasses import dataclass, field


class KernelFault(Exception):
    """A kernel broke a rule.

    ``kind`` is one of: compile, lint, launch, bounds, race, uninitialised, divergence, lane,
    alignment, undefined, threadgroup memory, stack, unwritten, order, precision.
    """

    def __init__(self, kind: str, kernel: str, message: str) -> None:
        super().__init__(f"[{kernel}] {kind}: {message}")
        self.kind = kind
        self.kernel = kernel
        self.message = message


@dataclass
class Report:
    """Totals of one launch; operations and accesses are those of one order of the threads."""

    threads_per_group: int
    groups: int
    accesses: int = 0
    half_operations: int = 0
    bfloat_operations: int = 0
    roundings: int = 0  # float to half or bfloat, one for each store of a 16-bit output
    threadgroup_bytes: int = 0
    unwritten: dict[str, int] = field(default_factory=dict)  # bytes of each output, only if any


@dataclass(frozen=True)
class Checks:
    """The rules for a kernel; the defaults are for kernels of this project."""

    orders: tuple[str, ...] = ("forward", "reverse", "shuffled")
    strict: bool = True  # the pass for types, address spaces and forbidden language
    low_precision: bool = False  # allow arithmetic in half and bfloat
    threadgroup_bytes: int = 32768
    threads_per_group: int = 1024
    buffers: int = 31
