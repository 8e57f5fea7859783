"""The settings of a run that all tasks have."""

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from ..errors import any_of
from .choices import AUTO_ON_OFF, MATMUL_PATHS, METHODS, POLICIES, TASKS, WEIGHT_FORMATS
from .fields import Fault, Settings, facts_of, option

# Of the tokens that are trained on: two evaluations then cost about as much of a run
HELD_OUT_SHARE = 0.05
LEAST_HELD_OUT = 32  # examples, of a short run too
MOST_HELD_OUT = 400  # which give two digits: a share of right answers to 2.5 points

_data = partial(option, section="Model and data")
_optimization = partial(option, section="Optimization")
_schedule = partial(_optimization, phase=True, own_layers="optimizer")
_step = partial(_optimization, own_layers="step")
_memory = partial(option, section="Memory and speed")
_evaluation = partial(option, section="Evaluation and gates", resumable=True)
_gate = partial(_evaluation, above=0)
_output = partial(option, section="Output")
_kept = partial(_output, resumable=True, disk=True)
_machines = partial(option, section="Several machines", resumable=True)


def described_tasks() -> list[str]:
    """Return what tasks train in words, each with the names of those that train the same."""
    tasks: dict[str, list[str]] = {}
    for name, facts in TASKS.items():
        tasks.setdefault(facts.described, []).append(name)

    return [f"{what} ({', '.join(names)})" for what, names in tasks.items()]


