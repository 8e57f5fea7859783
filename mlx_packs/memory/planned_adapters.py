"""The adapters that a run would attach to a base, planned from the shapes of its weights."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from mlx.utils import tree_flatten

from ..adapters.attach import plan_specs
from ..adapters.trainable import find_method
from ..bases.geometry import Geometry, Group, check_num_layers, is_named
from ..config.choices import POLICIES
from ..config.lora import LoRAConfig
from ..config.schema import TrainConfig
from ..errors import PackError, did_you_mean
from ..optim import make_optimizer
from ..runtime import mx
from .headers import Tensors
from .plan import MemoryPlan, accumulates, moment_parts, recompute_policies

UPDATED_AT_ONCE = 3  # arrays of the size of the largest trainable weight
_BLOCK = re.compile(r"(?:^|\.)layers?\.(\d+)\.(.+)")


@dataclass(frozen=True)
class PlannedAdapters:
    """The adapters that a run would attach, with the shapes of their parameters."""

    # By projection of each block with a backward pass, the first adapted one and those above it:
    ranks: list[dict[str, int]]
    kept: list[dict[str, int]]  # numbers per token that an adapter keeps for the backward pass
    shapes: list[tuple[int, ...]]  # of all trainable parameters
    saved: tuple[tuple[int, ...], ...] = ()  # of these, modules that are saved in full
    head: bool = False  # whether the head is trained or has an adapter: then all logits are made

    def beside(self, head: tuple[int, ...]) -> "PlannedAdapters":
        return replace(self, shapes=[*self.shapes, head], saved=(*self.saved, head))

    @property
    def weights(self) -> int:
        """Number of trainable parameters."""
        return sum(map(math.prod, self.shapes))

    def waiting(self, train: TrainConfig) -> int:
        """Return the bytes of gradients that wait for the update at the worst moment."""
        # in recomputed blocks the last one is the worst, and all other gradients are there
        if POLICIES[recompute_policies(train)[0]].blocks:
            return 4 * self.weights
        return self.waiting_at_loss(train)

    def waiting_at_loss(self, train: TrainConfig) -> int:
        """Return the bytes of gradients of earlier batches, and of modules saved in full."""
        return self.accumulated(train) + 4 * sum(map(math.prod, self.saved))

    def accumulated(self, train: TrainConfig) -> int:
        if not accumulates(train):
            return 0
        return 4 * (self.weights - sum(map(math.prod, self.saved)))

    def plan(
        self,
        train: TrainConfig,
        base: int,
        base_weights: int,
        moments: Mapping[str, Mapping[str, int]],
        matmul_path: str = "dense",
    ) -> MemoryPlan:
        """Return the plan of training these adapters; ``moments`` are those before the update."""
        size = 4 * self.weights
        # every gradient is there before the first update, whose temporaries span 1.3 blocks
        adapters = size - 4 * sum(map(math.prod, self.saved))
        largest = max(map(math.prod, self.saved), default=0)
        working = max(1.3 * adapters / len(self.ranks), 4 * UPDATED_AT_ONCE * largest)
        update = moment_parts(size * (1 + accumulates(train)), working=working)

        return MemoryPlan(
            base=base,
            adapters=size,
            optimizer=optimizer_bytes(self.shapes, train),
            moments={**moments, "update": update},
            matmul_path=matmul_path,
            recompute=recompute_policies(train)[0],
            adapter_weights=self.weights,
            base_weights=base_weights,
            tensors=len(self.shapes),
        )


def plan_adapters(
    modules: Mapping[str, tuple[int, int]],
    blocks: int,
    lora: LoRAConfig,
    method: str = "lora",
    tensors: Tensors | None = None,
) -> PlannedAdapters:
    """Return the adapters of a base, by the rules of `geometry.select_targets`.

    ``modules`` are (out, in) of linear layers and (rows, width) of embeddings by path, ``blocks``
    how many the base has, ``tensors`` the headers of its norms and biases, without which no module
    is saved in full. Raises a PackError where there is no such projection, or not so many blocks.
    """
    check_num_layers(lora.num_layers, blocks)
    first = blocks - lora.num_layers if lora.num_layers > 0 else 0
    projections = {path: place for path in modules if (place := _BLOCK.search(path))}
    inside = [path for path, place in projections.items() if int(place[1]) >= first]

    outside = [path for path in modules if path not in projections]
    heads = {path for path in outside if path.rpartition(".")[2] == "lm_head"}
    tables = set(outside) - heads

    weights = _weights_of(modules, tensors)
    saved = _named(weights, lora.modules_to_save, "--modules-to-save")
    selected = set(inside) - saved if not lora.target_modules else set()
    for target in lora.target_modules:
        matched = {p for p in inside if is_named(p, target)}
        if not matched:
            rest = [p for p in modules if p not in projections or p == target]
            matched = _named(rest, [target], "--target-modules", modules)
        selected |= matched

    groups = [
        _group(path, *shape, embeds=path in tables)
        for path, shape in sorted(modules.items(), key=lambda item: item[0] in tables)
        if path in selected
    ]
    specs = plan_specs(groups, lora)
    of_method = find_method(method)

    ranks: list[dict[str, int]] = [{} for _ in range(blocks)]
    kept: list[dict[str, int]] = [{} for _ in range(blocks)]
    trained = {*saved, *(path for path, spec in specs.items() if spec.rank)}
    for path, place in projections.items():
        if path not in trained:
            continue
        block = int(place[1])
        spec = specs.get(path)
        # a module that is saved in full has no adapter
        ranks[block][place[2]] = spec.rank if spec else 0
        kept[block][place[2]] = of_method.kept_numbers(spec) if spec else 0

    places = (_BLOCK.search(path) for path in trained)
    lowest = min((int(place[1]) for place in places if place), default=blocks - 1)
    if trained & tables:
        lowest = 0
    shapes = tuple(shape for path in saved for shape in weights[path])

    return PlannedAdapters(
        ranks[lowest:],
        kept[lowest:],
        [*of_method.adapter_shapes(specs), *shapes],
        saved=shapes,
        head=bool(trained & (heads or tables)),
    )


def _weights_of(
    modules: Mapping[str, tuple[int, int]], tensors: Tensors | None
) -> dict[str, list[tuple[int, ...]]]:
    """Return the shapes of the weights of every module that can be saved in full."""
    if not tensors:
        return {}

    weights: dict[str, list[tuple[int, ...]]] = {p: [s] for p, s in modules.items()}
    for name, tensor in tensors.items():
        path, _, parameter = name.rpartition(".")
        if len(tensor["shape"]) == 1 and parameter in ("weight", "bias"):
            weights.setdefault(path, []).append(tuple(tensor["shape"]))
    return weights


def _named(
    paths: Iterable[str], names: Iterable[str], flag: str, known: Iterable[str] = ()
) -> set[str]:
    """Return the paths that have one of these names; each name must have one."""
    paths = list(paths)
    chosen = set()
    for name in names:
        matched = {path for path in paths if is_named(path, name)}
        if not matched:
            leaves = sorted({path.rpartition(".")[2] for path in (*paths, *known)})
            hint = did_you_mean(name, leaves)
            kind = "projection" if known else "module"
            raise PackError(f"{flag} {name}: no such {kind} in a plan. {hint}", "unknown")
        chosen |= matched
    return chosen


def _group(path: str, out: int, width: int, embeds: bool) -> Group:
    """Return a projection group of one dense linear layer or embedding; a table is transposed."""
    if embeds:
        out, width = width, out
    slices = ((path.rpartition(".")[2], out),)
    geometry = Geometry(path, width, out, None, None, None, width, False, slices, embeds=embeds)
    return Group(None, (geometry,))


def optimizer_bytes(trainable: Iterable[tuple[int, ...]], train: TrainConfig) -> int:
    """Return the bytes of the optimizer's state for parameters of these shapes."""
    # MLX describes its arrays, which are never computed.
    shapes = Counter(trainable)
    optimizer = make_optimizer(train)
    optimizer.init({str(shape): mx.zeros(shape) for shape in shapes})

    return sum(
        count * sum(a.nbytes for _, a in tree_flatten(optimizer.state[str(shape)]))
        for shape, count in shapes.items()
    )
