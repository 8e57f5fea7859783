"""A pack that classifies, attached to its base, and what it says of texts and chats."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
import numpy as np

from ..bases.model import BaseModel
from ..bases.tokenizer import beginning
from ..config.data import COLUMN_SETTINGS, DataConfig
from ..data.batches import TokenCollate
from ..data.dataset import by_length
from ..data.encoding import EncodingOptions, Examples
from ..data.formats import Row
from ..data.labelled import NO_LIMIT, LabelCollate, encode_labelled, fitted
from ..data.labels import MULTI, REGRESSION, Classes, probabilities
from ..errors import PackError
from ..objectives.classification import ScoreHead
from ..objectives.reward_model import HeadReader
from .compatibility import text_limit
from .pack import Pack

Input = str | Sequence[Mapping] | Mapping  # a text, messages, or a row with either


@dataclass(frozen=True)
class Prediction:
    """What a classifier says of one text or chat.

    Attributes:
        label: The most likely label. If several may apply, a list of those above 50 %; of a
            regression the score.
        probabilities: The probability of each label, the most likely first. A score has none.
    """

    label: str | list[str] | float
    probabilities: dict[str, float]

    def to_json(self, top: int | None = None) -> dict[str, Any]:
        """Return label and probabilities, of at most ``top`` labels, or the score."""
        if isinstance(self.label, float):
            return {"score": self.label}

        name = "labels" if isinstance(self.label, list) else "label"
        shown = dict(list(self.probabilities.items())[:top])
        return {name: self.label, "probabilities": shown}


@dataclass(frozen=True)
class OpenClassifier:
    """A classifier that is attached to its base."""

    base: BaseModel
    classes: Classes
    names: DataConfig  # of columns, and the chat template as it was trained
    limit: int  # most tokens of an example
    objective: ScoreHead

    def classify(self, rows: Sequence[Row], batch_size: int) -> list[Prediction]:
        """Return a prediction for each row, in their order.

        Raises a PackError if a row says nothing, or a chat is too long to be read.
        """
        examples = self.encode(rows)
        logits = np.zeros((len(rows), self.classes.outputs))
        for order in self.orders(examples, batch_size):
            logits[order] = self.logits(examples, order)
        return self.predictions(logits)

    def encode(self, rows: Sequence[Row]) -> Examples:
        """Return rows as examples, in their order; no model is used. Errors as of `classify`."""
        options = EncodingOptions(vocab_size=self.base.vocab_size)
        tokenizer = self.base.tokenizer
        rows = [self._beginning(row) for row in rows]
        encoded = encode_labelled(
            rows, tokenizer, self.names, options, self.classes, labelled=False
        )
        examples = fitted(encoded, tokenizer, self.classes, self.limit)

        if examples.dropped:
            raise PackError(
                f"{examples.dropped} of these chats have more than {self.limit} tokens, and the "
                "end of a chat cannot be cut. Leave them out.",
                "data",
            )
        return examples

    def _beginning(self, row: Row) -> Row:
        """Return a row whose text is no longer than what is read of it."""
        column = self.names.text_feature
        text = row.value.get(column)
        if self.classes.chat or not isinstance(text, str):
            return row
        return row.with_value({**row.value, column: beginning(text, self.limit)})

    def orders(self, examples: Examples, batch_size: int) -> Sequence[np.ndarray]:
        """Return which examples are computed together, those of like length."""
        return by_length(examples.lengths, batch_size, np.arange(len(examples))).orders

    def logits(self, examples: Examples, order: np.ndarray) -> np.ndarray:
        """Return the logits of some examples, [N, classes], in evaluation mode."""
        collate = LabelCollate(TokenCollate(len(order), NO_LIMIT))
        self.objective.model.eval()
        return self.objective.outputs(collate(examples, order))

    def predictions(self, logits: np.ndarray) -> list[Prediction]:
        likely = probabilities(logits / self.classes.temperature, self.classes.problem)
        return [self._prediction(*each) for each in zip(logits, likely, strict=True)]

    def _prediction(self, logits: np.ndarray, likely: np.ndarray) -> Prediction:
        labels = self.classes.labels
        if self.classes.problem == REGRESSION:
            return Prediction(float(logits[0]), {})

        order = np.argsort(-likely, kind="stable").tolist()
        ordered = {labels[i]: float(likely[i]) for i in order}
        if self.classes.problem == MULTI:
            return Prediction([labels[i] for i in order if logits[i] > 0], ordered)
        return Prediction(labels[order[0]], ordered)


def classify(
    base: BaseModel, inputs: Sequence[Input], pack: Pack, head: nn.Module, batch_size: int
) -> list[Prediction]:
    """As `packs.base.Base.classify`."""
    if batch_size < 1:
        raise PackError(f"--batch-size {batch_size}: must be at least 1.")
    if isinstance(inputs, (str, Mapping)):
        raise PackError("texts: must be a list, but is one text.", flag="texts")

    inputs = list(inputs)
    if not inputs:
        return []

    classifier = classifier_of(base, pack, head)
    rows = [input_row(f"texts[{i}]", each, classifier.names) for i, each in enumerate(inputs)]
    return classifier.classify(rows, batch_size)


def input_row(where: str, value: Any, names: DataConfig) -> Row:
    """Return what is to be classified as a row; a PackError if it is none of `Input`."""
    if isinstance(value, str):
        return Row(where, {names.text_feature: value})
    if isinstance(value, list):
        return Row(where, {names.chat_feature: value})
    if isinstance(value, Mapping):
        return Row(where, value)

    raise PackError(
        f"{where}: must be a text, a list of messages or a row, but is a {type(value).__name__}.",
        "data",
    )


def classifier_of(base: BaseModel, pack: Pack, head: nn.Module) -> OpenClassifier:
    """Return the classifier of a pack whose adapters are on a base; ``head`` is its score head."""
    recipe = pack._part("recipe")
    settings = (*COLUMN_SETTINGS, "chat_template", "template_kwargs", "template_date")
    names = DataConfig(**{name: recipe[name] for name in settings if recipe.get(name)})
    limit = text_limit(pack.manifest, base.config)
    classes = Classes.of(pack.manifest)
    reader = HeadReader(base.model, head, base.name, "classify")
    objective = ScoreHead(reader, classes.problem)
    return OpenClassifier(base, classes, names, limit, objective)
