"""Packs with a head, attached to their base: labels of texts and chats, rewards of completions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
import numpy as np

from ..bases.model import BaseModel
from ..bases.tokenizer import beginning
from ..config.data import COLUMN_SETTINGS, DataConfig
from ..data.encoding import EncodingOptions, Examples, encode
from ..data.formats import COMPLETION, Row
from ..data.in_memory import Data, source_of
from ..data.labelled import NO_LIMIT, encode_labelled
from ..data.labels import MULTI, REGRESSION, Classes, probabilities
from ..errors import PackError
from ..objectives.reader import Reader, label_reader, score_reader
from .compatibility import text_limit
from .manifest import template_kwargs_of
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
    reader: Reader  # of its logits

    def classify(self, rows: Sequence[Row], batch_size: int) -> list[Prediction]:
        """Return predictions; a PackError if a row says nothing, or a chat is too long."""
        return self.predictions(self.logits(self.texts(rows), batch_size))

    def texts(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """Return the tokens that are read of each row; errors as of `classify`."""
        options = EncodingOptions(max_seq_length=self.limit, vocab_size=self.base.vocab_size)
        tokenizer = self.base.tokenizer
        rows = [self._beginning(row) for row in rows]
        examples = encode_labelled(
            rows, tokenizer, self.names, options, self.classes, labelled=False
        )

        if examples.dropped:
            raise PackError(
                f"{examples.dropped} of these chats have more than {self.limit} tokens, and the "
                "end of a chat cannot be cut. Leave them out.",
                "data",
            )
        return [tokens for i in range(len(examples)) for tokens in examples.tokens(i)]

    def _beginning(self, row: Row) -> Row:
        """Return a row whose text is no longer than what is read of it."""
        column = self.names.text_feature
        text = row.value.get(column)
        if self.classes.chat or not isinstance(text, str):
            return row
        return row.with_value({**row.value, column: beginning(text, self.limit)})

    def logits(self, texts: Sequence[np.ndarray], batch_size: int) -> np.ndarray:
        """Return the logits of texts by their tokens, [N, classes], in evaluation mode."""
        self.reader.model.eval()
        return self.reader.of_rows(texts, batch_size).astype(np.float64)

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
    reader = label_reader(base, head, classes.problem)
    return OpenClassifier(base, classes, names, limit, reader)


def rewards(
    base: BaseModel, completions: Data, pack: Pack, head: nn.Module, batch_size: int
) -> np.ndarray:
    """float32 [N]; `packs.base.Base.rewards` has the rest."""
    source = source_of(completions)
    if not hasattr(source, "splits"):
        raise PackError(
            "rewards: completions must be examples in memory, but got a name.", flag="completions"
        )

    rows = source.splits["train"]
    if not len(rows):
        raise PackError("rewards: there are no completions.", flag="completions")

    options = EncodingOptions("completion", NO_LIMIT, base.vocab_size)
    columns = DataConfig(template_kwargs=template_kwargs_of(pack.manifest))
    encoded = encode(rows, base.tokenizer, columns, options, COMPLETION)
    _check_lengths(encoded, text_limit(pack.manifest, base.config))

    reader = score_reader(base, head, "reward")
    return reader.of_rows([example.tokens for example in encoded.items], batch_size)


def _check_lengths(examples: Examples, limit: int) -> None:
    """Raise a PackError for a completion that training would have dropped for its length."""
    too_long = np.flatnonzero(examples.lengths >= limit)
    if len(too_long):
        first = int(too_long[0])
        raise PackError(
            f"{examples.items[first].where}: has {examples.lengths[first]:,} tokens with its "
            f"prompt, but the pack scores completions of fewer than {limit:,}, as in its training. "
            "Shorten it.",
            "data",
            "completions",
        )
