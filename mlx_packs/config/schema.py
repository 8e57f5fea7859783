"""What a run is told: frozen dataclasses, read from YAML and overridden by flags.

A field has its default and its sentence here and nowhere else; the command line, the docs and the
error messages are made from them. YAML is typed on reading (PyYAML gives ``1e-5`` as a string).
Every key of mlx-lm's ``lora_config.yaml`` is understood; `_flatten_mlx_lm` holds the renamed ones.
"""

import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import PackError, did_you_mean
from .choices import (
    DISTANCES,
    LOSSES,
    MATMUL_PATHS,
    METHODS,
    OBJECTIVES,
    OPTIMIZERS,
    POLICIES,
    TASKS,
    WEIGHT_FORMATS,
)
from .recipe import unknown_key_hint

FLAGS = "options"
SCHEDULES = ("cosine", "linear", "constant")
# settings that the peak memory of a run depends on
MEMORY_SETTINGS = (
    "batch_size max_seq_length rank matmul_path grad_checkpoint recompute quantize double_quant keep "
    "compute_dtype optimizer grad_accumulation_steps num_layers target_modules rank_pattern method "
    "task loss mini_batch_size"
).split()

EMBEDDING_SETTINGS = (
    "loss similarity_scale mini_batch_size triplet_margin triplet_distance"
).split()


def _option(default, sentence: str, choices: tuple[str, ...] = ()):
    metadata = {"help": sentence, "choices": choices}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class LoRAConfig:
    """Where low-rank adapters sit and how large they are (LoRA: https://arxiv.org/abs/2106.09685)."""

    rank: int = _option(16, "Rank of the adapters.")
    alpha: float | None = _option(
        None, "Scale of the adapters times the rank, as in PEFT: scale = alpha / rank. [2 x rank]"
    )
    dropout: float = _option(0.0, "Share of the adapter's input that is dropped in training.")
    target_modules: tuple[str, ...] = _option(
        (),
        "Projections that carry adapters, by name or path (q_proj,v_proj). "
        "[all in the blocks but routers and the experts of a mixture]",
    )
    num_layers: int = _option(-1, "Adapt only the last N blocks; -1 is all of them.")
    rank_pattern: dict[str, int] = _option(
        {},
        "Rank by module path or its end, exact or regex (v_proj=8), of a slice of a fused one too "
        "(c_attn.q=8,c_attn.v=2); a mapping in YAML.",
    )
    alpha_pattern: dict[str, float] = _option({}, "Alpha in the same way.")

    def __post_init__(self):
        checks = [
            (self.rank > 0, f"rank must be positive, but got {self.rank}."),
            (
                self.alpha is None or (math.isfinite(self.alpha) and self.alpha > 0),
                f"alpha must be positive, but got {self.alpha}.",
            ),
            (
                self.num_layers >= -1,
                f"num_layers must be positive, or -1 for all blocks, but got {self.num_layers}.",
            ),
            (0 <= self.dropout < 1, f"dropout must be in [0, 1), but got {self.dropout}."),
            (
                all(r > 0 for r in self.rank_pattern.values()),
                f"every rank of rank_pattern must be positive, but got {self.rank_pattern}.",
            ),
            (
                all(math.isfinite(a) and a > 0 for a in self.alpha_pattern.values()),
                f"every alpha of alpha_pattern must be positive, but got {self.alpha_pattern}.",
            ),
        ]
        checks += [
            (_is_regex(key), f"'{key}' in {name} must be a module path or a regular expression.")
            for name in ("rank_pattern", "alpha_pattern")
            for key in getattr(self, name)
        ]
        _raise_faults("LoRAConfig", checks)


# Settings of adapters: where no adapter learns (method full) they mean nothing.
OF_ADAPTERS = tuple(f.name for f in dataclasses.fields(LoRAConfig) if f.name != "num_layers")


