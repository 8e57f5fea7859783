"""`packs plan`: the ways of training that fit into a memory, the best first, and the next command.

Concessions to fit, the least harmful first: examples of a batch (gradients can be accumulated),
time (recomputed blocks), length of examples, rank. Ways are compared by the same scale from its
other end, with the precision of the base between quality (rank, length) and cost.
"""

import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from .. import runtime
from ..bases.precision import ComputeDtype, activation_bytes, choose_compute_dtype
from ..bases.supported import check_task, tasks_of
from ..bases.weight_formats import named_format
from ..config.choices import ARCHITECTURES, MATMUL_PATHS, POLICIES, TASKS, architecture_of
from ..config.fields import fields_where
from ..config.lora import LoRAConfig
from ..config.recipe import ADAPTER_SETTINGS, Recipe
from ..config.schema import TrainConfig
from ..display import size
from ..errors import PackError
from .estimate import (
    LEAST_RANK,
    SHORTEST,
    estimate,
    matmul_paths,
    plan_disk,
)
from .headers import Headers
from .plan import (
    ERROR,
    MemoryPlan,
    has_score_head,
    recompute_policies,
    unquantized,
    verdict,
)
from .read import estimator_of
from .row_shapes import ShapesOf
from .run_time import EpochOf, RunTime, predict_run
from .step_time import StepTime, predict, slow_in_place

SMALL_WEIGHTS = 1e9  # a base of fewer weights is better left unquantized, if that fits
_SMALL = "small base: full precision fits, quantizing would cost accuracy for memory not needed"
_METHODS = {True: ("lora-fp32", "lora", "qlora"), False: ("lora", "lora-fp32", "qlora")}  # if small
# Settings that are reduced until a run fits; quantize is one of the ways that are compared.
REDUCED = ("batch_size", "recompute", "max_seq_length", "rank", "quantize")
_BY_TASK = ("batch_size", "max_seq_length", "rank")  # whose defaults a task may change


@dataclass(frozen=True)
class PlanRequest:
    """A run to plan, and its limit in bytes.

    Attributes:
        specified: Names of the settings that are not reduced.
        shapes_of: The shapes of the batches for some settings; None where rows fill max_seq_length.
    """

    headers: Headers
    memory: int
    lora: LoRAConfig
    train: TrainConfig
    specified: frozenset[str]
    shapes_of: ShapesOf | None = None

    def estimate(self, lora: LoRAConfig, train: TrainConfig) -> MemoryPlan:
        """Return the plan for these settings, by the rows of the run where they are known."""
        shapes = self.shapes_of(train) if self.shapes_of else None
        return estimate(self.headers, lora, train, shapes).with_batches_together(self.memory)

    def longest(self, train: TrainConfig) -> int | None:
        """Return the tokens of a row of the longest batch; None where the rows are not known."""
        if not self.shapes_of:
            return None
        return max(self.shapes_of(train))[0]

    @property
    def in_batch(self) -> bool:
        """Whether the other examples of a batch are the negatives of each."""
        return TASKS[self.train.task].in_batch


