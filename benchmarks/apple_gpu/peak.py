"""The order in which MLX evaluates a graph, and the memory that it needs in that order."""

from collections import Counter, defaultdict
from dataclasses import dataclass

from .costs import Array, Graph, Op

_WIDTH = 20  # MLX_BFS_MAX_WIDTH


@dataclass(frozen=True)
class Queue:
    """How far MLX runs ahead of its device (mlx/transforms.cpp, backend/metal/device.cpp).

    What a command buffer reads is freed when it completes. By default that of an M3 Max.

    Args:
        dispatches: after so many a command buffer is committed.
        elements: or after so many elements of its inputs.
        buffers: that wait at most.
    """

    dispatches: int = 50
    elements: int = 50 << 20
    buffers: int = 10


def evaluation_order(graph: Graph) -> list[Op]:
    """Return the ops in the order of MLX's evaluation (mlx/transforms.cpp, eval_impl).

    From the outputs backwards, breadth first until more than `_WIDTH` ops wait, then deeper; an op
    comes once everything that reads it is in; all of it is evaluated the other way round.
    """
    maker = {id(output): op for op in graph.ops for output in op.outputs}
    last = Op("Synchronize", graph.outputs, [])
    readers = Counter(id(maker.get(id(a))) for op in (*graph.ops, last) for a in op.inputs)
    tape, deferred, at = [last], [], 0
    while at < len(tape) or deferred:
        if at < len(tape):
            op, begin = tape[at], 0
            at += 1
        else:
            op, begin = deferred.pop()
        for position in range(begin, len(op.inputs)):
            source = maker.get(id(op.inputs[position]))
            if source is None:
                continue
            if len(tape) - at >= _WIDTH:
                deferred.append((op, position))
                break
            readers[id(source)] -= 1
            if readers[id(source)] == 0:
                tape.append(source)
    return tape[:0:-1]


def peak_bytes(graph: Graph, queue: Queue | None = None) -> int:
    """Return the most bytes of arrays of a step that exist together, beside those given.

    Args:
        queue: arrays are freed as late as it lets them be; None frees them after their last reader.
    """
    order = evaluation_order(graph)
    freed_at = _completions(order, queue) if queue else list(range(len(order)))
    readers = Counter(buffer for op in order for buffer in {id(a.buffer) for a in op.inputs})
    last_use = {id(a.buffer): t for t, op in enumerate(order) for a in (*op.inputs, *op.outputs)}
    for array in graph.outputs:
        last_use.pop(id(array.buffer), None)
    ending: dict[int, list[int]] = defaultdict(list)
    for buffer, t in last_use.items():
        ending[t].append(buffer)
    freed: dict[int, list[int]] = defaultdict(list)
    sizes: dict[int, int] = {}
    peak = in_use = 0
    for t, op in enumerate(order):
        new = {id(a): a.nbytes for a in _allocated(op)}
        missing = sum(new.values())
        for buffer in ending[t] if op.donates else ():
            # what another command buffer in flight still reads is not written into
            if queue is None or readers[buffer] == 1:
                reused = min(missing, sizes.get(buffer, 0))
                sizes[buffer] = sizes.get(buffer, 0) - reused
                missing -= reused
        sizes |= new
        in_use += missing
        peak = max(peak, in_use)
        freed[freed_at[t]] += ending[t]
        in_use -= sum(sizes.pop(buffer, 0) for buffer in freed.pop(t, ()))
    return peak


def _completions(order: list[Op], queue: Queue) -> list[int]:
    """Return for each op the last one that is encoded while its command buffer may not be done."""
    buffers: list[int] = []
    dispatches = elements = index = 0
    for op in order:
        buffers.append(index)
        dispatches += op.dispatches
        elements += sum(a.layout.size for a in op.inputs) if op.dispatches else 0
        if dispatches > queue.dispatches or elements > queue.elements:
            dispatches, elements, index = 0, 0, index + 1
    last = {buffer: t for t, buffer in enumerate(buffers)}
    return [last.get(buffer + queue.buffers, len(order) - 1) for buffer in buffers]


def _allocated(op: Op) -> list[Array]:
    return [a for a in op.outputs if a.buffer is a] if op.dispatches else []
