"""Names that settings accept and that select code; configuration is read without MLX.

Each name is listed here once, with the facts that other modules need. The module that implements
it builds its registry with `registered`, which fails at import unless every name has its code and
all code has a name.
"""

import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from ..plugins import Plugin

T = TypeVar("T")


class Table(dict[str, T]):
    """Facts by name; those that installed packages add are imported when they are looked up.

    Iterating has what is built in.
    """

    # Imported when they are used.
    installed = "mlx_packs.plugins:installed"
    find = "mlx_packs.plugins:find"

    def __init__(self, kind: str, facts: Mapping[str, T]) -> None:
        super().__init__(facts)
        self.kind = kind  # the end of the group of entry points

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self.added()

    def __missing__(self, name: str) -> T:
        plugin = pkgutil.resolve_name(self.find)(self.kind, name, False)
        if plugin is None:
            raise KeyError(name)
        return plugin.facts(type(next(iter(self.values()))))

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default

    def added(self) -> dict[str, tuple["Plugin", ...]]:
        """Return what installed packages add, by name; nothing of them is imported."""
        return pkgutil.resolve_name(self.installed)(self.kind)

    def plugin(self, name: str) -> "Plugin | None":
        """Return the plug-in that a name is; None where it is built in, and no package has it."""
        return pkgutil.resolve_name(self.find)(self.kind, name, super().__contains__(name))

    def load(self, name: str, interface: type) -> Any:
        """Return the code of a name, which is imported now and has the methods of an interface."""
        code = self[name].code
        if super().__contains__(name):
            return pkgutil.resolve_name(code)
        return self.plugin(name).with_methods_of(code, interface)

    def resolve(self, name: str, code: str) -> Any:
        """Return what a fact of a name is, ``module:attribute``, imported now."""
        if super().__contains__(name):
            return pkgutil.resolve_name(code)
        return self.plugin(name).load(code)


@dataclass(frozen=True)
class ArchitectureFacts:
    """Facts of an architecture, known without MLX."""

    described: str  # what errors call it
    output: str  # what it computes
    hub_task: str  # the pipeline tag of its packs on the Hub
    peft_task: str  # PEFT's task_type
    model_types: tuple[str, ...] = ()  # of its config.json; empty where it has all others
    prefix: str = ""  # that may precede the names of a checkpoint's tensors
    quantizable: bool = True  # whether adapters train beside quantized weights
    in_mlx_lm: bool = True  # whether stock mlx-lm loads it
    instead: str = ""  # what there is for it, where a command does not take it


@dataclass(frozen=True)
class PackFacts:
    """Facts of the packs of a task, for the commands that take one; code is ``module:name``."""

    described: str = ""  # what it is, with an article; empty if a model with it is what it was
    learned: str = ""  # what it was trained on, if not on tokens
    # What there is for it, where another use was wanted.
    instead: str = "Use packs generate, packs chat, packs eval or packs serve."
    command: str = ""  # that uses it, in its folder; ``{base}`` stands for the base model
    hub: str = ""  # its pipeline tag on the Hub, if it generates no text
    activates: bool = True  # whether a base can have it until another one, not for one call each
    # An `Evaluator` of the base, rows and settings, if not the one of the base's architecture.
    evaluator: str | None = None
    worker: str | None = None  # of ``packs serve``, other than what generates text
    # Function of a pack, its base's folder, config and tokenizer: files, by name, that a merged
    # checkpoint needs to be opened by other programs.
    merged_files: str | None = None
    # Function of a `MergeRequest`: how far a merge on a decoder is from the pack, if not by next
    # tokens.
    compare_merged: str | None = None
    # Function of a base's folder and whether it is a decoder: what its packs need of a base, as
    # `objective` of their manifest has it.
    base_settings: str | None = None
    objective: Mapping[str, str] = field(default_factory=dict)  # its own entries there: their kinds


