"""The adapters that a run would attach to a base, planned from the shapes of its weights."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from mlx.utils import tree_flatten

from ..adapters.targets import plan_specs
from ..adapters.trainable import find_method
from ..bases.shapes import Geometry, Group, check_num_layers, is_named
from ..bases.vision_families import PROJECTOR, is_of_projector
from ..config.choices import POLICIES
from ..config.lora import LoRAConfig
from ..config.schema import TrainConfig
from ..errors import PackError, did_you_mean
from ..optim import make_optimizer
from ..runtime import mx
from .headers import Tensors
from .plan import MemoryPlan, accumulates, moment_parts, recompute_policies

UPDATED_AT_ONCE = 3  # arrays of the size of the largest trainable weight


@dataclass(frozen=True)
class PlannedAdapters:
    """The adapters that a run would attach, with the shapes of their parameters."""

    # By projection of each block with a backward pass, the first adapted one and those above it:
    ranks: list[dict[str, int]]
    kept: list[dict[str, int]]  # numbers per token that an adapter keeps for the backward pass
    shapes: list[tuple[int, ...]]  # of all trainable parameters
    saved: tuple[tuple[int, ...], ...] = ()  # of these, those of modules that are saved in full
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
        if accumulates(train) or POLICIES[recompute_policies(train)[0]].blocks:
            return 4 * self.weights
        return 4 * sum(map(math.prod, self.saved))

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


@dataclass(frozen=True)
class Places:
    """Where a base can be trained, by path."""

    # (out, in) of the linear layers in blocks, in the order of the model. The third name of a path
    # is the number of its block.
    projections: Mapping[str, tuple[int, int]]
    blocks: int  # how many the base has
    # (rows, width) of the table, if an adapter on it can be planned
    embedding: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    # the same of a head of its own; without one the table is the head
    head: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    # (out, in) of the linear layers of a projector of images that is part of the model
    projector: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    # shapes of the weights of every module that can be saved in full
    modules: Mapping[str, list[tuple[int, ...]]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        projections: Mapping[str, tuple[int, int]],
        modules: Mapping[str, tuple[int, int]],
        blocks: int,
        tensors: Tensors,
    ) -> "Places":
        """Return the places of a decoder; ``tensors`` has the shapes of its norms and biases."""
        weights: dict[str, list[tuple[int, ...]]] = {p: [s] for p, s in modules.items()}
        for name, tensor in tensors.items():
            path, _, parameter = name.rpartition(".")
            shape = tensor["shape"]
            if len(shape) == 1 and parameter in ("weight", "bias"):
                weights.setdefault(path, []).append(tuple(shape))

        projector = {p: s for p, s in modules.items() if is_of_projector(p)}
        outside = {p: s for p, s in modules.items() if p not in {**projections, **projector}}
        head = {p: s for p, s in outside.items() if p.rpartition(".")[2] == "lm_head"}
        embedding = {p: s for p, s in outside.items() if p not in head}
        return cls(projections, blocks, embedding, head, projector, weights)


def plan_adapters(places: Places, lora: LoRAConfig, method: str = "lora") -> PlannedAdapters:
    """Return the adapters of a base, by the rules of `geometry.select_targets`.

    Raises a PackError where there is no such projection, or not so many blocks.
    """
    blocks = places.blocks
    projections = places.projections
    check_num_layers(lora.num_layers, blocks)
    first = blocks - lora.num_layers if lora.num_layers > 0 else 0
    inside = [path for path in projections if _block_of(path) >= first]
    everywhere = {**projections, **places.head, **places.embedding, **places.projector}

    saved = _named(places.modules, lora.modules_to_save, "--modules-to-save")
    selected = set(inside) - saved if not lora.target_modules else set()
    for target in lora.target_modules:
        matched = {p for p in inside if is_named(p, target)}
        if target == PROJECTOR:
            matched = set(places.projector)
        if not matched:
            rest = [p for p in everywhere if p not in projections or p == target]
            matched = _named(rest, [target], "--target-modules", everywhere)
        selected |= matched

    groups = [
        _group(p, *shape, p in places.embedding) for p, shape in everywhere.items() if p in selected
    ]
    specs = plan_specs(groups, lora)
    of_method = find_method(method)

    ranks: list[dict[str, int]] = [{} for _ in range(blocks)]
    kept: list[dict[str, int]] = [{} for _ in range(blocks)]
    trained = {*saved, *(path for path, spec in specs.items() if spec.rank)}
    for path in projections:
        if path not in trained:
            continue
        block = _block_of(path)
        name = path.split(".", 3)[3]
        spec = specs.get(path)
        if spec is None:  # saved in full
            ranks[block][name] = kept[block][name] = 0
        else:
            ranks[block][name] = spec.rank
            kept[block][name] = of_method.kept_numbers(spec)

    in_block = [_block_of(path) for path in trained if ".layers." in path or ".layer." in path]
    lowest = min(in_block, default=blocks - 1)
    if trained & {*places.embedding, *places.projector}:
        lowest = 0
    shapes = tuple(shape for path in saved for shape in places.modules[path])

    return PlannedAdapters(
        ranks[lowest:],
        kept[lowest:],
        [*of_method.adapter_shapes(specs), *shapes],
        saved=shapes,
        head=bool(trained & set(places.head or places.embedding)),
    )


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


def _block_of(path: str) -> int:
    return int(path.split(".")[2])


def _group(path: str, out: int, width: int, embeds: bool = False) -> Group:
    """Return a projection group of one dense linear layer or embedding; a table is transposed."""
    name = path.rpartition(".")[2]
    if embeds:
        out, width = width, out

    geometry = Geometry(
        path,
        in_features=width,
        out_features=out,
        bits=None,
        group_size=None,
        mode=None,
        stored_width=width,
        bias=False,
        slices=((name, out),),
        embeds=embeds,
    )
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
