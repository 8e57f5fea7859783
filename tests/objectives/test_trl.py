"""Losses beside TRL's own trainers and transformers, on one small model: values and gradients."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mlx_packs import load_base
from mlx_packs.adapters.full_tensors import fresh_score_head, with_score_head
from mlx_packs.adapters.saved_modules import attach_method
from mlx_packs.adapters.trainable import find_method
from mlx_packs.bases.files import tiny_checkpoint
from mlx_packs.config.schema import DataConfig, LoRAConfig, TrainConfig
from mlx_packs.data.dataset import Batch, Dataset, FixedOrder
from mlx_packs.data.encoding import EncodingOptions, Example, Examples
from mlx_packs.data.formats import PREFERENCE, Row
from mlx_packs.data.labelled import encode_labelled
from mlx_packs.data.labels import COLUMNS, MULTI, REGRESSION, SINGLE, Classes
from mlx_packs.data.preferences import preference_set
from mlx_packs.data.rankings import RankingCollate, RerankPrompt, encode_rankings
from mlx_packs.data.sampler import GroupedSampler
from mlx_packs.data.texts import TextCollate, TextGroups
from mlx_packs.data.token_store import JoinedExamples
from mlx_packs.objectives.causal_lm import split_head
from mlx_packs.objectives.grpo import GRPO, advantages
from mlx_packs.objectives.objective import arrays_of
from mlx_packs.objectives.preference import PreferenceObjective, completion_sums
from mlx_packs.objectives.reader import label_reader, ranking_reader, score_reader
from mlx_packs.objectives.reference import PhaseReference, Reference
from mlx_packs.objectives.text_loss import (
    TextLoss,
    label_losses,
    ranking_losses,
    reward_losses,
)
from mlx_packs.runtime import mx
from tests.helpers.steps import make_batch

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("default")]
TARGETS = ("q_proj", "v_proj", "down_proj")
RANK, ALPHA = 4, 8.0
LORA = LoRAConfig(rank=RANK, alpha=ALPHA, target_modules=TARGETS)
QUIET = {"report_to": [], "use_cpu": True, "bf16": False, "gradient_checkpointing": False}
HEAD = {"task_type": "SEQ_CLS", "modules_to_save": ["score"]}
PROMPTS = ["a", "b", "c", "d"]  # one token each, since TRL's ORPO counts the prompt's loss too
CHOSEN = [" cat sat there", " longer answer of many words", " no", " it rains today"]
REJECTED = [" dog", " no idea at all", " yes and more of it", " sun"]
PAIRS = {"prompt": PROMPTS, "chosen": CHOSEN, "rejected": REJECTED}
RATED = {"prompt": PROMPTS, "completion": CHOSEN, "label": [True, False, True, True]}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A Llama of transformers with a tokenizer that has no template."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("trl")
    torch.manual_seed(0)

    config = transformers.LlamaConfig(
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=128,
        vocab_size=4096,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        head_dim=16,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.float32)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)

    folder = tmp_path_factory.mktemp("trl") / "llama"
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_checkpoint() / file, folder)
    return folder


def adapters_of(**changes):
    from peft import LoraConfig

    settings = {"target_modules": list(TARGETS), "task_type": "CAUSAL_LM", **changes}
    return LoraConfig(r=RANK, lora_alpha=ALPHA, **settings)


def classifier_of(checkpoint, outputs: int = 1, **config):
    """The model of transformers that reads numbers at the last token."""
    import torch
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(
        checkpoint, num_labels=outputs, dtype=torch.float32, **config
    )


def trainer_of(task: str, checkpoint, folder, rows: dict, batch_size: int = 4, **options):
    """TRL's trainer with PEFT's adapters."""
    import datasets
    import torch
    import trl
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.experimental import cpo, orpo

    kinds = {
        "dpo": (trl.DPOTrainer, trl.DPOConfig),
        "kto": (trl.KTOTrainer, trl.KTOConfig),
        "orpo": (orpo.ORPOTrainer, orpo.ORPOConfig),
        "cpo": (cpo.CPOTrainer, cpo.CPOConfig),
        "grpo": (trl.GRPOTrainer, trl.GRPOConfig),
        "reward": (trl.RewardTrainer, trl.RewardConfig),
    }
    trainer, config = kinds[task]
    if task == "reward":
        model = classifier_of(checkpoint)
    else:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    none = {"reward_funcs": lambda completions, **_: [0.0] * len(completions)}
    return trainer(
        model=model,
        args=config(
            output_dir=str(folder), per_device_train_batch_size=batch_size, **QUIET, **options
        ),
        train_dataset=datasets.Dataset.from_dict(rows),
        processing_class=AutoTokenizer.from_pretrained(checkpoint),
        peft_config=adapters_of(**(HEAD if task == "reward" else {})),
        **(none if task == "grpo" else {}),
    )


def examples_of(tokens, masks) -> list[Example]:
    """Examples of padded rows of tokens, given which of them are targets and which are no padding."""
    examples = []
    for row, (target, real) in zip(tokens, masks, strict=True):
        examples.append(Example(row[real].astype(np.int32), target[real].astype(bool), "row"))
    return examples


def interleaved(first: list, second: list) -> list:
    return [example for pair in zip(first, second, strict=True) for example in pair]


def examples_of_batch(task: str, batch: dict) -> tuple[list[Example], np.ndarray]:
    """The examples and labels of a batch of TRL's, as ours are ordered."""
    b = {key: value.numpy() for key, value in batch.items() if hasattr(value, "numpy")}

    def examples(target: str, prefix: str = "") -> list[Example]:
        targets = b[f"{prefix}{target}"]
        is_target = targets != -100 if target == "labels" else targets
        is_real = b[f"{prefix}attention_mask"].astype(bool)
        return examples_of(b[f"{prefix}input_ids"], zip(is_target, is_real, strict=True))

    if task in ("orpo", "cpo"):
        sides = [examples("labels", f"{side}_") for side in ("chosen", "rejected")]
        return interleaved(*sides), np.ones(len(PROMPTS), np.float32)
    own = examples("completion_mask")
    if task == "dpo":
        half = len(own) // 2
        return interleaved(own[:half], own[half:]), np.ones(half, np.float32)
    labels = np.array([bool(x) for x in batch["label"]], np.float32)
    return interleaved(own, examples("completion_mask", "KL_")), labels


