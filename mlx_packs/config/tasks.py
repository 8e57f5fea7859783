"""The settings that not all tasks have, which are in `TrainConfig`, and a phase's settings."""

import dataclasses
import json
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from ..errors import PackError, did_you_mean
from .choices import (
    ANSWER_METRICS,
    DECODER_TASKS,
    DISTANCES,
    OBJECTIVES,
    PREFERENCE_TASKS,
    TASKS,
)
from .data import DataConfig
from .fields import Fault, Settings, facts_of, option
from .values import setting_error, typed_value

_data = partial(option, section="Model and data")
_share = partial(_data, metavar="SHARE", at_least=0, at_most=1)
_optimization = partial(option, section="Optimization")
_step = partial(_optimization, own_layers="step")
_phase = partial(_optimization, flags=())
_evaluation = partial(option, section="Evaluation and gates", resumable=True)
_embedding = partial(option, section="Embedding", tasks=("embedding",))
_reranking = partial(option, section="Reranking", tasks=("rerank",))
_preference = partial(option, section="Preferences")
_generated = partial(option, section="Rewards")
_rated = partial(_preference, metavar="WEIGHT", above=0, tasks=("kto",))
_ENCODED = tuple(name for name in DECODER_TASKS if not TASKS[name].generates)
_TARGETS = tuple(name for name, facts in TASKS.items() if facts.masks and facts.sequences == 1)
_ANSWERING = tuple(name for name, facts in TASKS.items() if facts.masks or facts.generates)
_target = partial(_data, tasks=_TARGETS)
_gate = partial(_evaluation, above=0, tasks=_TARGETS)
_teacher = partial(_data, tasks=("distill",))
_LOSSES = tuple(name for name, facts in TASKS.items() if facts.losses)
# Tasks with a loss of the margin between two completions.
PAIR_LOSSES = ("dpo", "cpo")


@dataclass(frozen=True, repr=False)
class Phase(Settings):
    """One of the ``phases`` of a run, which trains them in order, with the same adapters.

    Omitted settings are those that the run's `TrainConfig` specifies, else the task's defaults.
    """

    name: str | None = _phase(None, "Name of the phase.", shown_default="phase-1, phase-2, ...")
    data: str | list | None = _phase(None, "Training data of the phase: a source as for --data.")
    task: str | None = _phase(None, "Task of the phase.", choices=DECODER_TASKS)
    iters: int | None = _phase(None, "Batches of the phase.")
    learning_rate: float | None = _phase(None, "Peak learning rate of the phase.")
    lr_schedule: str | dict | None = _phase(
        None, "Learning-rate schedule of the phase; it starts with the phase."
    )
    warmup_steps: int | None = _phase(None, "Warm-up updates of the phase.")
    warmup_ratio: float | None = _phase(
        None, "Share of the phase's updates for the warm-up, instead of warmup_steps."
    )
    replay: float = _phase(
        0.0, "Share of the examples that are drawn from earlier phases.", at_least=0, at_most=1
    )
    optimizer_state: str = _phase(
        "carry",
        "Whether the optimizer keeps its state (carry) or starts anew (fresh).",
        choices=("carry", "fresh"),
    )

    def _conflicts(self) -> Iterator[Fault]:
        if self.name is not None and not self.name.strip():
            yield Fault("name", "must not be empty.")
        elif self.name is not None and not self.name.isprintable():
            yield Fault("name", f"must be one line of text, but is {self.name!r}.")

        if self.data is not None and (not self.data or isinstance(self.data, list)):
            text = f"must be one source, but is {self.data!r}. Train on several in a phase each."
            yield Fault("data", text)

    def to_json(self) -> dict:
        """Return the settings that are not omitted."""
        return {name: getattr(self, name) for name in self.changed(vars(self))}