@dataclass(frozen=True)
class PlanOption:
    """One way of training a base.

    Attributes:
        method: lora, qlora, lora-fp32, or full (the baseline).
        quantize: How the base is quantized on loading.
        fit: As of `plan.verdict`.
        why: What was reduced, and what takes most, in one line.
        changes: The settings of `REDUCED` that are not the wanted ones.
        step: How long a step takes on this device; None where that is not known.
        run: How long all steps and evaluations take.
    """

    method: str
    quantize: str
    lora: LoRAConfig
    train: TrainConfig
    plan: MemoryPlan
    fit: str
    why: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    step: StepTime | None = None
    run: RunTime | None = None
    longest: int | None = None  # tokens of a row of the longest batch, by the rows of the run

    @property
    def fits(self) -> bool:
        return self.fit == "fits"

    @property
    def kind(self) -> str:
        """The method, with the format that the base is quantized in for it, or where it stays."""
        if self.plan.offload is not None:
            return f"{self.method} on disk"
        if self.quantize == "none":
            return self.method
        return f"{self.method} {self.quantize}"

    @property
    def cells(self) -> tuple[str, ...]:
        """Method, path, rank, batch, recomputation, peak and fit, as tables show them."""
        train = self.train
        return (
            self.kind,
            self.plan.matmul_path,
            "-" if train.trains_base else str(self.lora.rank),
            f"{train.batch_size} x {self.longest or train.max_seq_length}",
            train.recomputes,
            size(self.plan.peak_bytes),
            "yes" if self.fits else self.fit,
        )

    def dtype(self, config: Mapping) -> ComputeDtype:
        train = self.train
        return choose_compute_dtype(config, train.compute_dtype, train.trains_base)

    def to_json(self) -> dict:
        """Return the option as `packs plan --json` prints it.

        Sizes of ``parts`` are in bytes; they add up to the peak. ``error`` is the share by which
        peak_gb may be off. ``step_s`` is null where it is not known; ``step_error`` is the share by
        which steps that were measured differed. ``seconds`` of the run are as of `RunTime`.
        """
        return {
            "method": self.method,
            "quantize": self.quantize,
            "matmul_path": self.plan.matmul_path,
            "rank": self.lora.rank,
            "batch_size": self.train.batch_size,
            "max_seq_length": self.train.max_seq_length,
            "planned_length": self.longest or self.train.max_seq_length,
            "recompute": self.train.recomputes,
            "optimizer": self.train.optimizer,
            "peak_gb": self.plan.peak_gb,
            "error": ERROR,
            "step_s": self.step and self.step.seconds,
            "step_error": self.step and self.step.error,
            "step_source": self.step and self.step.source,
            "seconds": self.run and self.run.to_json(),
            "fits": self.fits,
            "fit": self.fit,
            "why": self.why,
            "changes": dict(self.changes),
            "moment": self.plan.moment,
            "parts": self.plan.parts(),
            "offload": self.plan.offload and self.plan.offload.to_json(),
            "disk": plan_disk(self.plan, self.train).to_json(),
            "adapter_weights": self.plan.adapter_weights,
            "base_weights": self.plan.base_weights,
        }

    def command(
        self, model: str, configs: Sequence[str] = (), defaults: Recipe | None = None
    ) -> str:
        """Return the `packs train` whose peak this is, given what ``configs`` and defaults set.

        The matmul path is always named: left to `auto`, the run would choose, and peak, by the
        machine that it is on. Other defaults of the task are not.
        """
        words = ["packs", "train", *(w for file in configs for w in ("-c", str(file)))]
        words += ["--model", model]

        defaults = defaults or Recipe()
        before = {**vars(defaults.train), **vars(defaults.lora)}
        wanted = {**vars(self.train), **vars(self.lora)}
        unused = list(ADAPTER_SETTINGS if self.train.trains_base else ())
        if self.train.epochs is not None:
            unused.append("iters")

        named = {"matmul_path", *(_BY_TASK if wanted["task"] != before["task"] else ())}
        names = fields_where(TrainConfig, LoRAConfig, memory=True)
        others = (fields_where(TrainConfig, **{fact: True}) for fact in ("disk", "time"))
        for name in (*names, *itertools.chain(*others)):
            if name not in unused and (name in named or wanted[name] != before[name]):
                words += _flag(name, wanted[name])
        return shlex.join(words)


def _flag(name: str, value: Any) -> list[str]:
    spelling = name.replace("_", "-")
    if value is True:
        return [f"--{spelling}"]
    if value is False:
        return [f"--no-{spelling}"]

    if isinstance(value, Mapping):
        value = tuple(f"{key}={number}" for key, number in value.items())
    if isinstance(value, tuple):
        value = ",".join(value)
    return [f"--{spelling}", str(value)]


def recommend(
    headers: Headers,
    memory: int,
    lora: LoRAConfig | None = None,
    train: TrainConfig | None = None,
    specified: frozenset[str] = frozenset(),
    shapes_of: ShapesOf | None = None,
    epoch_of: EpochOf | None = None,
) -> list[PlanOption]:
    """Return ways of training a base within ``memory`` bytes, the best first.

    Settings that are not ``specified`` are reduced until it fits, in this order: batch_size,
    recompute, max_seq_length, rank; of matmul_path and quantize all are tried. Without
    ``shapes_of`` every row has max_seq_length tokens; ``epoch_of`` is for the time of the run.
    """
    if memory <= 0:
        raise PackError(f"--memory {memory / 1e9:g}: must be above 0 GB.")

    estimator = estimator_of(headers.config)
    train = _with_task(headers, train or TrainConfig())
    train = headers.as_loaded(estimator.run_settings(headers, train))
    headers.check_quantize(train)
    request = PlanRequest(headers, memory, lora or LoRAConfig(), train, specified, shapes_of)
    if train.trains_base:
        return [_full_option(request)]

    options = [_option(request, *way) for way in _ways(request)]
    as_wanted = request.lora.rank, request.train.max_seq_length
    if not any(o.fits and (o.lora.rank, o.train.max_seq_length) == as_wanted for o in options):
        nothing_fits = all(option.fit == "no" for option in options)
        offloaded = _offloaded_options(request)
        options += [option for option in offloaded if nothing_fits or option.fit != "no"]
    small = options[0].plan.base_weights < SMALL_WEIGHTS
    options.sort(key=lambda option: _harm(option, headers, small))

    best = options[0]
    if small and best.method == "lora-fp32" and best.fits and not headers.is_quantized:
        options[0] = replace(best, why=f"{_SMALL}; {best.why}")

    if not has_score_head(train):
        with suppress(PackError):  # full fine-tuning of a mixture of experts has no plan
            options.append(_full_option(replace(request, lora=best.lora, train=best.train)))

    return [
        replace(
            option,
            step=predict(headers, option.lora, option.train),
            run=predict_run(
                headers, option.lora, option.train, epoch_of and epoch_of(option.train)
            ),
            longest=request.longest(option.train),
        )
        for option in options
    ]