@dataclass(frozen=True)
class Phase:
    """One of the ``phases`` of a run. What it does not say is as the run has it (`TrainConfig`).

    A run takes its phases one after the other, with the same adapters.
    """

    name: str | None = _option(None, "What it is called. [phase-1, phase-2, ...]")
    data: str | list | None = _option(None, "Its rows: a source as of --data, or a list of them.")
    iters: int | None = _option(None, "Batches of this phase.")
    learning_rate: float | None = _option(None, "Its peak learning rate.")
    lr_schedule: str | dict | None = _option(None, "Its schedule, which begins with the phase.")
    warmup_steps: int | None = _option(None, "Updates of its warm-up.")
    replay: float = _option(
        0.0, "Share of the rows of its batches that are those of the phases before it."
    )
    optimizer_state: str = _option(
        "carry", "Go on with the optimizer's state, or begin with a fresh one.", ("carry", "fresh")
    )

    def __post_init__(self):
        unsaid = ["as the run has it"] if self.data is None else [self.data]
        sources = self.data if isinstance(self.data, list) else unsaid
        checks = [
            (self.name is None or bool(self.name.strip()), "name must not be empty."),
            (
                self.name is None or self.name.isprintable(),
                f"name must be one line of text, but is {self.name!r}.",
            ),
            (
                bool(sources) and all(isinstance(s, str) and s for s in sources),
                f"data must be a source or a list of sources, but got {self.data!r}.",
            ),
            (
                math.isfinite(self.replay) and 0 <= self.replay <= 1,
                f"replay is a share and must be in [0, 1], but got {self.replay}.",
            ),
            (
                self.optimizer_state in ("carry", "fresh"),
                f"optimizer_state is one of carry, fresh; got '{self.optimizer_state}'.",
            ),
        ]
        _raise_faults("Phase", checks)

    @property
    def sources(self) -> tuple[str, ...]:
        """Where its rows are; empty if they are those of the run."""
        return tuple(self.data) if isinstance(self.data, list) else (self.data,) * bool(self.data)

    def to_json(self) -> dict:
        """What it says, as a recipe has it."""
        return {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        }


