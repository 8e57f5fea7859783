"""Run configuration: settings of adapters, training and data, as frozen dataclasses.

Command line, checks and error messages are made from the facts at each field (`Facts`).
"""

from dataclasses import dataclass
from functools import partial

from ..gates import MEANING
from .choices import (
    ANSWER_METRICS,
    DECODER_TASKS,
    MATMUL_PATHS,
    METHODS,
    OBJECTIVES,
    PACKABLE_TASKS,
    POLICIES,
    TASKS,
    WEIGHT_FORMATS,
)
from .conflicts import seconds_of
from .data import COLUMN_SETTINGS as COLUMN_SETTINGS
from .data import DataConfig as DataConfig
from .fields import option
from .lora import LoRAConfig as LoRAConfig
from .optimizer import OptimizerSettings
from .phase import Phase as Phase

_data = partial(option, section="Model and data")
_text = partial(_data, tasks=("lm",))
_share = partial(_text, metavar="SHARE", at_least=0, at_most=1)
_optimization = partial(option, section="Optimization")
_schedule = partial(_optimization, phase=True, own_layers="optimizer")
_step = partial(_optimization, own_layers="step")
_memory = partial(option, section="Memory and speed")
_evaluation = partial(option, section="Evaluation and gates", resumable=True)
_gate = partial(_evaluation, above=0)
_output = partial(option, section="Output")
_kept = partial(_output, resumable=True, disk=True)