@dataclass(frozen=True, repr=False, kw_only=True)
class TaskSettings(Settings):
    """The settings that not all tasks have; each names the tasks that have it."""

    neftune_noise_alpha: float = _optimization(
        0.0,
        "Add noise of this size to the embeddings of the tokens in training (NEFTune; 5 to 15).",
        metavar="ALPHA",
        at_least=0,
        tasks=DECODER_TASKS,
    )
    share_prefix: str = option(
        "auto",
        "Compute the common prefix of the examples of a batch, such as a system prompt, once, not "
        "in every row, and with --task lm merge rows that are prefixes of other rows into them. "
        "auto does so if it saves 15 % of the inputs and the run has no dropout or noise. With "
        "--task lm, on also puts examples of the same prefix into the same batch.",
        section="Memory and speed",
        choices=("auto", "on", "off"),
        memory=True,
        tasks=DECODER_TASKS,
    )
    phases: tuple[Phase, ...] = _optimization(
        (),
        "Phases to train one after the other, each with its own data and learning rate.",
        flags=(),
        tasks=DECODER_TASKS,
    )
    num_proc: int | None = _data(
        None,
        "Maximum number of tokenizer processes, for data sets of about 16 MB or more.",
        shown_default="one per core, at most 8",
        metavar="N",
        at_least=1,
        resumable=True,
        tasks=_ENCODED,
    )
    packing: bool = _target(
        False,
        "Pack several examples into each sequence; attention does not cross examples.",
    )
    label_smoothing: float = _step(
        0.0,
        "Share of each target's probability that is spread over the vocabulary; with --task dpo "
        "or cpo, the share of preferences that are the wrong way round (below 0.5).",
        metavar="SHARE",
        at_least=0,
        below=1,
        tasks=("lm", *PAIR_LOSSES),
    )
    loss: str = option(
        "auto",
        "Loss of preferences (dpo, cpo): sigmoid, robust (to wrong preferences), hinge or ipo. "
        "Divergence from a teacher (distill): forward-kl, reverse-kl or jsd. "
        "Loss of embeddings: cosine or cosent for pairs with scores, mnrl (in-batch negatives) or "
        "cached-mnrl for anchors with positives, triplet for those with negatives. Loss of "
        "rankings: infonce or listnet of all documents of a query, ranknet or margin of pairs of "
        "them. auto is sigmoid; of a teacher forward-kl; of embeddings cosine or mnrl, of rankings "
        "infonce or listnet, by the data.",
        choices=("auto", *dict.fromkeys(loss for facts in TASKS.values() for loss in facts.losses)),
        section="Model and data",
        memory=True,
        tasks=_LOSSES,
    )
    head: str = _data(
        "auto",
        "Head that decides on the label (classify) or the relevance (rerank): a new linear head on "
        "the last token (score), or, for rerank, the LM head, which scores yes against no and adds "
        "no parameters (lm).",
        shown_default="score with --task classify, lm with --task rerank",
        choices=("auto", "score", "lm"),
        memory=True,
        tasks=("classify", "rerank"),
    )
    beta: float = _preference(
        0.1,
        "Weight of the distance from the reference (dpo, kto, grpo), of the odds ratio (orpo), or "
        "scale of the log-probabilities (cpo, simpo).",
        metavar="BETA",
        at_least=0,
        tasks=(*PREFERENCE_TASKS, "grpo"),
    )
    max_completion_length: int = _generated(
        256,
        "Maximum completion length, in tokens.",
        at_least=1,
        memory=True,
        tasks=("grpo", "distill"),
    )
    temperature: float = _generated(
        1.0,
        "Sampling temperature of the completions in training.",
        metavar="TEMP",
        above=0,
        tasks=("grpo", "distill"),
    )
    loss_on: str | None = _target(
        None,
        "Tokens to train on: all, only the completion (the last answer), or every assistant "
        "message.",
        shown_default="assistant for chats, completion for prompts with completions, all for texts",
        choices=("all", "completion", "assistant"),
    )
    metric: str | None = _evaluation(
        None,
        "Also report the share of right answers: those that are the expected text (exact), contain "
        "it (contains), or are the same JSON value (json); FILE.py:NAME is a function of your own, "
        "which scores an answer from 0 to 1 by the expected one. The share is reported before and "
        "after training, for 100 evaluated examples at most and greedy decoding.",
        shown_default="exact for the bundled data, none otherwise",
        choices=(*ANSWER_METRICS, "none"),
        function=True,
        time=True,
        tasks=_TARGETS,
    )
    sample_every: int | None = _evaluation(
        None,
        "Answer five validation prompts before the first batch and after every N batches. The "
        "greedy answers are in samples.jsonl of the run folder.",
        metavar="N",
        at_least=1,
        tasks=_ANSWERING,
        time=True,
    )
    long_rows: str = _target(
        "cut",
        "Texts over --max-seq-length: truncate them, or split them into several examples.",
        choices=("cut", "split"),
    )
    ce_last_k: int | None = _optimization(
        None,
        "Train only on the last K target tokens of each example.",
        metavar="K",
        at_least=1,
        tasks=_TARGETS,
    )
    max_ppl_ratio: float | None = _gate(
        None,
        "Gate: exit with code 1 if held-out perplexity with the pack is more than RATIO times the "
        "base model's, or in a run that starts from adapters, than RATIO times theirs.",
        metavar="RATIO",
    )
    min_tps_ratio: float | None = _gate(
        None,
        "Gate: exit with code 1 if tokens/s with the pack are less than RATIO times the base "
        "model's.",
        metavar="RATIO",
    )
    fim_rate: float = _share(
        0.0,
        "Share of the texts to train as fill-in-the-middle; the tokenizer must have tokens for it.",
        tasks=("lm",),
    )
    fim_spm_rate: float = _share(
        0.5,
        "Share of the fill-in-the-middle examples with the suffix before the prefix.",
        tasks=("lm",),
    )
    fim_tokens: tuple[str, ...] = _data(
        (),
        "Tokens before prefix, suffix and middle, and optionally after the middle, separated by "
        "commas.",
        shown_default="the tokenizer's own",
        metavar="TOKENS",
        tasks=("lm",),
    )
    objective: str = _optimization(
        "transformer",
        "Forward pass used for the loss: the full transformer, or a cheap proxy (embeddings -> "
        "attention output projections -> LM head) for comparison.",
        choices=OBJECTIVES,
        tasks=("lm",),
    )
    z_loss: float = _step(
        0.0,
        "Weight of the z-loss, logsumexp(logits)^2, which keeps logits small.",
        metavar="WEIGHT",
        at_least=0,
        tasks=("lm",),
    )
    teacher_cache: str | None = _teacher(
        None,
        "Folder with the log-probabilities of a teacher. With --teacher, that model writes them "
        "before the run, unless they are there.",
        metavar="DIR",
        resumable=True,
    )
    teacher: str | None = _teacher(
        None,
        "Teacher: a folder, a GGUF file or a Hugging Face id. It is loaded alongside the student, "
        "or writes --teacher-cache before the run.",
        metavar="MODEL",
        resumable=True,
        memory=True,
    )
    teacher_top_k: int = _teacher(
        64,
        "Most likely tokens of --teacher that the student is compared on, at most the vocabulary; "
        "all others count as one.",
        metavar="K",
        at_least=1,
        memory=True,
    )
    on_policy: float = _share(
        0.0,
        "Share of the batches that the student writes and --teacher scores (GKD).",
        tasks=("distill",),
    )
    ce_weight: float = _optimization(
        0.0,
        "Weight of the cross-entropy of the data; the divergence from the teacher has the rest.",
        metavar="WEIGHT",
        at_least=0,
        at_most=1,
        tasks=("distill",),
    )
    jsd_beta: float = _optimization(
        0.5,
        "Weight of the teacher in the mixture that --loss jsd compares both with. Near 0 it is "
        "like forward-kl, near 1 like reverse-kl.",
        metavar="BETA",
        above=0,
        below=1,
        tasks=("distill",),
    )
    query_prompt: str | None = _embedding(
        None,
        "Text before every anchor and not before what belongs to it, such as an instruction. An "
        "empty text puts nothing there.",
        shown_default="of a decoder the prompt 'query' of its config_sentence_transformers.json",
        metavar="TEXT",
    )
    similarity_scale: float = _embedding(
        20.0,
        "Factor on the cosines in mnrl, cached-mnrl and cosent (1 / temperature).",
        metavar="FACTOR",
        above=0,
    )
    mini_batch_size: int = _embedding(
        32,
        "Number of texts whose activations cached-mnrl keeps in memory at a time.",
        at_least=1,
        memory=True,
    )
    triplet_margin: float = _embedding(
        5.0, "Margin of the triplet loss.", metavar="MARGIN", at_least=0
    )
    triplet_distance: str = _embedding(
        "euclidean", "Distance function of the triplet loss.", choices=DISTANCES
    )
    rerank_instruction: str | None = _reranking(
        None,
        "Criterion of relevance, in the question that the model answers with yes or no.",
        shown_default="Given a web search query, retrieve relevant passages that answer the query",
        metavar="TEXT",
    )
    rank_margin: float = _reranking(
        1.0,
        "Difference of the scores that the margin loss asks of a better and a worse document.",
        metavar="MARGIN",
        above=0,
    )
    simpo_gamma: float = _preference(
        0.5,
        "Margin by which the chosen completion is to be better (simpo).",
        metavar="GAMMA",
        at_least=0,
        tasks=("simpo",),
    )
    cpo_alpha: float = _preference(
        1.0,
        "Weight of the chosen completion's cross-entropy (cpo).",
        metavar="ALPHA",
        at_least=0,
        tasks=("cpo",),
    )
    desirable_weight: float = _rated(1.0, "Weight of the desirable completions (kto).")
    undesirable_weight: float = _rated(1.0, "Weight of the undesirable completions (kto).")
    center_rewards_coefficient: float = _preference(
        0.0,
        "Weight of the squared sum of both rewards of an example, which keeps them around 0 "
        "(reward).",
        metavar="WEIGHT",
        at_least=0,
        tasks=("reward",),
    )
    ordinal: bool = _optimization(
        False,
        "Labels are integers on a scale, such as stars (classify): the head learns at each of them "
        "whether the label is above it.",
        tasks=("classify",),
    )
    class_weights: str = _optimization(
        "none",
        "Weights of the classes in the loss (classify): none, or balanced, which weighs each "
        "class by the inverse of its number of examples.",
        choices=("none", "balanced"),
        tasks=("classify",),
    )
    calibrate: bool = _evaluation(
        False,
        "Fit one temperature to the validation examples after training (classify), so that "
        "probabilities agree with accuracy; the pack keeps it.",
        tasks=("classify",),
    )
    reward: str | None = _generated(
        None,
        "Reward of a completion: a function of your own, FILE.py:NAME, or whether it is the "
        f"expected one by a metric ({', '.join(ANSWER_METRICS)}).",
        metavar="REWARD",
        tasks=("grpo",),
    )
    num_generations: int = _generated(
        8,
        "Completions of each prompt, whose rewards are compared.",
        at_least=2,
        memory=True,
        tasks=("grpo",),
    )