def attached(checkpoint, train: TrainConfig):
    """The base and its adapters."""
    base = load_base(checkpoint)
    return base, find_method("lora").attach(base, LORA, train, "dense")


def with_head(checkpoint, train: TrainConfig, outputs: int = 1):
    """The base with a new head, and its adapters."""
    base = load_base(checkpoint)
    base = replace(base, model=with_score_head(base.model, fresh_score_head(base, 0, outputs)))
    return base, attach_method(base, replace(LORA, modules_to_save=("score",)), train, "dense")


def objective_of(checkpoint, train: TrainConfig, data: Dataset):
    base, trainable = attached(checkpoint, train)
    head = split_head(base.model)
    reference = Reference(
        base.model,
        PhaseReference(trainable, Path("unused"), bare=True),
        lambda inputs, layout: completion_sums(base.model, head, inputs, layout)[0],
        data,
    )
    reference.begin(fresh=True)
    return trainable, PreferenceObjective(base.model, head, train, reference)


def their_name(name: str) -> str:
    """What PEFT calls one of our tensors; all but the head's are transposed there."""
    if name == "score.weight":
        return "score.modules_to_save.default.weight"
    return f"{name.rpartition('.')[0]}.lora_{name[-1].upper()}.default.weight"


def check_loss_and_gradients(trainer, loss_of, trainable, objective, batch: Batch) -> None:
    """Both have the same adapters, which are not zero, and then the same loss and gradients.

    loss_of: TRL's loss, called once its adapters are those.
    """
    import torch

    mx.random.seed(3)
    moved = {n: t + 0.1 * mx.random.normal(t.shape) for n, t in trainable.tensors().items()}
    parameters = {
        name.removeprefix("base_model.model."): parameter
        for name, parameter in trainer.model.named_parameters()
        if parameter.requires_grad
    }
    assert {their_name(name) for name in moved} == set(parameters)

    def there(name: str, tensor) -> np.ndarray:
        return np.array(tensor if name == "score.weight" else tensor.T)

    for name, tensor in moved.items():
        parameters[their_name(name)].data = torch.tensor(there(name, tensor))
    trainer.model.train()
    loss = loss_of()
    loss.backward()

    trainable.load(moved, "test")
    arrays = arrays_of(objective.prepare(batch))

    def mean(tensors):
        trainable.load(tensors, "test")
        total, count = objective.loss(arrays)
        return total / count

    trainable.model.train()
    value, gradients = mx.value_and_grad(mean)(moved)
    assert value.item() == pytest.approx(loss.item(), abs=1e-4)
    for name, gradient in gradients.items():
        expected = parameters[their_name(name)].grad.numpy()
        assert np.abs(expected).max() > 1e-5
        np.testing.assert_allclose(there(name, gradient), expected, atol=1e-4)