def smallest_change(options: Sequence[PlanOption]) -> PlanOption:
    """Return the option that fits with the fewest changes; one that does not, if none fits."""
    trained = [option for option in options if not option.train.trains_base]
    return min(trained or options, key=lambda option: (option.fit == "no", len(option.changes)))


def _offloaded_options(request: PlanRequest) -> list[PlanOption]:
    """Return the options with the base on disk; none if that was decided already."""
    if request.train.offload_base != "auto" or request.train.quantize != "none":
        return []
    try:
        train = replace(request.train, offload_base="on")
    except PackError:  # it cannot be combined with another setting
        return []

    offloaded = replace(request, train=train)
    options = [_option(offloaded, *way) for way in _ways(offloaded)]
    return [option for option in options if option.plan.offload is not None]


def _with_task(headers: Headers, train: TrainConfig) -> TrainConfig:
    model_type = headers.config.get("model_type")
    if train.changed(["task"]):
        check_task(train.task, headers.name, model_type)
        return train
    return replace(train, task=tasks_of(model_type)[0])


def _harm(option: PlanOption, headers: Headers, small: bool) -> tuple:
    """Return the sort key of an option, worse options last, the most important part first."""
    if option.fit == "no":
        return 2, option.plan.peak_bytes

    path = option.plan.matmul_path
    train = option.train
    path_rank = list(reversed(MATMUL_PATHS)).index(path)  # 0 for dense
    if not runtime.on_cpu():
        path_rank = -path_rank

    return (
        option.fit == "tight",
        -option.lora.rank,
        -train.max_seq_length,
        # MLX's quantized products on a CPU take ten times as long as dense ones
        # (README, "Measured")
        MATMUL_PATHS[path].in_place and slow_in_place(headers, train) != "",
        _METHODS[small].index(option.method),
        -train.batch_size,
        list(POLICIES).index(train.recomputes),
        path_rank,
        option.quantize != "nf4",
    )


def _ways(request: PlanRequest) -> list[tuple[str, TrainConfig]]:
    """Return the methods that are compared, with their settings."""
    headers = request.headers
    train = request.train
    if not ARCHITECTURES[architecture_of(headers.config.get("model_type"))].quantizable:
        return [("lora-fp32", replace(train, matmul_path="dense"))]
    if headers.is_quantized:
        paths = matmul_paths(headers, train)
        return [("qlora", replace(train, matmul_path=path)) for path in paths]

    formats = ["none", "nf4", "affine4"]
    # weights on disk are read as they are stored
    if "quantize" in request.specified or train.quantize != "none" or train.offloads:
        formats = [train.quantize]

    ways = []
    for quantize in formats:
        if quantize != "none":
            quantized = replace(train, quantize=quantize)
            # other formats have one quantized path; those of MLX are slow on that of a CPU
            if train.matmul_path == "auto":
                in_place = named_format(quantize).native and not slow_in_place(headers, quantized)
                path = "quantized" if in_place else "transient"
                quantized = replace(quantized, matmul_path=path)
            ways.append(("qlora", quantized))
            continue

        dense = replace(train, matmul_path="dense")
        half = activation_bytes(headers.config, train.compute_dtype) == 2
        if half:
            ways.append(("lora", dense))
        if train.compute_dtype == "auto":
            ways.append(("lora-fp32", replace(dense, compute_dtype="float32")))
        elif not half:
            ways.append(("lora-fp32", dense))
    return ways