@dataclass(frozen=True)
class TrainConfig:
    """How a run learns. ``iters`` counts batches, as in mlx-lm."""

    method: str = _option(
        "lora", "What learns: adapters, or the base's own weights in float32 (full).", METHODS
    )
    iters: int = _option(600, "Batches to train on.")
    batch_size: int = _option(4, "Rows of a batch; with --task embedding 32 unless said.")
    max_seq_length: int = _option(2048, "Most tokens of a row; what is longer is cut.")
    long_rows: str = _option(
        "cut",
        "Of a text that is longer: its beginning, or all of it in several rows.",
        ("cut", "split"),
    )
    fim_rate: float = _option(
        0.0, "Share of the texts to learn filling in the middle from; the tokenizer must know how."
    )
    fim_spm_rate: float = _option(0.5, "Share of those whose suffix comes before their prefix.")
    fim_tokens: tuple[str, ...] = _option(
        (), "Tokens before prefix, suffix and middle (comma). [the tokenizer's own]"
    )
    packing: bool = _option(
        False, "Fill rows of the maximal length with several rows each, none seeing another."
    )
    learning_rate: float = _option(2e-4, "Peak learning rate.")
    lr_schedule: str | dict = _option(
        "cosine", "cosine, linear or constant; in YAML any schedule of mlx, as in mlx-lm."
    )
    warmup_steps: int = _option(0, "Updates over which the learning rate rises from zero.")
    optimizer: str = _option("adamw", "Optimizer.", OPTIMIZERS)
    optimizer_config: dict = _option({}, "Arguments of the optimizer, by its name, as in mlx-lm.")
    grad_accumulation_steps: int = _option(1, "Batches per update; weighted by their tokens.")
    max_grad_norm: float | None = _option(1.0, "Gradients are scaled down to this norm. 0 is off.")
    grad_checkpoint: bool = _option(False, "The same as recompute block, as in mlx-lm.")
    recompute: str = _option(
        "auto",
        "What the backward computes again instead of keeping it: nothing, what is cheap, or each "
        "block (least memory, most time); auto takes the first that fits by the plan.",
        ("auto", *POLICIES),
    )
    cache_frozen: str = _option(
        "auto",
        "Compute the blocks below the adapters once for each row and keep what they make; auto "
        "does where it pays.",
        ("auto", "on", "off"),
    )
    loss_on: str | None = _option(
        None,
        "What is learned: every token, the last answer, or all answers. "
        "[assistant for chats, completion for prompt and completion, all for text]",
        ("all", "completion", "assistant"),
    )
    objective: str = _option(
        "transformer",
        "What the loss is taken of: the base's own forward, or for comparison a bounded proxy, its "
        "embedding rows through the attention's output projections alone to the head.",
        OBJECTIVES,
    )
    ce_last_k: int | None = _option(None, "Learn only the last K target tokens of each row.")
    z_loss: float = _option(0.0, "Weight of logsumexp^2 in the loss, which keeps logits small.")
    label_smoothing: float = _option(0.0, "Share of each target that is spread over all tokens.")
    matmul_path: str = _option(
        "auto",
        "How the frozen weights are multiplied; auto measures here.",
        ("auto", *MATMUL_PATHS),
    )
    quantize: str = _option("none", "Quantize the base as it is loaded.", ("none", *WEIGHT_FORMATS))
    double_quant: bool = _option(True, "With nf4: the scales of blocks in 8 bits, too.")
    keep: tuple[str, ...] = _option((), "With --quantize: modules left dense, by name (comma).")
    compute_dtype: str = _option(
        "auto",
        "Dtype of activations; auto is as stored. A CPU computes in float32 whatever is said.",
        ("auto", "bfloat16", "float16", "float32"),
    )
    train_fp16_fallback: bool = _option(
        False, "Dequantize to fp16 just the modules whose geometry cannot be probed."
    )
    phases: tuple[Phase, ...] = _option(
        (), "Phases one after the other, with rows and learning rate of their own (YAML only)."
    )
    task: str = _option(
        "lm", "What is learned: the next token, or embeddings of sentences by an encoder.", TASKS
    )
    loss: str = _option(
        "auto",
        "With --task embedding: cosine and cosent for rows with scores, mnrl (in-batch negatives) "
        "and cached-mnrl for anchors and positives, triplet for those with negatives; auto is "
        "cosine or mnrl, as the rows are.",
        ("auto", *LOSSES),
    )
    similarity_scale: float = _option(
        20.0, "Of mnrl and cosent: cosines are multiplied by it (1 / temperature)."
    )
    mini_batch_size: int = _option(
        32, "Of cached-mnrl: texts whose activations are in memory at a time."
    )
    triplet_margin: float = _option(5.0, "Of triplet: how much farther a negative must be.")
    triplet_distance: str = _option("euclidean", "Of triplet: what is far.", DISTANCES)
    seed: int = _option(0, "Seed of adapters, order and dropout.")
    steps_per_report: int = _option(10, "Batches between lines of the log.")
    steps_per_eval: int = _option(200, "Batches between evaluations on the validation rows.")
    val_batches: int = _option(25, "Validation batches each time; -1 is all.")
    test_batches: int = _option(-1, "Held-out batches before and after; -1 is all.")
    save_every: int = _option(100, "Batches between checkpoints in the run folder.")
    clear_cache_threshold: int | None = _option(
        None,
        "Clear MLX's buffer cache between steps when it is larger than this (2GB, 500M); more than "
        "the run's own limit raises that.",
    )
    pack_dtype: str = _option(
        "float32",
        "Dtype of the adapters in the pack; what is measured at the end is what is saved.",
        ("float32", "bfloat16", "float16"),
    )
    max_pack_mb: float | None = _option(None, "Gate: exit with 1 if the pack is larger than this.")
    max_ppl_ratio: float | None = _option(
        None, "Gate: exit with 1 if held-out PPL after is above this share of PPL before."
    )
    min_tps_ratio: float | None = _option(
        None, "Gate: exit with 1 if it decodes at less than this share of the base's tokens/s."
    )

    @property
    def recomputes(self) -> str:
        """The policy of recomputation, whichever of its two options named it."""
        return "block" if self.grad_checkpoint else self.recompute

    def __post_init__(self):
        positive = (
            "iters batch_size max_seq_length grad_accumulation_steps steps_per_report "
            "steps_per_eval save_every mini_batch_size"
        ).split()
        checks = [
            (getattr(self, k) > 0, f"{k} must be positive, but got {getattr(self, k)}.")
            for k in positive
        ]
        checks += [
            (
                math.isfinite(self.learning_rate) and self.learning_rate > 0,
                f"learning_rate must be positive, but got {self.learning_rate}.",
            ),
            (self.warmup_steps >= 0, f"warmup_steps must be 0 or more, got {self.warmup_steps}."),
            (self.max_seq_length > 1, f"max_seq_length must be above 1: {self.max_seq_length}."),
            (
                self.max_grad_norm is None or self.max_grad_norm >= 0,
                f"max_grad_norm must be 0 (off) or more, but got {self.max_grad_norm}.",
            ),
            (
                self.ce_last_k is None or self.ce_last_k > 0,
                f"ce_last_k must be positive, but got {self.ce_last_k}.",
            ),
            (
                not (self.grad_checkpoint and self.recompute == "none"),
                "grad_checkpoint is recompute block, but recompute is none; say one of them.",
            ),
            (
                self.double_quant or self.quantize == "nf4",
                f"no-double-quant goes with quantize nf4, but that is {self.quantize}.",
            ),
            (
                not self.keep or self.quantize != "none",
                "keep goes with quantize, but that is none.",
            ),
            *(
                (0 <= getattr(self, k) <= 1, f"{k} must be in [0, 1], but got {getattr(self, k)}.")
                for k in ("fim_rate", "fim_spm_rate")
            ),
            (
                self.fim_rate > 0 or (not self.fim_tokens and self.fim_spm_rate == 0.5),
                "fim_tokens and fim_spm_rate go with a fim_rate above 0.",
            ),
            (
                not self.fim_rate > 0 or self.max_seq_length >= 32,
                f"fim_rate needs rows of 32 tokens or more, not {self.max_seq_length}.",
            ),
            (
                len(self.fim_tokens) in (0, 3, 4)
                and len(set(self.fim_tokens)) == len(self.fim_tokens),
                "fim_tokens must name three different tokens (prefix, suffix, middle), or a fourth "
                f"that ends the middle, but got {', '.join(self.fim_tokens)}.",
            ),
            (
                self.objective == "transformer" or self.recomputes in ("auto", "none"),
                f"recompute {self.recomputes} is of a transformer's blocks, and the objective "
                f"{self.objective} has none; leave it out.",
            ),
            (
                self.objective == "transformer" or not (self.phases or self.method == "full"),
                f"the objective {self.objective} goes with neither phases nor method full.",
            ),
            (
                self.objective == "transformer" or self.cache_frozen != "on",
                f"cache_frozen on keeps what a transformer's blocks make, and the objective "
                f"{self.objective} has none; leave it out.",
            ),
            (self.val_batches >= -1, f"val_batches must be -1 or more, got {self.val_batches}."),
            (
                self.test_batches == -1 or self.test_batches > 0,
                f"test_batches must be positive, or -1 for all, but got {self.test_batches}.",
            ),
            (
                math.isfinite(self.z_loss) and self.z_loss >= 0,
                f"z_loss must be 0 or more, but got {self.z_loss}.",
            ),
            (
                0 <= self.label_smoothing < 1,
                f"label_smoothing must be in [0, 1), but got {self.label_smoothing}.",
            ),
            (
                math.isfinite(self.similarity_scale) and self.similarity_scale > 0,
                f"similarity_scale must be positive, but got {self.similarity_scale}.",
            ),
            (
                math.isfinite(self.triplet_margin) and self.triplet_margin >= 0,
                f"triplet_margin must be 0 or more, but got {self.triplet_margin}.",
            ),
            (0 <= self.seed < 2**32, f"seed must be in [0, 2^32), but got {self.seed}."),
            (
                self.clear_cache_threshold is None or self.clear_cache_threshold >= 0,
                f"clear_cache_threshold must be 0 or more, but got {self.clear_cache_threshold}.",
            ),
        ]
        checks += [
            (
                limit is None or (math.isfinite(limit) and limit > 0),
                f"{name} must be positive, but got {limit}.",
            )
            for name, limit in self.gates.items()
        ]
        for f in dataclasses.fields(self):
            value, choices = getattr(self, f.name), f.metadata["choices"]
            if choices and value is not None:
                checks.append(
                    (value in choices, f"{f.name} is one of {', '.join(choices)}; got '{value}'.")
                )
        if self.method == "full":
            unfit = {
                "matmul_path": self.matmul_path not in ("auto", "dense"),
                "quantize": self.quantize != "none",
                "compute_dtype": self.compute_dtype not in ("auto", "float32"),
                "cache_frozen": self.cache_frozen == "on",
                "train_fp16_fallback": self.train_fp16_fallback,
            }
            checks += [
                (not bad, f"{k} {getattr(self, k)} goes with method lora, but that is full.")
                for k, bad in unfit.items()
            ]
        if self.task == "lm" and (misplaced := self.changed(EMBEDDING_SETTINGS)):
            checks.append((False, f"{', '.join(misplaced)}: only with task embedding."))
        named = isinstance(self.lr_schedule, str)
        checks += [
            (
                not named or self.lr_schedule in SCHEDULES,
                f"lr_schedule is one of {', '.join(SCHEDULES)}; got '{self.lr_schedule}'.",
            ),
            (
                named or not self.warmup_steps,
                "warmup_steps goes with a schedule by name; beside a mapping write "
                f"lr_schedule.warmup: {self.warmup_steps}.",
            ),
        ]
        _raise_faults("TrainConfig", checks)

    def changed(self, names: Sequence[str]) -> list[str]:
        """Those of some settings that are not as by default."""
        default = {f.name: f.default for f in dataclasses.fields(self)}
        return [name for name in names if getattr(self, name) != default[name]]

    @property
    def gates(self) -> dict[str, float | None]:
        """The limits that the pack must meet at the end; None where there is none."""
        names = ("max_pack_mb", "max_ppl_ratio", "min_tps_ratio")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class DataConfig:
    """Which rows, and what their columns are called."""

    data: str = _option("tiny", "Folder or file of rows, a Hugging Face data set id, or 'tiny'.")
    chat_feature: str = _option("messages", "Column with the messages of a chat.")
    prompt_feature: str = _option("prompt", "Column with the prompt.")
    completion_feature: str = _option("completion", "Column with the completion.")
    text_feature: str = _option("text", "Column with plain text.")
    hf_dataset: dict | list | None = _option(
        None, "Data sets of the Hub with splits and columns, as in mlx-lm (YAML only)."
    )