@dataclass(frozen=True)
class TaskFacts:
    """Facts of a task, known without MLX."""

    code: str  # its class, module:name, imported when a run of it begins
    architecture: str  # of the bases that it trains
    also: str | None = None  # another architecture that it trains
    described: str = ""  # what it trains, in the help of --task
    # Settings of `TrainConfig` that have another default in this task.
    defaults: Mapping[str, object] = field(default_factory=dict)
    in_batch: bool = False  # whether the examples of a batch are each other's negatives
    masks: bool = False  # whether its targets are some tokens of an example
    sequences: int = 1  # that an example becomes
    by_text: bool = False  # whether the second number of a batch's shape is its sequences
    rated: bool = False  # whether its examples are single completions, each good or bad
    generates: bool = False  # whether it trains on completions that the model generates
    # Values of --head, the default first: ``lm`` reads logits, ``score`` is a head of its own that
    # gives numbers in their place. ``none`` reads states alone.
    heads: tuple[str, ...] = ("lm",)
    teacher: bool = False  # whether it reads what a teacher predicts
    # Values of --loss; `auto` is the first, unless it is chosen by data.
    losses: tuple[str, ...] = ()
    # Numbers of its report, which has them with ``_before`` and ``_after``. A sweep compares trials
    # by the first that they have; without any there are no sweeps of it.
    metrics: tuple[str, ...] = ()
    # Its own formats of rows, a tuple, module:name. `data.formats` imports the module.
    formats: str | None = None
    caches: bool = False  # whether it can cache frozen activations (--cache-frozen)
    plans_rows: bool = False  # whether the memory plan of ``packs plan`` encodes its rows
    pipelined: str | None = None  # its class with --pipeline
    functions: tuple[str, ...] = ()  # of the caller's, arguments of `train_pack`
    pack: PackFacts = field(default_factory=PackFacts)
    # Of a task that an installed package adds: the class of its ``task_config``, module:name, and
    # a built-in task whose settings it has, too.
    config: str | None = None
    settings_of: str | None = None

    def trains(self, architecture: str) -> bool:
        """Return whether its bases may be of an architecture."""
        return architecture in (self.architecture, self.also)

    def head_for(self, setting: str) -> str:
        """Return the head that a value of --head means; ``auto``, or one of others, the default."""
        return setting if setting in self.heads else self.heads[0]


@dataclass(frozen=True)
class MethodFacts:
    """Facts of a method, known without MLX."""

    code: str  # its class, module:name, imported when it is used
    # Whether it trains the base's own weights, dense and in float32, and no adapters.
    trains_base: bool = False
    # Whether outputs of adapted projections have a magnitude, whose gradient needs the output.
    magnitudes: bool = False


@dataclass(frozen=True)
class OptimizerFacts:
    """Facts of an optimizer, with its defaults."""

    bytes_per_weight: float  # of its state, for the weights of a large matrix
    betas: tuple[float, ...] = ()  # decays of its moments; empty where it has none
    weight_decay: float | None = 0.0  # None where it has none
    corrects_bias: bool = False  # whether it has ``bias_correction``


@dataclass(frozen=True)
class LossFacts:
    """Facts of an embedding loss, besides its formula."""

    settings: tuple[str, ...] = ()  # that only it and some other losses have
    texts: int = 2  # of an example
    scored: bool = False  # whether it needs the scores of the examples
    scores_are_cosines: bool = False  # whether these must be in -1 to 1
    in_batch: bool = False  # whether the other examples of a batch are its negatives
    compares_all: bool = False  # whether it compares each example with every other, [B, B]
    by_parts: bool = False  # whether the batch is embedded in mini-batches


@dataclass(frozen=True)
class Number:
    """A number that reports have before and after training, as people read it."""

    label: str  # in a line
    title: str = ""  # on a page, if another one
    digits: int = 4
    lower_is_better: bool = False


@dataclass(frozen=True)
class WeightModeFacts:
    """Facts of a kind of quantized weights, known without MLX."""

    code: str  # its WeightFormat, module:name, imported when it is used
    # Names of the tensors that may be next to a weight. A module with the first is quantized so;
    # modes without any are further ones of MLX, whose tensors have the names of affine's.
    parts: tuple[str, ...] = ()
    numbers: int | None = None  # in an element of the stored weight; None where the bits decide


