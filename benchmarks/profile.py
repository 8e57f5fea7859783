"""Where a training step's time goes, part by part, and how far the step is from its roofline.

Each part runs alone, forward and backward, on the modules and at the shapes of the run; the sum is
compared with the complete step, and what it does not explain is shown as such (embedding, additions,
what alone is slower or faster than among the others). The roofline is the step's useful flops at
the best rate of a dense product of this base, by all CPU streams, measured in the same run, or its bytes
at the rate of a copy, whichever takes longer. Nothing is recomputed here.

    python -m benchmarks.profile --workload qwen3_4b_block --matmul-path dense
"""

import argparse
import dataclasses
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from mlx_packs.bases.files import TINY
from mlx_packs.bench.implementations import SCALE, Adapters, Ours, TokenRows
from mlx_packs.config.choices import MATMUL_PATHS
from mlx_packs.errors import PackError
from mlx_packs.nn.frozen_weight import frozen_weight
from mlx_packs.nn.lora import GroupedLoRA
from mlx_packs.objectives.causal_lm import CausalLM, split_head
from mlx_packs.objectives.objective import arrays_of
from mlx_packs.ops.attention import attention
from mlx_packs.ops.profile import profile as device_profile
from mlx_packs.runtime import mx

from . import history, report
from .history import Environment, Record, percentiles, record
from .implementations import ours_name
from .workloads import WORKLOADS, activation_dtype, base_name, load

_COPY_BYTES = 1 << 28
_AS_THEY_ARE = "base products, as they are"
_FIRST_GROUP = ("q_proj", "k_proj", "v_proj")
Function = Callable[..., Sequence[mx.array]]


@dataclass
class Part:
    """Milliseconds that a part takes in a step, run by run, and the flops that it must do."""

    ms: list[float] = field(default_factory=list)
    gflop: float = 0.0


def milliseconds(call: Callable[[], object], repeats: int) -> list[float]:
    """Of each of some calls, after one that is not timed."""
    mx.eval(call())
    results = []
    for _ in range(repeats):
        start = time.perf_counter()
        mx.eval(call())
        results.append(1e3 * (time.perf_counter() - start))
    return results


def forward_and_backward(function: Function, inputs: list[mx.array]) -> Callable[[], object]:
    """A call that gives the outputs and the gradients of all inputs."""
    cotangents = [noise(y.shape, y.dtype, 7) for y in function(*inputs)]
    mx.eval(inputs, cotangents)
    return lambda: mx.vjp(function, inputs, cotangents)