CASES = {
    "dpo sigmoid": ({}, {}),
    "dpo robust": (
        {"loss": "robust", "label_smoothing": 0.1},
        {"loss_type": ["robust"], "label_smoothing": 0.1},
    ),
    "dpo hinge": ({"loss": "hinge"}, {"loss_type": ["hinge"]}),
    "dpo ipo": ({"loss": "ipo"}, {"loss_type": ["ipo"]}),
    "orpo": ({}, {}),
    "cpo sigmoid": ({}, {"loss_type": "sigmoid"}),
    "cpo smoothed": ({"label_smoothing": 0.2}, {"loss_type": "sigmoid", "label_smoothing": 0.2}),
    "cpo hinge": ({"loss": "hinge"}, {"loss_type": "hinge"}),
    "cpo ipo": ({"loss": "ipo"}, {"loss_type": "ipo"}),
    "simpo": (
        {"beta": 2.0, "simpo_gamma": 0.7},
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.7, "cpo_alpha": 0.0},
    ),
    "kto": (
        {"desirable_weight": 1.3},
        {"desirable_weight": 1.3, "train_sampling_strategy": "sequential"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_trl(checkpoint, tmp_path, case):
    task = case.split()[0]
    of_trl = "cpo" if task == "simpo" else task
    ours, theirs = CASES[case]
    rows = RATED if task == "kto" else PAIRS

    trainer = trainer_of(of_trl, checkpoint, tmp_path, rows, **theirs)
    batch = next(iter(trainer.get_train_dataloader()))
    examples, labels = examples_of_batch(of_trl, batch)

    data = Examples(examples, "preferences", "completion", labels=labels, per_row=2)
    training = preference_set(data, GroupedSampler(data.lengths, 2 * len(labels), 64))
    training = replace(training, sampler=FixedOrder([np.arange(len(examples))]))
    train = TrainConfig(task=task, batch_size=len(labels), **ours)
    trainable, objective = objective_of(checkpoint, train, training)
    (laid_out,) = training.once()

    check_loss_and_gradients(
        trainer,
        lambda: trainer.compute_loss(trainer.model, batch),
        trainable,
        objective,
        laid_out,
    )


@pytest.mark.parametrize("beta", [0.0, 0.2])
def test_loss_and_gradients_of_rewards_are_those_of_trl(checkpoint, tmp_path, beta):
    import torch

    rng = np.random.default_rng(0)
    prompts, lengths = rng.integers(5, 4000, (6, 5)), [7, 3, 5, 2, 6, 4]
    texts = rng.integers(5, 4000, (6, 7))
    rewards = np.array([[1.0, 0.2, -0.4], [0.5, 0.5, 2.0]], np.float32)

    options = {"num_generations": 3, "beta": beta, "loss_type": "grpo"}
    trainer = trainer_of("grpo", checkpoint, tmp_path, {"prompt": PROMPTS}, 6, **options)

    mask = np.arange(7)[None] < np.array(lengths)[:, None]
    inputs = {
        "prompt_ids": torch.tensor(prompts),
        "prompt_mask": torch.ones(6, 5, dtype=torch.long),
        "completion_ids": torch.tensor(np.where(mask, texts, 0)),
        "completion_mask": torch.tensor(mask.astype(np.int64)),
        "advantages": torch.tensor(advantages(rewards).reshape(-1)),
        "num_items_in_batch": torch.tensor(sum(lengths)),
    }

    if beta:
        with torch.no_grad(), trainer.model.disable_adapter():
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            both = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
            logits = trainer.model(ids, attention_mask=both).logits[:, 4:-1]
            chosen = inputs["completion_ids"][..., None]
            inputs["ref_per_token_logps"] = logits.log_softmax(-1).gather(-1, chosen)[..., 0]
    trainer.current_gradient_accumulation_steps = 1

    examples = [
        Example(np.array([*p, *t[:n]], np.int32), np.arange(5 + n) >= 5, "row")
        for p, t, n in zip(prompts, texts, lengths, strict=True)
    ]
    generated = make_batch(examples, range(6), 6, 32), rewards
    train = TrainConfig(task="grpo", beta=beta, num_generations=3, batch_size=2)
    base, trainable = attached(checkpoint, train)
    start = PhaseReference(trainable, Path("unused"), bare=True)
    objective = GRPO(base.model, split_head(base.model), train, lambda _: generated, start)
    check_loss_and_gradients(
        trainer,
        lambda: trainer._compute_loss(trainer.model, inputs),
        *(trainable, objective, Batch({}, 0, 0, (0, 1))),
    )


@pytest.mark.parametrize("centering", [0.0, 0.3])
def test_loss_and_gradients_of_a_reward_model_are_those_of_trl(checkpoint, tmp_path, centering):
    options = {"center_rewards_coefficient": centering or None, "disable_dropout": True}
    trainer = trainer_of("reward", checkpoint, tmp_path, PAIRS, **options)
    batch = next(iter(trainer.get_train_dataloader()))
    tokens, real = batch["input_ids"].numpy(), batch["attention_mask"].numpy().astype(bool)
    sides = examples_of(tokens, zip(real, real, strict=True))
    half = len(sides) // 2
    rows = Examples(interleaved(sides[:half], sides[half:]), "preferences", "last token")
    texts = JoinedExamples([rows])
    data = TextGroups.of_examples(PREFERENCE, rows, texts, np.tile(np.float32([1, 0]), (half, 1)))
    laid_out = TextCollate(half, 64)(data, np.arange(half))

    train = TrainConfig(task="reward", batch_size=half)
    base, trainable = with_head(checkpoint, train)
    reader = score_reader(base, base.model["score"], train.task)
    objective = TextLoss(reader, partial(reward_losses, centering=centering))
    check_loss_and_gradients(
        trainer,
        lambda: trainer.compute_loss(trainer.model, batch),
        trainable,
        objective,
        laid_out,
    )


TEXTS = ["Say red.", "No, a blue one, please, and quickly.", "green", "It is what it is."]
LABELLED = {
    MULTI: ([("a",), (), ("b", "c"), ("a", "c")], ("a", "b", "c")),
    REGRESSION: ([0.5, 2.0, -1.0, 3.0], ()),
    SINGLE: (["b", "a", "b", "c"], ("a", "b", "c")),
}


@pytest.mark.parametrize(
    ("problem", "weighted"), [(MULTI, False), (REGRESSION, False), (SINGLE, False), (SINGLE, True)]
)
def test_loss_and_gradients_of_a_classifier_are_those_of_transformers(
    checkpoint, problem, weighted
):
    import torch
    from peft import get_peft_model
    from transformers import AutoTokenizer

    labels, names = LABELLED[problem]
    classes = Classes(problem, names)
    values = classes.encoded(labels)

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = classifier_of(checkpoint, classes.outputs, problem_type=problem)
    model.config.pad_token_id = tokenizer.pad_token_id or 0
    adapted = get_peft_model(model, adapters_of(**HEAD))
    tokenizer.pad_token_id = model.config.pad_token_id
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    wanted = torch.tensor(values if problem == SINGLE else values.astype(np.float32))
    weights = np.array([0.5, 2.0, 1.5]) if weighted else None

    def loss_of():
        outputs = adapted(**batch, labels=wanted.long() if problem == SINGLE else wanted)
        if not weighted:
            return outputs.loss
        of_classes = torch.tensor(weights, dtype=torch.float32)
        return torch.nn.functional.cross_entropy(outputs.logits, wanted.long(), of_classes)

    train = TrainConfig(task="classify", batch_size=len(TEXTS))
    base, trainable = with_head(checkpoint, train, classes.outputs)
    reader = label_reader(base, base.model["score"], problem)
    losses = partial(label_losses, problem=problem)
    objective = TextLoss(reader, losses, class_weights=weights)

    column = COLUMNS[problem]
    rows = [
        Row(f"f:{i}", {"text": text, column: list(label) if problem == MULTI else label})
        for i, (text, label) in enumerate(zip(TEXTS, labels, strict=True))
    ]
    options = EncodingOptions(max_seq_length=64)
    examples = encode_labelled(rows, base.tokenizer, DataConfig(), options, classes)
    laid_out = TextCollate(6, 63)(examples, np.arange(len(rows)))  # two are padding
    trainer = SimpleNamespace(model=adapted)
    check_loss_and_gradients(trainer, loss_of, trainable, objective, laid_out)


RANKINGS = [
    {"query": "red", "documents": ["Say red.", "green", "no"], "labels": [2, 0, 1]},
    {"query": "blue", "documents": ["sun", "No, a blue one."], "labels": [0, 1]},
]


def pairwise(of_difference):
    def loss(scores, labels):
        ordered = labels[:, None] > labels[None]
        return of_difference((scores[:, None] - scores[None])[ordered]).mean()

    return loss


def infonce(scores, labels):
    best, others = scores[labels == labels.max()], scores[labels < labels.max()]
    return (best.logaddexp(others.logsumexp(0)) - best).mean()


RANKING_LOSSES = {
    "infonce": infonce,
    "listnet": lambda scores, labels: -(labels.softmax(0) * scores.log_softmax(0)).sum(),
    "ranknet": pairwise(lambda difference: -difference.sigmoid().log()),
    "margin": pairwise(lambda difference: (1 - difference).clamp(min=0)),
}


@pytest.mark.parametrize("name", RANKING_LOSSES)
def test_loss_and_gradients_of_a_reranker_are_those_of_transformers(checkpoint, name):
    import torch
    from peft import get_peft_model

    train = TrainConfig(task="rerank", head="score", loss=name)
    base, trainable = with_head(checkpoint, train)
    prompt = RerankPrompt(base.tokenizer, "Find it", 120)
    rows = [Row(f"f:{i}", row) for i, row in enumerate(RANKINGS)]
    rankings = encode_rankings(rows, prompt)
    laid_out = RankingCollate(3, 120)(rankings, np.arange(2))  # with a query of padding

    adapted = get_peft_model(classifier_of(checkpoint), adapters_of(**HEAD))

    def loss_of():
        losses = []
        for i, labels in enumerate(rankings.labels):
            inputs = [torch.tensor(tokens)[None].long() for tokens in rankings.tokens(i)]
            scores = torch.stack([adapted(tokens).logits[0, 0] for tokens in inputs])
            losses.append(RANKING_LOSSES[name](scores, torch.tensor(labels[: len(inputs)])))
        return torch.stack(losses).mean()

    reader = ranking_reader(base, base.model["score"])
    losses = partial(ranking_losses, loss=name, margin=train.rank_margin)
    objective = TextLoss(reader, losses)
    trainer = SimpleNamespace(model=adapted)
    check_loss_and_gradients(trainer, loss_of, trainable, objective, laid_out)