@dataclass(frozen=True)
class MatmulPathFacts:
    """Facts of a matmul path, known without MLX."""

    in_place: bool = False  # whether the base's own modules do it
    dequantizes: bool = False  # whether each use of a weight makes a dense one
    keeps_dense: bool = False  # whether dense copies of the weights are kept


@dataclass(frozen=True)
class PolicyFacts:
    """Facts of an activation checkpointing policy."""

    operations: bool = False  # the cheap ones between the products of a block
    blocks: bool = False  # every block, from its input
    described: str = ""


ARCHITECTURES = {
    "decoder": ArchitectureFacts(
        described="a causal language model",
        output="logit",
        hub_task="text-generation",
        peft_task="CAUSAL_LM",
    ),
    "encoder": ArchitectureFacts(
        described="an encoder (bert: all-MiniLM-L6-v2, bge, e5; modernbert)",
        output="embedding",
        hub_task="sentence-similarity",
        peft_task="FEATURE_EXTRACTION",
        model_types=("bert", "modernbert"),
        prefix="bert.",
        quantizable=False,
        in_mlx_lm=False,
        instead="For an encoder there are `packs train --task embedding`, `packs eval` (of several "
        "packs, too: A=0.7 B=0.3), `packs merge`, `packs export`, and "
        "base.encode(texts).",
    ),
}
LOSSES: dict[str, LossFacts] = {
    "cosine": LossFacts(scored=True, scores_are_cosines=True),
    "mnrl": LossFacts(("similarity_scale",), in_batch=True, compares_all=True),
    "cached-mnrl": LossFacts(
        ("similarity_scale", "mini_batch_size"), in_batch=True, compares_all=True, by_parts=True
    ),
    "cosent": LossFacts(("similarity_scale",), scored=True, compares_all=True),
    "triplet": LossFacts(("triplet_margin", "triplet_distance"), texts=3),
}
RANKING_LOSSES = ("infonce", "listnet", "ranknet", "margin")  # of a query's documents


ANSWER_METRICS = ("exact", "contains", "json")  # when a generated answer is right
# Numbers of packs that do not predict tokens, or not only; the first that a pack has leads.
METRICS = {
    "label_accuracy": Number("accuracy"),
    "macro_f1": Number("macro F1"),
    "log_loss": Number("log loss", lower_is_better=True),
    "calibration_error": Number("calibration error", lower_is_better=True),
    "mae": Number("mean absolute error", lower_is_better=True),
    "rmse": Number("RMSE", lower_is_better=True),
    "preference_accuracy": Number("preference accuracy"),
    "reward_margin": Number("reward margin"),
    "reward": Number("reward"),
    "spearman": Number("Spearman"),
    "pearson": Number("Pearson"),
    "triplet_accuracy": Number("triplet accuracy"),
    "mrr_at_10": Number("MRR@10"),
    "ndcg_at_10": Number("NDCG@10"),
    "recall_at_1": Number("recall@1"),
}
NUMBERS = METRICS | {
    "ppl": Number("PPL", "Perplexity", digits=2, lower_is_better=True),
    "accuracy": Number("accuracy", "Token accuracy"),
    "chosen_ppl": Number("PPL of chosen completions", digits=2, lower_is_better=True),
}


def _preferences(
    *losses: str, described: str = "preferences", rated: bool = False, **defaults: object
) -> TaskFacts:
    """Return the facts of a task of preferences, whose examples become two sequences each."""
    return TaskFacts(
        "mlx_packs.tasks.preference:PreferenceTask",
        "decoder",
        described=described,
        defaults={"learning_rate": 2e-5, **defaults},
        masks=True,
        sequences=2,
        rated=rated,
        losses=losses,
        formats=f"mlx_packs.data.task_formats:{'RATED' if rated else 'PREFERENCE'}_FORMATS",
        metrics=("preference_accuracy", "reward_margin", "loss", "chosen_ppl"),
    )