def _option(request: PlanRequest, method: str, train: TrainConfig) -> PlanOption:
    """Return the option that is reduced least and fits this way, else the smallest one."""
    quantize = "none" if request.headers.is_quantized else train.quantize
    tried: list[PlanOption] = []
    for changes, rank in _smaller_settings(request):
        smaller = replace(train, **changes)
        lora = replace(request.lora, rank=rank)
        plan = request.estimate(lora, smaller)
        fitting = verdict(plan, request.memory)
        option = PlanOption(method, quantize, lora, smaller, plan, fitting, "")
        if option.fits:
            return _described(request, option)
        tried.append(option)

    # a smaller rank frees little: it goes only where nothing else is tight
    best = min(
        tried,
        key=lambda o: (o.fit == "no", o.fit == "tight" and -o.lora.rank, o.plan.peak_bytes),
    )
    return _described(request, best)


def _described(request: PlanRequest, option: PlanOption) -> PlanOption:
    """Return an option with what was reduced for it."""
    asked = {**vars(request.lora), **vars(request.train), "recompute": request.train.recomputes}
    has = {**vars(option.lora), **vars(option.train), "recompute": option.train.recomputes}
    changes = {name: has[name] for name in REDUCED if asked[name] not in ("auto", has[name])}
    return replace(option, why=_why(request, option), changes=changes)


def _smaller_settings(request: PlanRequest) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield settings of the run and the rank, the least reduced first."""
    train = request.train
    rank = request.lora.rank
    longest = request.headers.config.get("max_position_embeddings") or train.max_seq_length

    ranks = [rank, *(r for r in (8, LEAST_RANK) if r < rank)]
    lengths = _halved(min(train.max_seq_length, longest), SHORTEST)
    batches = _halved(train.batch_size, 2 if request.in_batch else 1)
    if "rank" in request.specified:
        ranks = [rank]
    if "max_seq_length" in request.specified:
        lengths = [train.max_seq_length]
    if "batch_size" in request.specified:
        batches = [train.batch_size]

    steps = [(policy, batch) for policy in recompute_policies(train) for batch in batches]
    if request.in_batch:  # examples are each other's negatives: rather recompute
        steps.sort(key=lambda step: -step[1])

    for rank, length, (policy, batch) in itertools.product(ranks, lengths, steps):
        yield {"batch_size": batch, "max_seq_length": length, "recompute": policy}, rank


def _halved(largest: int, least: int) -> list[int]:
    sizes = [largest]
    while sizes[-1] // 2 >= least:
        sizes.append(sizes[-1] // 2)
    return sizes


def _why(request: PlanRequest, option: PlanOption) -> str:
    train = option.train
    wanted = request.train
    reductions = []
    for name, before, after in (
        ("rank", request.lora.rank, option.lora.rank),
        ("length", wanted.max_seq_length, train.max_seq_length),
        ("batch", wanted.batch_size, train.batch_size),
    ):
        if after != before:
            reductions.append(f"{name} {after} instead of {before}")

    if train.recomputes != wanted.recomputes:
        if text := POLICIES[train.recomputes].described:
            reductions.append(text)
    reduced = ", ".join(reductions)

    name, largest = max(option.plan.parts().items(), key=lambda item: item[1])
    share = f"{name} {size(largest)} is the largest part"

    if option.fit == "no":
        smaller = f" with {reduced}" if reduced else ""
        return f"does not fit{smaller}: {share}"

    why = f"{reduced}; {share}" if reduced else share
    if option.fits:
        return why
    return f"tight, {ERROR:.0%} more would not fit: {why}"


def _full_option(request: PlanRequest) -> PlanOption:
    """Return full fine-tuning, the baseline: the least that it takes at the length wanted.

    Weights, gradients and both moments of AdamW are in float32 beside the base, with float32
    activations of the smallest batch with recomputed blocks, unless specified otherwise. The
    examples of an encoder's batch are each other's negatives: its batch is the one wanted.
    """
    wanted = request.train
    specified = request.specified
    changes: dict[str, Any] = {}
    if not request.in_batch and "batch_size" not in specified:
        changes["batch_size"] = 1
    if "recompute" not in specified:
        changes |= {"recompute": "block", "grad_checkpoint": False}

    train = unquantized(
        wanted,
        method="full",
        matmul_path="dense",
        compute_dtype="auto",
        cache_frozen="off",
        offload_base="off",
        train_fp16_fallback=False,
        loraplus_lr_ratio=TrainConfig.loraplus_lr_ratio,
        **changes,
    )

    layers = LoRAConfig(num_layers=request.lora.num_layers)
    plan = request.estimate(layers, train)

    each = (4 * 2 * plan.adapter_weights + plan.optimizer) / plan.adapter_weights
    why = (
        f"the baseline: {each:.3g} bytes per trainable weight (float32 weights, "
        f"gradients, {train.optimizer}), and float32 activations of batch {train.batch_size}"
    )

    return PlanOption("full", "none", layers, train, plan, verdict(plan, request.memory), why)