@dataclass(frozen=True, repr=False)
class TrainConfig(OptimizerSettings):
    """Settings of the training; ``iters`` counts batches, as in mlx-lm."""

    method: str = option(
        "lora",
        "Train LoRA adapters; adapters with magnitudes (dora); adapters that begin with the principal "
        "part of the weights (pissa), with columns of their QR (olora), or with what quantization "
        "lost (loftq); or all weights of the base model in float32 (full).",
        section="Adapter",
        choices=tuple(METHODS),
        memory=True,
        common="Train LoRA adapters, another kind of adapters, or all weights (full).",
    )
    for_merge: str = option(
        "none",
        "Train for packs merge --requantize FORMAT: the last fifth of the run, and the pack, round the "
        "adapted weights as that merge does, so that merging loses nothing.",
        section="Adapter",
        choices=("none", *WEIGHT_FORMATS),
        memory=True,
        tasks=("lm",),
    )
    iters: int = _schedule(
        600, "Batches to train on.", at_least=1, resumable=True, disk=True, common=True
    )
    batch_size: int = _optimization(
        4,
        "Examples per batch.",
        shown_default="4; 32 with --task embedding",
        at_least=1,
        memory=True,
        common=True,
    )
    max_seq_length: int = _data(
        2048,
        "Maximum number of tokens per example; longer examples are truncated.",
        at_least=2,
        memory=True,
        common="Maximum number of tokens per example.",
    )
    long_rows: str = _text(
        "cut",
        "Texts over --max-seq-length: truncate them, or split them into several examples.",
        choices=("cut", "split"),
    )
    fim_rate: float = _share(
        0.0,
        "Share of the texts to train as fill-in-the-middle; the tokenizer must have tokens for it.",
    )
    fim_spm_rate: float = _share(
        0.5, "Share of the fill-in-the-middle examples with the suffix before the prefix."
    )
    fim_tokens: tuple[str, ...] = _text(
        (),
        "Tokens before prefix, suffix and middle, and optionally after the middle, separated by "
        "commas.",
        shown_default="the tokenizer's own",
        metavar="TOKENS",
    )
    num_proc: int | None = _data(
        None,
        "Most processes that tokenize data sets of files of about 16 MB or more.",
        shown_default="one per core, at most 8",
        metavar="N",
        at_least=1,
        tasks=PACKABLE_TASKS,
        resumable=True,
    )
    packing: bool = _data(
        False,
        "Pack several examples into each sequence; attention does not cross examples.",
        tasks=PACKABLE_TASKS,
        common="Pack several examples into each sequence.",
    )
    epochs: float | None = _optimization(
        None,
        "Train on all examples this many times, instead of --iters.",
        metavar="N",
        above=0,
        at_most=10_000,
        resumable=True,
        common="Passes over the examples, instead of --iters.",
    )
    time: str | int | float | None = _optimization(
        None,
        "End after this time (6h, 90m, 30s) and write the pack; --resume continues. The learning "
        "rate follows --iters.",
        metavar="TIME",
        resumable=True,
        common="End after this time (6h, 90m) and write the pack.",
    )
    grad_accumulation_steps: int = _step(
        1,
        "Batches per update, weighted by their target tokens.",
        at_least=1,
        memory=True,
        common="Batches per update.",
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
        "What to do when a loss or gradient is not finite: stop the run, skip that update (10 in a "
        "row at most), or back off to the last checkpoint with half the learning rate (3 times at "
        "most). The examples are recorded in not_finite.jsonl of the run folder.",
        choices=("stop", "skip", "back-off"),
        resumable=True,
    )
    grad_checkpoint: bool = _memory(
        False,
        "Same as --recompute block, as in mlx-lm.",
        memory=True,
        resumable="without-dropout",
        common="Recompute activations, which saves memory.",
    )
    recompute: str = _memory(
        "auto",
        "Activation checkpointing: none, selective (cheap operations) or block (least memory, most "
        "time); auto uses the first that fits into memory.",
        choices=("auto", *POLICIES),
        memory=True,
        resumable="without-dropout",
    )
    micro_batches: int = _memory(
        1,
        "Split each batch into N pieces. The update is the same up to rounding (with dropout, the "
        "masks differ) and takes less memory, which the plan does not take into account.",
        at_least=1,
        resumable=True,
    )
    cache_frozen: str = _memory(
        "auto",
        "Compute the blocks below the trained ones once per example and cache their output; auto "
        "does so if it saves time.",
        choices=("auto", "on", "off"),
        resumable=True,
        dense=("auto", "off"),
    )
    loss_on: str | None = _text(
        None,
        "Tokens to train on: all, those of the completion (the last answer), or those of every "
        "assistant message.",
        shown_default="assistant for chats, completion for prompts with completions, all for texts",
        choices=("all", "completion", "assistant"),
        common="Tokens to train on.",
    )
    objective: str = _optimization(
        "transformer",
        "Forward pass used for the loss: the full transformer, or a cheap proxy (embeddings -> "
        "attention output projections -> LM head) for comparison.",
        choices=OBJECTIVES,
        tasks=("lm",),
    )
    ce_last_k: int | None = _optimization(
        None,
        "Train only on the last K target tokens of each example.",
        metavar="K",
        at_least=1,
        tasks=("lm",),
    )
    z_loss: float = _step(
        0.0,
        "Weight of the z-loss, logsumexp(logits)^2, which keeps logits small.",
        metavar="WEIGHT",
        at_least=0,
        tasks=("lm",),
    )
    label_smoothing: float = _step(
        0.0,
        "Share of each target's probability that is spread over the vocabulary; with --task dpo or cpo, "
        "the share of preferences that are the wrong way round (below 0.5).",
        metavar="SHARE",
        at_least=0,
        below=1,
        tasks=("lm", "dpo", "cpo"),
    )
    neftune_noise_alpha: float = _optimization(
        0.0,
        "Add noise of this size to the embeddings of the tokens in training (NEFTune; 5 to 15).",
        metavar="ALPHA",
        at_least=0,
        tasks=DECODER_TASKS,
    )
    matmul_path: str = _memory(
        "auto",
        "How frozen weights are used: quantized, dequantized on the fly (transient), or dequantized "
        "once (dense); auto measures them, for 2 s at most, and remembers the fastest.",
        choices=("auto", *MATMUL_PATHS),
        memory=True,
        resumable=True,
        dense=("auto", "dense"),
    )
    quantize: str = _memory(
        "none",
        "Quantize the base model while loading it.",
        choices=("none", *WEIGHT_FORMATS),
        memory=True,
        dense=("none",),
        common="Quantize the base model while loading it.",
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
    phases: tuple[Phase, ...] = _optimization(
        (),
        "Phases to train one after the other, each with its own data and learning rate.",
        flags=(),
        tasks=DECODER_TASKS,
    )
    task: str = _data(
        "lm",
        "What to train: next-token prediction (lm), preferences (dpo, orpo, simpo, cpo; kto for rated "
        "completions), completions that a reward function likes (grpo), or sentence embeddings with an "
        "encoder.",
        choices=TASKS,
        memory=True,
        phase=True,
        common="What to train.",
    )
    seed: int = _step(
        0,
        "Random seed of the adapters, the order of examples and dropout.",
        at_least=0,
        below=2**32,
        common="Random seed.",
    )
    steps_per_report: int = _output(10, "Batches between log lines.", at_least=1, resumable=True)
    steps_per_eval: int = _evaluation(
        200, "Batches between evaluations on the validation examples.", at_least=1, disk=True
    )
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
    patience: int | None = _evaluation(
        None,
        "End after N validations without a better one; implies --load-best.",
        metavar="N",
        at_least=1,
    )
    test_batches: int | None = _evaluation(
        None,
        "Number of held-out batches to evaluate without and with the pack; -1 uses all. The default "
        "is a random sample of at most 400 examples, whose evaluation takes about 5 % of the run.",
        metavar="N",
        shown_default="a sample",
        at_least=1,
        or_all=True,
    )
    metric: str | None = _evaluation(
        None,
        "Criterion for a right answer: it is the expected text (exact), contains it (contains), "
        "or is the same JSON value (json). The share of right answers is reported before and "
        "after training, for 100 evaluated examples at most and greedy decoding.",
        shown_default="exact for the bundled data, none otherwise",
        choices=(*ANSWER_METRICS, "none"),
        tasks=("lm",),
        common="Also report the share of right answers.",
    )
    save_every: int = _kept(100, "Batches between checkpoints in the run folder.", at_least=1)
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
    max_ppl_ratio: float | None = _gate(
        None,
        "Gate: exit with code 1 if held-out perplexity with the pack is more than RATIO times that "
        "of the base model.",
        metavar="RATIO",
        tasks=("lm",),
    )
    min_tps_ratio: float | None = _gate(
        None,
        "Gate: exit with code 1 if tokens/s with the pack are less than RATIO times those of the "
        "base model.",
        metavar="RATIO",
        tasks=("lm",),
    )

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks of the run, those of its phases in their order."""
        phases = dict.fromkeys(phase.task or self.task for phase in self.phases)
        return tuple(phases) or (self.task,)

    @property
    def sequences(self) -> int:
        """The sequences of a batch; packed ones hold several examples each."""
        if self.packing:
            return self.batch_size
        facts = (TASKS[task] for task in self.tasks)
        return self.batch_size * max(
            self.num_generations if each.generates else each.sequences for each in facts
        )

    @property
    def seconds(self) -> float | None:
        """The maximum training time in seconds; None without a limit."""
        return None if self.time is None else seconds_of(self.time)

    @property
    def picks_best(self) -> bool:
        """Whether the run ends with the weights of the best validation."""
        return self.load_best or self.patience is not None

    @property
    def gates(self) -> dict[str, float | None]:
        """The limits that the pack must meet at the end of the run; None where there is none."""
        return {name: getattr(self, name) for name in MEANING}