# The settings that say what columns are called.
COLUMN_SETTINGS = tuple(
    field.name for field in dataclasses.fields(DataConfig) if field.name.endswith("_feature")
)


def _raise_faults(where: str, checks: list[tuple[bool, str]]) -> None:
    if faults := [message for ok, message in checks if not ok]:
        raise PackError(f"[{where}] " + " ".join(faults))


def _is_regex(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def typed_value(value, kind, key: str):
    """``value`` as ``kind``, or an error that names the key; ints pass for floats, '1e-5' too."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        kinds = typing.get_args(kind)
        if value is None and type(None) in kinds:
            return None
        for k in (k for k in kinds if k is not type(None)):
            try:
                return typed_value(value, k, key)
            except PackError:
                continue
        expected = " or ".join(getattr(k, "__name__", str(k)) for k in kinds)
        raise PackError(f"{key} must be {expected}, but got {value!r}.")
    if origin is tuple:
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)):
            raise PackError(f"{key} must be a list, but got {value!r}.")
        if dataclasses.is_dataclass(kind := typing.get_args(kind)[0]):
            return tuple(_part(v, kind, f"{key}[{i}]") for i, v in enumerate(items))
        items = [v.strip() if isinstance(v, str) else v for v in items]
        return tuple(typed_value(v, kind, key) for v in items if v != "")
    if origin is dict:
        value = _pairs(value, key) if isinstance(value, str) else value
        if not isinstance(value, Mapping):
            raise PackError(f"{key} must be a mapping, but got {value!r}.")
        return {
            str(k): typed_value(v, typing.get_args(kind)[1], f"{key}.{k}") for k, v in value.items()
        }
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            if float(value) == int(float(value)):
                return int(float(value))
        except (ValueError, OverflowError):
            pass
    if kind is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    if kind in (str, dict, list) and isinstance(value, kind):
        return value
    raise PackError(f"{key} must be of type {kind.__name__}, but got {value!r}.")


def _part(value, cls, key: str):
    """A dataclass inside another one, from its mapping; one that is there stays."""
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        raise PackError(f"{key} must be a mapping, but got {value!r}.")
    return build(cls, {str(k): v for k, v in value.items()}, key)


def _pairs(text: str, key: str) -> dict[str, str]:
    """``a=8,b=2`` as a flag has it; in YAML it is a mapping."""
    pairs = [part.rpartition("=") for part in text.split(",") if part.strip()]
    if not all(name.strip() and value.strip() for name, _, value in pairs):
        raise PackError(f"{key} must be of the form name=number,name=number, but got {text!r}.")
    names = [name.strip() for name, _, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise PackError(f"{key}: says two numbers for '{twice}'; one of them would be ignored.")
    return {name.strip(): value.strip() for name, _, value in pairs}


def build(cls, values: Mapping, where: str = ""):
    """``cls(**values)`` with every value typed; unknown keys are errors that name the nearest."""
    kinds = typing.get_type_hints(cls)
    typed = {}
    for key, value in values.items():
        if key not in kinds:
            hint = did_you_mean(key, list(kinds))
            raise PackError(f"{where or cls.__name__}: unknown key '{key}'. {hint}")
        typed[key] = typed_value(value, kinds[key], _spelled(key, where))
    try:
        return cls(**typed)
    except PackError as error:
        raise PackError(str(error) if where in ("", FLAGS) else f"{where}: {error}") from None


def _spelled(key: str, where: str) -> str:
    """A key as the user wrote it: a flag, or a key of the file ``where``."""
    return "--" + key.replace("_", "-") if where == FLAGS else f"{where}: {key}"


_RUN_KINDS = {
    "model": str,
    "out": str,
    "resume_adapter_file": str,
    "report_to": str,
    "project_name": str,
    "trust_remote_code": bool,
    "overwrite": bool,
    "resume": bool,
}
_RATE_KEYS = ("learning_rate", "warmup_steps")
_SIZES = {"": 1, "M": 10**6, "MB": 10**6, "G": 10**9, "GB": 10**9}  # as in mlx-lm


@dataclass(frozen=True)
class Recipe:
    """Everything that `packs train` was told, resolved: what the pack's manifest records."""

    lora: LoRAConfig = LoRAConfig()
    train: TrainConfig = TrainConfig()
    data: DataConfig = DataConfig()
    run: dict = field(default_factory=dict)

    def to_json(self) -> dict:
        left_out = OF_ADAPTERS if self.train.method == "full" else ()
        told = {
            **{k: v for k, v in sorted(self.run.items()) if v not in (None, False)},
            **{
                f.name: getattr(part, f.name)
                for part in (self.data, self.lora, self.train)
                for f in dataclasses.fields(part)
                if f.name not in left_out
            },
            "max_grad_norm": self.train.max_grad_norm or 0.0,  # None would read as its default
            "phases": [phase.to_json() for phase in self.train.phases],
        }
        if not self.train.phases:  # said and empty would be a fault
            del told["phases"]
        return told


def _flatten_mlx_lm(values: Mapping, where: str) -> dict:
    """Replace what mlx-lm spells differently by our keys, with the same meaning.

    ``scale`` stays, because alpha = scale x rank needs the rank that is valid in the end.
    """
    if "phases" in values and not values["phases"]:
        raise PackError(f"{where}: phases must hold at least one phase; leave it out for one.")
    flat = {str(k): v for k, v in values.items() if v is not None}
    kind = flat.pop("fine_tune_type", None)
    if kind not in (None, *METHODS):
        raise PackError(
            f"{where}: fine_tune_type '{kind}' is not trained here, only 'lora' and 'full'. "
            f"Use mlx_lm.lora --fine-tune-type {kind} for it."
        )
    if kind and flat.setdefault("method", kind) != kind:
        raise PackError(
            f"{where}: fine_tune_type is '{kind}', but method is '{flat['method']}'; say one of "
            "them."
        )
    if "scale" in flat:
        raise PackError(f"{where}: unknown key 'scale'. Write alpha (scale x rank).")
    nested = flat.pop("lora_parameters", {})
    if not isinstance(nested, Mapping):
        raise PackError(f"{where}: lora_parameters must be a mapping, but got {nested!r}.")
    ours = {"rank": "rank", "scale": "scale", "dropout": "dropout", "alpha": "alpha"}
    ours["keys"] = "target_modules"
    for key, value in nested.items():
        if key not in ours:
            hint = did_you_mean(str(key), list(ours))
            raise PackError(f"{where}: unknown key 'lora_parameters.{key}'. {hint}")
        if value is not None and value != []:
            flat.setdefault(ours[key], value)
    for key, kind in (("scale", float), ("rank", int)):
        if key in flat:
            flat[key] = typed_value(flat[key], kind, _spelled(key, where))
    if "scale" in flat and "alpha" in flat:
        if where != FLAGS:
            raise PackError(f"{where}: say either lora_parameters.scale or alpha (scale x rank).")
        del flat["scale"]  # the nested form stands in files only, and flags override them
    if "mask_prompt" in flat:
        masked = typed_value(flat.pop("mask_prompt"), bool, _spelled("mask_prompt", where))
        wanted = "completion" if masked else "all"
        if flat.setdefault("loss_on", wanted) != wanted:
            raise PackError(
                f"{where}: mask_prompt means loss_on '{wanted}', but loss_on is "
                f"'{flat['loss_on']}'; say one of them."
            )
    if isinstance(flat.get("cache_frozen"), bool):  # on and off, as YAML reads them
        flat["cache_frozen"] = "on" if flat["cache_frozen"] else "off"
    flat.pop("config", None)
    if "adapter_path" in flat:
        flat.setdefault("out", flat.pop("adapter_path"))
    if isinstance(size := flat.get("clear_cache_threshold"), str):
        flat["clear_cache_threshold"] = _bytes(size, _spelled("clear_cache_threshold", where))
    return flat


def _bytes(size: str, key: str) -> int:
    number, unit = re.fullmatch(r"([\d.]*)\s*(.*)", size.strip()).groups()
    try:
        return int(float(number) * _SIZES[unit.upper()])
    except (ValueError, KeyError):
        raise PackError(f"{key} must be a size such as 500M or 2GB, but got '{size}'.") from None


def _merged(layers: Sequence[Mapping], where: str) -> dict:
    """One flat mapping; later layers override earlier ones, under whatever name either used.

    A schedule as a mapping has its own rate and warm-up, so it overrides those of earlier layers.
    """
    merged: dict = {}
    for layer in layers:
        flat = _flatten_mlx_lm(layer, where)
        if isinstance(flat.get("lr_schedule"), Mapping):
            merged = {k: v for k, v in merged.items() if k not in _RATE_KEYS}
        for key, other in (("alpha", "scale"), ("scale", "alpha")):
            if key in flat:
                merged.pop(other, None)
        merged |= flat
    if "scale" in merged:
        merged["alpha"] = merged.pop("scale") * merged.get("rank", LoRAConfig.rank)
    return merged


def said(*layers: Mapping) -> frozenset[str]:
    """Names of the settings that mappings of keys (ours and mlx-lm's) say something about."""
    return frozenset(_merged(layers, FLAGS))


def resolve(values: Mapping, where: str = FLAGS, under: Sequence[Mapping] = ()) -> Recipe:
    """The recipe for a flat mapping of keys (ours and mlx-lm's); errors name ``where``.

    Args:
        under: mappings that ``values`` override, from the weakest to the strongest.
    """
    flat = _merged([*under, values], where)
    train, test = flat.pop("train", None), flat.pop("test", None)
    if where == FLAGS and (train is False or (test and not train)):
        raise PackError(
            "--test without --train, or 'train: false', asks for evaluation alone: use packs eval."
        )
    parts: dict[str, dict] = {"lora": {}, "train": {}, "data": {}, "run": {}}
    owners = {
        **{f.name: "lora" for f in dataclasses.fields(LoRAConfig)},
        **{f.name: "train" for f in dataclasses.fields(TrainConfig)},
        **{f.name: "data" for f in dataclasses.fields(DataConfig)},
        **{key: "run" for key in _RUN_KINDS},
    }
    for key, value in flat.items():
        if key not in owners:
            raise PackError(
                f"{where}: unknown key '{key}'. {unknown_key_hint(key, list(owners))}",
                "unknown",
                key,
            )
        parts[owners[key]][key] = value
    return Recipe(
        lora=build(LoRAConfig, parts["lora"], where),
        train=build(TrainConfig, parts["train"], where),
        data=build(DataConfig, parts["data"], where),
        run={k: typed_value(v, _RUN_KINDS[k], _spelled(k, where)) for k, v in parts["run"].items()},
    )


def read_yaml(path: str | Path) -> dict:
    """The mapping in a YAML or JSON file; one clear line if it cannot be read."""
    import yaml

    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else yaml.load(text, _yaml_loader())
    except OSError as error:
        raise PackError(f"{path}: cannot be read ({error.strerror}).") from None
    except (yaml.YAMLError, json.JSONDecodeError, UnicodeDecodeError) as error:
        line = " ".join(str(error).split())
        raise PackError(f"{path}: is not valid YAML: {line}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise PackError(f"{path}: must hold keys and values, but holds a {type(values).__name__}.")
    return values


def _yaml_loader() -> type:
    """PyYAML's safe loader with YAML 1.2's numbers: ``1e-5`` is a float wherever it stands."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    number = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    return Loader


def check_method(lora: LoRAConfig, train: TrainConfig, said: Collection[str] = ()) -> None:
    """Raises: PackError for settings of adapters beside ``method: full``: said, or no default."""
    if train.method != "full":
        return
    for name in OF_ADAPTERS:
        if name in said or getattr(lora, name) != getattr(LoRAConfig(), name):
            raise PackError(
                f"--{name.replace('_', '-')}: is of adapters, and --method full trains none; leave "
                "it out, or take --method lora."
            )