def noise(shape: Sequence[int], dtype: mx.Dtype, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


class Profile:
    """The parts of a step of ours; ``add`` times one that occurs ``count`` times."""

    def __init__(self, ours: Ours, rows: TokenRows, rank: int, repeats: int):
        self.ours, self.rank, self.repeats = ours, rank, repeats
        self.model = ours.attached.model
        self.blocks = len(self.model.layers)
        self.batch_size, self.length = rows.tokens.shape[0], rows.tokens.shape[1] - 1
        self.tokens = self.batch_size * self.length
        self.inputs = arrays_of(rows.for_ours())
        self.dtype = self.model.layers[0].input_layernorm.weight.dtype
        self.parts: dict[str, Part] = defaultdict(Part)
        self.bytes = 0
        self.gflop_s = 0.0

    def add(self, name: str, call: Callable[[], object], count: int, gflop: float = 0.0) -> None:
        """``gflop``: of one call."""
        part = self.parts[name]
        ms = [count * each for each in milliseconds(call, self.repeats)]
        part.ms = [a + b for a, b in zip(part.ms or [0.0] * len(ms), ms, strict=True)]
        part.gflop += count * gflop

    def measure(self) -> "Profile":
        """All parts."""
        self._products()
        self._low_rank()
        self._attention()
        self._norms_and_rope()
        self._activation()
        self._loss()
        self._optimizer()
        return self

    def _products(self) -> None:
        """Products with frozen weights: as dense ones, and what unpacking adds to them."""
        modules = dict(self.model.named_modules())
        frozen = self.ours.attached.frozen
        paths: dict[tuple, list[str]] = defaultdict(list)
        for path, module in frozen.items():
            paths[frozen_weight(module).shape].append(path)
        for (out, width), same in paths.items():
            # no adapter comes before the first block's q, k, v: their input needs no gradient
            first = [p for p in same if ".layers.0." in p and p.endswith(_FIRST_GROUP)]
            x = noise((self.tokens, width), self.dtype, 1)
            module = modules[same[0]]
            dense = frozen_weight(frozen[same[0]]).dense().astype(self.dtype)
            gflop = 2e-9 * self.tokens * out * width
            self._add_product(
                "base products",
                lambda v, w=dense: [device_profile().matmul(v, w)],
                x,
                same,
                first,
                gflop,
            )
            if not isinstance(module, nn.Linear):  # kept dense, they are the products above
                self._add_product(_AS_THEY_ARE, lambda v, m=module: [m(v)], x, same, first, 0.0)
            times = milliseconds(lambda w=dense, x=x: device_profile().matmul(x, w), self.repeats)
            forward = percentiles(times)["p50"]
            self.gflop_s = max(self.gflop_s, 1e3 * gflop / forward)
            nbytes = sum(a.nbytes for _, a in tree_flatten(module.parameters()))
            moved = nbytes + self.dtype.size * self.tokens * (out + width)
            self.bytes += moved * (2 * len(same) - len(first))
        if _AS_THEY_ARE in self.parts:
            both = self.parts.pop(_AS_THEY_ARE).ms, self.parts["base products"].ms
            added = [as_they_are - dense for as_they_are, dense in zip(*both, strict=True)]
            self.parts["unpacking weights"] = Part(added)

    def _add_product(self, name, product, x, paths, forward_only, gflop) -> None:
        """A product with the weights at ``paths``, some of which need no input gradient."""
        backward = len(paths) - len(forward_only)
        if backward:
            self.add(name, forward_and_backward(product, [x]), backward, 2 * gflop)
        if forward_only:
            self.add(name, lambda: product(x), len(forward_only), gflop)

    def _low_rank(self) -> None:
        loras = [m for m in self.model.modules() if isinstance(m, GroupedLoRA)]
        kinds = Counter(_lora_kind(m) for m in loras)
        for lora in {_lora_kind(m): m for m in loras}.values():
            width, outs = _lora_kind(lora)
            names, values = zip(*tree_flatten(lora.trainable_parameters()), strict=True)
            outputs = [noise((self.tokens, out), self.dtype, 2) for out in outs]

            slots = len(outputs)

            def call(x, *rest, lora=lora, names=names, count=slots):
                lora.update(tree_unflatten(list(zip(names, rest[count:], strict=True))))
                return lora(x, list(rest[:count]))

            x = noise((self.tokens, width), self.dtype, 3)
            whole = forward_and_backward(call, [x, *outputs, *values])
            gflop = 6e-9 * self.tokens * self.rank * sum(width + out for out in outs)
            self.add("low-rank parts", whole, kinds[_lora_kind(lora)], gflop)
            lora.update(tree_unflatten(list(zip(names, values, strict=True))))

    def _attention(self) -> None:
        block = self.model.layers[0].self_attn
        heads, kv_heads = block.n_heads, block.n_kv_heads
        width = frozen_weight(self._frozen("q_proj")).shape[0] // heads
        q, k, v = (
            noise((self.batch_size, n, self.length, width), self.dtype, 4)
            for n in (heads, kv_heads, kv_heads)
        )

        def call(q, k, v):
            return [attention(q, k, v, block.scale, "causal")]

        pairs = self.batch_size * heads * self.length * (self.length + 1) / 2
        self.add(
            "attention",
            forward_and_backward(call, [q, k, v]),
            self.blocks,
            6 * 2e-9 * pairs * width,
        )

    def _norms_and_rope(self) -> None:
        block = self.model.layers[0]
        inside = block.self_attn
        hidden = block.input_layernorm.weight.shape[0]
        x = noise((self.batch_size, self.length, hidden), self.dtype, 5)
        norm = forward_and_backward(lambda v: [block.input_layernorm(v)], [x])
        self.add("norms and RoPE", norm, 2 * self.blocks + 1)
        width = frozen_weight(self._frozen("q_proj")).shape[0] // inside.n_heads
        for heads, name in ((inside.n_heads, "q_norm"), (inside.n_kv_heads, "k_norm")):
            x = noise((self.batch_size, self.length, heads, width), self.dtype, 6)

            def call(v, name=name):
                v = inside[name](v) if name in inside else v
                return [inside.rope(v.transpose(0, 2, 1, 3))]

            self.add("norms and RoPE", forward_and_backward(call, [x]), self.blocks)

    def _activation(self) -> None:
        width = frozen_weight(self._frozen("gate_proj")).shape[0]
        gate, up = (noise((self.tokens, width), self.dtype, seed) for seed in (8, 9))
        call = forward_and_backward(lambda g, u: [device_profile().swiglu(g, u)], [gate, up])
        self.add("MLP activation", call, self.blocks)

    def _loss(self) -> None:
        """Loss and head on the rows that have a target."""
        head = split_head(self.model)
        tokens, positions = self.inputs["tokens"], self.inputs["positions"]
        hidden = self.model.layers[0].input_layernorm.weight.shape[0]
        states = noise((*tokens.shape, hidden), self.dtype, 10)

        def call(states):
            supplied = dataclasses.replace(head, hidden=lambda *_, **__: states)
            return [CausalLM(self.model, supplied).loss(self.inputs)[0]]

        vocab_size = self.ours.attached.base.vocab_size
        self.add(
            "head and loss",
            forward_and_backward(call, [states]),
            1,
            4e-9 * positions.size * hidden * vocab_size,
        )

    def _optimizer(self) -> None:
        optimizer = self.ours.stepper.optimizer
        gradients = tree_map(mx.ones_like, self.model.trainable_parameters())
        mx.eval(gradients)

        def call():
            optimizer.update(self.model, gradients)
            return self.model.trainable_parameters(), optimizer.state

        self.add("optimizer", call, 1)

    def _frozen(self, name: str) -> nn.Module:
        return next(m for p, m in self.ours.attached.frozen.items() if p.endswith(name))


def _lora_kind(lora: GroupedLoRA) -> tuple[int, tuple[int, ...]]:
    """Input width and output widths."""
    return lora.lora_a[0].shape[0], tuple(b.shape[1] for b in lora.lora_b)


def copy_gb_s(repeats: int) -> float:
    """Gigabytes a second, read and written, of a copy of a large array."""
    x = mx.zeros(_COPY_BYTES // 4)
    ms = percentiles(milliseconds(lambda: x + 1, repeats))["p50"]
    return 2 * _COPY_BYTES / 1e6 / ms


def records(profile: Profile, step_ms: list[float], about: dict, repeats: int) -> list[Record]:
    """A row for each part, for the rest, and for the step with its roofline."""
    here = Environment.here()
    step = percentiles(step_ms)["p50"]
    explained = sum(percentiles(part.ms)["p50"] for part in profile.parts.values())
    gflop = sum(part.gflop for part in profile.parts.values())
    copied = copy_gb_s(repeats)
    flops_ms, bytes_ms = 1e3 * gflop / profile.gflop_s, profile.bytes / 1e6 / copied
    bound = max(flops_ms, bytes_ms)
    note = (
        f"Roofline: {gflop:.1f} GFLOP at {profile.gflop_s:.1f} GFLOP/s (the best dense product "
        f"of this base) are {flops_ms:.0f} ms; {profile.bytes / 1e9:.2f} GB at {copied:.1f} "
        f"GB/s (a copy) are {bytes_ms:.0f} ms."
    )

    def row(name: str, metric: str, unit: str, samples: Sequence[float]) -> Record:
        return record(
            here,
            about["task"],
            name,
            about["shape"],
            metric,
            unit,
            samples,
            dtype=about["dtype"],
            note=note,
        )

    new_records = []
    for name, part in profile.parts.items():
        ms = percentiles(part.ms)["p50"]
        new_records += [
            row(name, "time", "ms", part.ms),
            row(name, "share of the step", "%", [100 * ms / step]),
        ]
        if part.gflop:
            new_records += [
                row(name, "workload", "GFLOP", [part.gflop]),
                row(name, "rate", "GFLOP/s", [1e3 * part.gflop / ms]),
            ]
    rest = step - explained
    return [
        *new_records,
        row("unexplained rest", "time", "ms", [rest]),
        row("unexplained rest", "share of the step", "%", [100 * rest / step]),
        row("whole step", "time", "ms", step_ms),
        row("whole step", "share of the step", "%", [100.0]),
        row("whole step", "workload", "GFLOP", [gflop]),
        row("whole step", "rate", "GFLOP/s", [1e3 * gflop / step]),
        row("whole step", "share of the roofline", "%", [100 * bound / step]),
    ]


def run(options: argparse.Namespace) -> list[Record]:
    """Time the step, its parts, and the step again."""
    workload = WORKLOADS[options.workload]
    base = load(workload, options.model, options.seed)
    dtype = activation_dtype(base)
    rows = TokenRows.random(
        options.batch_size or workload.batch_size,
        options.length or workload.length,
        base.vocab_size,
        options.seed,
    )
    adapters = Adapters.random(base, options.rank, SCALE, options.seed)
    path = options.matmul_path or workload.matmul_paths[-1]
    # parts are measured one at a time, and the roofline is that of one thread
    ours = Ours(lambda: base, adapters, path)
    batch = rows.for_ours()

    def steps() -> list[float]:
        ours.step(batch)
        return [ours.step(batch)[0] for _ in range(options.repeats)]

    step_ms = steps()
    profile = Profile(ours, rows, options.rank, options.repeats).measure()
    step_ms += steps()
    count, width = rows.tokens.shape
    about = {
        "task": f"profile {base_name(options.workload, options.model)}",
        "shape": f"{ours_name(path, 'none')}, {count} x {width - 1}, {rows.targets} targets, "
        f"rank {options.rank}",
        "dtype": dtype,
    }
    return records(profile, step_ms, about, options.repeats)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.profile", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--workload", choices=WORKLOADS, default="tiny", help="base and batch [tiny]"
    )
    parser.add_argument(
        "--model", default=TINY, help="another checkpoint in place of the tiny base"
    )
    parser.add_argument("--matmul-path", choices=MATMUL_PATHS, help="[the workload's last]")
    parser.add_argument("--batch-size", type=int, metavar="N", help="rows [the workload's]")
    parser.add_argument("--length", type=int, metavar="N", help="tokens of a row [the workload's]")
    parser.add_argument("--rank", type=int, default=8, metavar="N", help="of the adapters [8]")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="of each part [5]")
    parser.add_argument("--seed", type=int, default=0)
    history.add_option(parser)
    options = parser.parse_args(arguments)
    try:
        new_records = run(options)
    except PackError as error:
        print(f"benchmarks: {error.message}", file=sys.stderr)
        return 2
    history.append(new_records, options.history)
    print(report.render(new_records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