_EVAL_COMMAND = "packs eval . --model {base} --data ..."

TASKS = Table(
    "tasks",
    {
        "lm": TaskFacts(
            "mlx_packs.tasks.causal_lm:CausalLMTask",
            "decoder",
            described="next-token prediction",
            masks=True,
            metrics=("ppl", "accuracy", "answers"),
            caches=True,
            plans_rows=True,
            pipelined="mlx_packs.extras.pipeline.task:PipelinedTask",
            functions=("loss", "metric"),
        ),
        "embedding": TaskFacts(
            "mlx_packs.tasks.embedding:EmbeddingTask",
            "encoder",
            also="decoder",
            described="sentence embeddings",
            defaults={"batch_size": 32},
            in_batch=True,
            sequences=2,
            by_text=True,
            heads=("none",),
            losses=tuple(LOSSES),
            formats="mlx_packs.data.task_formats:PAIR_FORMATS",
            metrics=tuple(
                "spearman ndcg_at_10 triplet_accuracy pearson mrr_at_10 recall_at_1".split()
            ),
            pack=PackFacts(
                described="an embedder",
                learned="embeddings",
                instead="Use packs eval, packs serve (/v1/embeddings) or base.encode().",
                command=_EVAL_COMMAND,
                hub="sentence-similarity",
                evaluator="mlx_packs.evaluation.embeddings:EmbeddingEvaluator",
                worker="mlx_packs.serving.embedding:EmbeddingWorker",
                merged_files="mlx_packs.convert.task_fidelity:embedder_files",
                compare_merged="mlx_packs.convert.task_fidelity:compare_vectors",
                base_settings="mlx_packs.bases.sentence_config:base_settings",
                objective=dict.fromkeys(("pooling", "query_prompt"), "text?")
                | {"normalize": "true or false?"},
            ),
        ),
        "dpo": _preferences("sigmoid", "robust", "hinge", "ipo"),
        "orpo": _preferences(),
        "simpo": _preferences(beta=2.0),
        "cpo": _preferences("sigmoid", "hinge", "ipo"),
        "kto": _preferences(described="rated completions", rated=True),
        "reward": TaskFacts(
            "mlx_packs.tasks.reward:RewardTask",
            "decoder",
            described="a reward model",
            defaults={"learning_rate": 1e-4},
            sequences=2,
            heads=("score",),
            formats="mlx_packs.data.task_formats:PREFERENCE_FORMATS",
            pack=PackFacts(
                described="a reward model",
                learned="a reward model, which scores the last token",
                instead="Use packs eval or base.rewards().",
                command=_EVAL_COMMAND,
                hub="text-classification",
                activates=False,
                evaluator="mlx_packs.evaluation.preferences:RewardEvaluator",
            ),
        ),
        "classify": TaskFacts(
            "mlx_packs.tasks.classify:ClassifyTask",
            "decoder",
            described="labels of texts or chats",
            defaults={"learning_rate": 1e-4},
            heads=("score",),
            formats="mlx_packs.data.task_formats:LABEL_FORMATS",
            metrics=tuple(
                "label_accuracy macro_f1 log_loss calibration_error mae rmse spearman".split()
            ),
            pack=PackFacts(
                described="a classifier",
                instead="Use packs classify, packs eval, packs serve (/v1/classify) or "
                "base.classify().",
                command="packs classify . --model {base} < rows.jsonl",
                hub="text-classification",
                activates=False,
                evaluator="mlx_packs.evaluation.classification:ClassifierEvaluator",
            ),
        ),
        "rerank": TaskFacts(
            "mlx_packs.tasks.rerank:RerankTask",
            "decoder",
            described="the relevance of documents",
            defaults={"learning_rate": 1e-4},
            sequences=8,
            by_text=True,
            heads=("lm", "score"),
            losses=RANKING_LOSSES,
            formats="mlx_packs.data.task_formats:RANKING_FORMATS",
            metrics=("ndcg_at_10", "mrr_at_10"),
            pack=PackFacts(
                described="a reranker",
                learned="rankings",
                instead="Use packs eval, packs serve (/v1/rerank) or base.rerank().",
                command=_EVAL_COMMAND,
                hub="text-ranking",
                evaluator="mlx_packs.evaluation.rankings:RerankEvaluator",
                worker="mlx_packs.serving.embedding:Reranker",
                merged_files="mlx_packs.convert.task_fidelity:reranker_files",
                compare_merged="mlx_packs.convert.task_fidelity:compare_scores",
                objective={"instruction": "text?", "head": "text?"},
            ),
        ),
        "grpo": TaskFacts(
            "mlx_packs.tasks.grpo:GRPOTask",
            "decoder",
            described="completions that maximize a reward function",
            defaults={"batch_size": 1, "learning_rate": 2e-5, "beta": 0.0},
            generates=True,
            formats="mlx_packs.data.task_formats:PROMPT_FORMATS",
            metrics=("reward",),
            functions=("reward",),
        ),
        "distill": TaskFacts(
            "mlx_packs.tasks.distill:DistillTask",
            "decoder",
            described="the predictions of a teacher",
            masks=True,
            teacher=True,
            losses=("forward-kl", "reverse-kl", "jsd"),
            metrics=("teacher_loss", "ppl", "accuracy", "answers"),
            caches=True,
            functions=("metric",),
        ),
    },
)
DECODER_TASKS = tuple(
    name
    for name, facts in TASKS.items()
    if facts.architecture == "decoder" and not facts.by_text  # whose runs have no phases
)
# Models to begin with, and the GB of the smallest machine that a run fits (docs/choose.md).
MODELS = {
    "mlx-community/Qwen3-0.6B-4bit": 8,
    "mlx-community/Qwen3-1.7B-4bit": 8,
    "mlx-community/Qwen3-4B-Instruct-2507-4bit": 8,
    "mlx-community/Qwen3-8B-4bit": 16,
    "mlx-community/Qwen3-14B-4bit": 24,
}
ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
PREFERENCE_TASKS = tuple(
    name for name, facts in TASKS.items() if facts.sequences == 2 and facts.masks
)
METHODS = Table(
    "methods",
    {
        "lora": MethodFacts("mlx_packs.adapters.attach:LoRA"),
        "dora": MethodFacts("mlx_packs.adapters.dora:DoRA", magnitudes=True),
        "pissa": MethodFacts("mlx_packs.extras.initial_factors:PiSSA"),
        "olora": MethodFacts("mlx_packs.extras.initial_factors:OLoRA"),
        "loftq": MethodFacts("mlx_packs.extras.initial_factors:LoftQ"),
        "full": MethodFacts("mlx_packs.adapters.full:FullFineTuning", trains_base=True),
    },
)
OBJECTIVES = {  # what makes the class of a task on another forward pass, module:name
    "transformer": None,
    "projection-stack": "mlx_packs.extras.projection_stack:task_of",
}
OPTIMIZERS = {
    "adamw": OptimizerFacts(8, (0.9, 0.999), weight_decay=0.01, corrects_bias=True),
    "adamw_8bit": OptimizerFacts(2.03, (0.9, 0.999), weight_decay=0.01, corrects_bias=True),
    "adam": OptimizerFacts(8, (0.9, 0.999), weight_decay=None, corrects_bias=True),
    "adafactor": OptimizerFacts(0),
    "sgd": OptimizerFacts(4),
    "muon": OptimizerFacts(4, weight_decay=0.01),
    "lion": OptimizerFacts(4, (0.9, 0.99)),
}
SCHEDULES = ("cosine", "linear", "constant", "wsd")  # of the learning rate
WEIGHT_MODES = {  # of `packs quantize --mode`
    "nf4": WeightModeFacts(
        "mlx_packs.bases.nf4:NF4Format", ("absmax", "nested_absmax", "offset"), numbers=2
    ),
    "affine": WeightModeFacts("mlx_packs.bases.weight_formats:MLXFormat", ("scales", "biases")),
    "mxfp4": WeightModeFacts("mlx_packs.bases.weight_formats:MXFP4Format"),
    "nvfp4": WeightModeFacts("mlx_packs.bases.weight_formats:NVFP4Format"),
}
WEIGHT_FORMATS: dict[str, tuple[str, dict[str, int]]] = {  # of --quantize: mode and settings
    "affine4": ("affine", {"bits": 4}),
    "affine8": ("affine", {"bits": 8}),
    "nf4": ("nf4", {}),
    "mxfp4": ("mxfp4", {}),
    "nvfp4": ("nvfp4", {}),
}
# The cheapest in memory first.
MATMUL_PATHS = {
    "quantized": MatmulPathFacts(in_place=True),
    "transient": MatmulPathFacts(dequantizes=True),
    "dense": MatmulPathFacts(keeps_dense=True),
}
# Of activation checkpointing, the fastest first.
POLICIES = {
    "none": PolicyFacts(),
    "selective": PolicyFacts(operations=True, described="cheap operations recomputed"),
    "block": PolicyFacts(blocks=True, described="blocks recomputed"),
}
ADAPTER_FORMATS = ("mlx-lm", "peft")  # that packs export writes and packs import reads
DESTINATIONS = ("gguf", "ollama", "lmstudio", "swift")  # that packs export writes, and none reads
SEARCHES = ("grid", "random")  # of packs sweep
AUTO_ON_OFF = ("auto", "on", "off")
DISTANCES = ("euclidean", "cosine", "manhattan")