@dataclass(frozen=True, repr=False, kw_only=True)
class CommonConfig(Settings):
    """Settings that all tasks have; ``iters`` counts batches, as in mlx-lm."""

    task: str = _data(
        "lm",
        f"What to train: {any_of(described_tasks())}.",
        choices=TASKS,
        memory=True,
        phase=True,
    )
    method: str = option(
        "lora",
        "Train adapters, or all weights in float32 (full): LoRA; adapters with "
        "magnitudes (dora); adapters that start from the top singular vectors of the weights "
        "(pissa), from columns of their QR (olora), or from the quantization error (loftq).",
        section="Adapter",
        choices=METHODS,
        memory=True,
    )
    iters: int = _schedule(600, "Batches to train on.", at_least=1, resumable=True, disk=True)
    epochs: float | None = _optimization(
        None,
        "Train on all examples this many times, instead of --iters.",
        metavar="N",
        time=True,
        above=0,
        at_most=10_000,
        resumable=True,
    )
    batch_size: int = _optimization(4, "Examples per batch.", at_least=1, memory=True)
    max_seq_length: int = _data(
        2048,
        "Maximum number of tokens per example; longer examples are truncated.",
        at_least=2,
        memory=True,
    )
    grad_accumulation_steps: int = _step(
        1, "Batches per update, weighted by their target tokens.", at_least=1, memory=True
    )
    seed: int = _step(
        0,
        "Random seed: of the adapters, the order of examples and dropout.",
        at_least=0,
        below=2**32,
    )
    quantize: str = _memory(
        "none",
        "Quantize the base model while loading it.",
        choices=("none", *WEIGHT_FORMATS),
        memory=True,
        dense=("none",),
    )
    grad_checkpoint: bool = _memory(
        False,
        "Recompute activations, which saves memory; same as --recompute block, as in mlx-lm.",
        memory=True,
        resumable="without-dropout",
    )
    patience: int | None = _evaluation(
        None,
        "End after N validations without a better one; implies --load-best.",
        metavar="N",
        at_least=1,
    )
    steps_per_eval: int = _evaluation(
        200, "Batches between evaluations on the validation examples.", at_least=1, disk=True
    )
    save_every: int = _kept(100, "Batches between checkpoints in the run folder.", at_least=1)
    time: str | int | float | None = _optimization(
        None,
        "End after this time (6h, 90m, 30s) and write the pack; --resume continues. The learning "
        "rate follows --iters.",
        metavar="TIME",
        time=True,
        resumable=True,
    )
    max_grad_norm: float | None = _step(
        1.0,
        "Clip gradients to this global norm; 0 disables clipping.",
        metavar="NORM",
        at_least=0,
        at_most=float("inf"),
    )
    on_nan: str = _optimization(
        "stop",
        "What to do when a loss or gradient is not finite: stop the run, or skip that update (10 "
        "in a row at most). The examples are recorded in metrics.jsonl of the run folder.",
        choices=("stop", "skip"),
        resumable=True,
    )
    recompute: str = _memory(
        "auto",
        "Activation checkpointing: none, selective (cheap operations) or block (least memory, most "
        "time); auto uses the first that fits into memory.",
        choices=("auto", *POLICIES),
        memory=True,
        resumable="without-dropout",
    )
    offload_base: str = _memory(
        "auto",
        "Leave the transformer blocks of the base on disk and read each whenever it is computed; "
        "auto does so if the base does not fit into memory otherwise. The micro-batches of an "
        "update read a block together where memory has room for it.",
        choices=AUTO_ON_OFF,
        memory=True,
        resumable="without-dropout",
    )
    micro_batches: int = _memory(
        1,
        "Split each batch into N pieces. The update is the same up to rounding (with dropout, the "
        "masks differ) and needs less memory, which the plan does not count.",
        at_least=1,
        resumable=True,
    )
    cache_frozen: str = _memory(
        "auto",
        "Compute the blocks below the trained ones once per example and cache their output; auto "
        "does so if it saves time.",
        choices=AUTO_ON_OFF,
        resumable=True,
        dense=("auto", "off"),
    )
    matmul_path: str = _memory(
        "auto",
        "How frozen weights are used: quantized, dequantized on the fly (transient), or "
        "dequantized once (dense); auto measures them, for 2 s at most, and remembers the fastest.",
        choices=("auto", *MATMUL_PATHS),
        memory=True,
        resumable=True,
        dense=("auto", "dense"),
    )
    double_quant: bool = _memory(
        True, "Double quantization: store the scales of NF4 in 8 bits.", memory=True
    )
    keep: tuple[str, ...] = _memory(
        (),
        "Modules to leave dense when quantizing: names or paths, separated by commas.",
        memory=True,
    )
    compute_dtype: str = _memory(
        "auto",
        "Dtype of activations; auto is the stored one, or float16 where the chip has no native "
        "bfloat16 (M1, M2). With float16 the loss is scaled, and a run that overflows continues "
        "in bfloat16. A CPU always computes in float32.",
        choices=("auto", "bfloat16", "float16", "float32"),
        memory=True,
        dense=("auto", "float32"),
    )
    train_fp16_fallback: bool = _memory(
        False,
        "Dequantize to float16 only the modules whose geometry cannot be probed.",
        dense=(False,),
    )
    steps_per_report: int = _output(10, "Batches between log lines.", at_least=1, resumable=True)
    val_batches: int = _evaluation(
        25,
        "Validation batches per evaluation; -1 uses all, 0 none.",
        at_least=0,
        or_all=True,
        disk=True,
    )
    load_best: bool = _evaluation(
        False,
        "End with the weights that had the least validation loss (with --task grpo the highest "
        "reward) instead of the last ones; the last ones are validated too.",
    )
    best: str | None = _evaluation(
        None,
        "The number by which --load-best and --patience compare validations: valid_accuracy (of "
        "tokens), valid_exact (answers that are right, generated for at most 100 validation "
        "examples), or another one that metrics.jsonl has. The default is the loss, with --task "
        "grpo the reward.",
        metavar="NUMBER",
    )
    test_batches: int | None = _evaluation(
        None,
        "Number of held-out batches to evaluate without and with the pack; -1 uses all. The "
        "default is a random sample of at most 400 examples, whose evaluation takes about 5 % of "
        "the run.",
        metavar="N",
        shown_default="a sample",
        time=True,
        at_least=1,
        or_all=True,
    )
    keep_last: int = _kept(
        3,
        "Keep the last N checkpoints, and the one with the best validation; -1 keeps all.",
        at_least=1,
        or_all=True,
    )
    clear_cache_threshold: int | None = _memory(
        None,
        "Clear MLX's buffer cache between steps when it exceeds SIZE (2GB, 500M); a SIZE above the "
        "run's own limit raises that limit.",
        metavar="SIZE",
        at_least=0,
        resumable=True,
    )
    pack_dtype: str = _kept(
        "float32",
        "Dtype of the adapters in the pack; the final evaluation uses it too.",
        choices=("float32", "bfloat16", "float16"),
    )
    awake: bool = _output(
        True,
        "Keep a Mac awake during the run; its display may sleep. Other systems ignore this.",
        resumable=True,
    )
    max_pack_mb: float | None = _gate(
        None, "Gate: exit with code 1 if the pack is larger than MB megabytes.", metavar="MB"
    )
    exchange_dtype: str = _machines(
        "float32",
        "Dtype in which several machines exchange gradients; half precision halves the traffic.",
        choices=("float32", "bfloat16", "float16"),
    )
    pipeline: bool = _machines(
        False,
        "Split the blocks of the base over the machines of --hosts, for a base that one cannot "
        "hold; the pieces of --micro-batches pass from machine to machine.",
    )
    task_config: dict = _data(
        {},
        "Settings of a task that an installed package adds, by their names.",
        flags=(),
        metavar="MAPPING",
    )

    @property
    def trains_base(self) -> bool:
        """Whether the method trains the base's own weights."""
        return self.method in METHODS and METHODS[self.method].trains_base

    @property
    def recomputes(self) -> str:
        """The policy of activation checkpointing, whichever of its settings names it."""
        if self.grad_checkpoint or (self.offloads and self.recompute == "auto"):
            return "block"
        return self.recompute

    @property
    def offloads(self) -> bool:
        """Whether the blocks of the base are on disk; ``auto`` is resolved before a run."""
        return self.offload_base == "on"

    @property
    def has_magnitudes(self) -> bool:
        """Whether the method trains a magnitude for every output of an adapted projection."""
        return self.method in METHODS and METHODS[self.method].magnitudes

    @property
    def seconds(self) -> float | None:
        """The maximum training time in seconds; None without a limit."""
        return None if self.time is None else seconds_of(self.time)

    @property
    def picks_best(self) -> bool:
        """Whether the run ends with the weights of the best validation."""
        return self.load_best or self.patience is not None

    def unfit_for_dense(self) -> list[str]:
        """Return the settings that do not fit a base whose weights are dense in float32."""
        return [
            field.name
            for field in dataclasses.fields(self)
            if (fit := facts_of(field).dense) and getattr(self, field.name) not in fit
        ]

    def _conflicts(self) -> Iterator[Fault]:
        if self.grad_checkpoint and self.recompute == "none":
            yield Fault("grad_checkpoint", "means --recompute block, but that is none.", "conflict")
        if not self.double_quant and self.quantize != "nf4":
            text = f"can be off only with --quantize nf4, but that is {self.quantize}."
            yield Fault("double_quant", text, "conflict")
        if self.keep and self.quantize == "none":
            yield Fault("keep", "needs --quantize.", "conflict")

        if (named := self.changed(("load_best", "patience"))) and not self.val_batches:
            yield Fault(named[0], "needs validation, but --val-batches is 0.", "conflict")
        if self.best is not None and not self.picks_best:
            yield Fault("best", "has no effect without --load-best or --patience.", "conflict")
        if self.time is not None and not seconds_of(self.time):
            yield Fault("time", f"must be a time such as 6h, 90m or 30s, but is {self.time!r}.")


def seconds_of(time: str | float) -> float | None:
    """Return the seconds of a time above 0 (``6h``, ``1.5h``, ``45``), or None if it is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([hms]?)", str(time).replace(" ", "").lower())
    if match is None:
        return None
    return float(match[1]) * {"h": 3600, "m": 60}.get(match[2], 1) or None