@cache
def tasks_of(setting: str) -> tuple[str, ...]:
    """Return the tasks that have a setting of a run; empty if all have it."""
    fields = (*dataclasses.fields(TaskSettings), *dataclasses.fields(DataConfig))
    names = next((facts_of(field).tasks for field in fields if field.name == setting), ())
    return tuple(task for task in TASKS if task in names)


def read_task_config(task: str, values: Mapping[str, Any]) -> Any:
    """Return the settings of a task: an object of its own class, or None if it has none.

    Raises:
        PackError: a setting is unknown, missing or wrong.
    """
    code = TASKS[task].config
    if code is None:
        if values:
            text = f"is for tasks that an installed package adds, but the task is {task}."
            raise setting_error(text, "task_config", code="conflict")
        return None

    plugin = TASKS.plugin(task)
    config = plugin.load(code)
    if not dataclasses.is_dataclass(config):
        raise plugin.fault(f"names {code} for its settings, which is no dataclass")

    typed = {}
    names = [field.name for field in dataclasses.fields(config)]
    for name, value in values.items():
        key = f"task_config.{name}"
        if name not in names:
            text = f"{key}: is not a setting of {task}. {did_you_mean(str(name), names)}"
            raise PackError(text, "unknown", "task_config")
        try:
            typed[name] = typed_value(value, typing.get_type_hints(config)[name], key)
        except (NameError, TypeError):
            raise plugin.fault(f"has a setting {name} of a type that is not read") from None

    for field in dataclasses.fields(config):
        has_default = field.default is not field.default_factory  # else both are MISSING
        if field.name not in typed and not has_default:
            raise setting_error(f"must be given for {task}.", f"task_config.{field.name}")

    try:
        json.dumps(typed)
        return config(**typed)
    except (TypeError, ValueError) as error:
        raise setting_error(f"{error}", "task_config") from None