def answer_metric_of(entry: str | None) -> str | None:
    """Return the metric of answers that an entry of a validation is of; None if it is another."""
    metrics = {f"valid_{metric}": metric for metric in ANSWER_METRICS}
    return metrics.get(entry or "")


def task_defaults(task: Any) -> Mapping[str, Any]:
    """Return the settings that have another default in a task; none for what is no task."""
    if isinstance(task, str) and task in TASKS:
        return TASKS[task].defaults
    return {}


def is_lower_better(metric: str) -> bool:
    """Return whether less of a number of a report is better."""
    if metric in NUMBERS:
        return NUMBERS[metric].lower_is_better
    return metric.endswith(("loss", "nll", "ppl"))


def weight_modes_of(tensors: Iterable[str]) -> dict[str, str]:
    """Return the mode of the quantized weights among tensors, by the path of their module.

    MLX's other formats count as affine: they have scales, too.
    """
    tails = {f".{facts.parts[0]}": mode for mode, facts in WEIGHT_MODES.items() if facts.parts}
    modes = {}
    for name in tensors:
        path, dot, part = name.rpartition(".")
        if mode := tails.get(dot + part):
            modes[path.removesuffix(".weight")] = mode  # bitsandbytes: x.weight.absmax

    return modes


def registered(names: Iterable[str], code: Mapping[str, T]) -> dict[str, T]:
    """Return the code of every name of a listing of this module, in its order.

    Raises:
        RuntimeError: a name has no code, or code has no name.
    """
    if faulty := set(names) ^ set(code):
        raise RuntimeError(f"registered in one place only: {', '.join(sorted(faulty))}")
    return {name: code[name] for name in names}


def architecture_of(model_type: str | None) -> str:
    """Return the architecture of the base models that have a ``model_type`` in config.json."""
    listed = (name for name, facts in ARCHITECTURES.items() if model_type in facts.model_types)
    return next(listed, "decoder")


@cache
def package_of(model_type: str) -> str:
    """Return ``mlx-lm``, or ``mlx-vlm`` for a ``model_type`` that mlx-lm lacks."""
    models = Path(find_spec("mlx_lm").origin).with_name("models")
    if not (models / f"{model_type}.py").is_file():
        from mlx_lm.utils import MODEL_REMAPPING  # which loads MLX and transformers

        model_type = MODEL_REMAPPING.get(model_type, model_type)
    if (models / f"{model_type}.py").is_file():
        return "mlx-lm"
    return "mlx-vlm"
