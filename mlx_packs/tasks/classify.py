"""Classification of texts and chats: one label, several labels, or a score."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ..adapters.full_tensors import fresh_score_head
from ..adapters.spec import SCORE
from ..config.lora import LoRAConfig
from ..data.dataset import Batch
from ..data.encoding import EncodingOptions
from ..data.labelled import encode_labelled
from ..data.labels import COLUMNS, REGRESSION, Classes, find_classes
from ..data.rows import Splits
from ..data.texts import TextGroups
from ..errors import PackError
from ..evaluation.classification import (
    VALIDATED,
    Predictions,
    class_score,
    fit_temperature,
    predict,
    validated_numbers,
)
from ..evaluation.scores import MetricScore
from ..objectives.objective import Objective
from ..objectives.reader import label_reader
from ..objectives.score import check_best
from ..objectives.text_loss import TextLoss, label_losses
from ..packs.base import Base
from .phases import PhaseData, RunPhase, encode_each
from .task import Binding, Summary, Trained, summarized
from .texts import TextsTask

_MOST_SHOWN = 8  # labels in a line


class ClassifyTask(TextsTask):
    """``--task classify``."""

    validated = VALIDATED

    classes: Classes

    def target(self, base: Base) -> tuple[Base, LoRAConfig]:
        """Return the base with a head besides, whose rows are known once the labels are."""
        scored, lora = self.with_trained_head(base)
        self.head = scored.model[SCORE]
        return scored, lora

    def encode(
        self, base: Base, phases: Sequence[RunPhase], splits: Sequence[Splits]
    ) -> list[PhaseData]:
        self.classes = self._find_classes(phases, splits)
        fresh = fresh_score_head(base, self.train.seed, self.classes.head_rows)
        self.head.weight = fresh.weight

        data = super().encode(base, phases, splits)
        check_best(self.train.best, validated_numbers(self.classes.problem))
        self._check_calibration(data[-1])
        return data

    def planned_facts(self) -> dict[str, int]:
        return {"outputs": self.classes.head_rows}

    def _find_classes(self, phases: Sequence[RunPhase], splits: Sequence[Splits]) -> Classes:
        """Return the classes of all phases; a PackError if a setting excludes them."""
        rows = (row for read in splits for row in read.rows["train"])
        source = " + ".join(dict.fromkeys(read.source for read in splits))
        classes = find_classes(rows, phases[0].columns, source)

        column = COLUMNS[classes.problem]
        has_one = column == "label"
        unfit = {
            "--class-weights balanced": self.train.class_weights == "balanced" and not has_one,
            "--calibrate": self.train.calibrate and classes.problem == REGRESSION,
        }
        for option, is_unfit in unfit.items():
            if is_unfit:
                text = f"{option}: does not apply to examples with '{column}'. Leave it out."
                raise PackError(text, "conflict")

        if self.train.ordinal:
            return classes.on_scale()
        return classes

    def _check_calibration(self, data: PhaseData) -> None:
        if self.train.calibrate and "valid" not in data.splits:
            raise PackError(
                "--calibrate: needs validation examples, and there is no valid split. Add a "
                "valid.jsonl, or leave it out.",
                "conflict",
            )

    def encoded(self, phase: RunPhase, read: Splits) -> dict[str, TextGroups]:
        train = phase.train
        limit = self.longest_text(train)
        options = EncodingOptions(max_seq_length=limit, vocab_size=self.base.vocab_size)
        settings = self.base.tokenizer, phase.columns, options, self.classes, train.num_proc

        def encode(split: str, _: Callable[[], None]) -> TextGroups:
            return encode_labelled(read.rows[split], *settings)

        return encode_each(read, encode, self.display)

    def described(self, examples: Mapping[str, TextGroups]) -> str:
        classes = self.classes
        if classes.problem == REGRESSION:
            return "examples · a score each"

        shown = ", ".join(classes.labels[:_MOST_SHOWN])
        if len(classes.labels) > _MOST_SHOWN:
            shown += ", …"
        kind = " on a scale" if self.train.ordinal else ""
        return f"examples · {len(classes.labels)} labels{kind} ({shown})"

    def bind(self, binding: Binding) -> list[Objective]:
        """Return the loss of the labels, which has the class weights of its phase."""
        model = binding.trainable.model
        return [self._objective(model, self._class_weights(data)) for data in binding.data]

    def _objective(self, model: Any, weights: np.ndarray | None) -> TextLoss:
        problem = self.classes.problem
        reader = label_reader(replace(self.base, model=model), model[SCORE], problem)
        losses = partial(label_losses, problem=problem)
        return TextLoss(reader, losses, score=self._score, class_weights=weights)

    def _class_weights(self, data: PhaseData) -> np.ndarray | None:
        """Return examples / (classes x examples of the class), [classes]; None without weights."""
        if self.train.class_weights == "none":
            return None

        values = data.splits["train"].labels
        counts = np.bincount(values, minlength=self.classes.outputs)
        return len(values) / (np.count_nonzero(counts) * np.maximum(counts, 1))

    def _score(self, objective: Any, batches: Sequence[Batch], advance: Any = None) -> MetricScore:
        return class_score(predict(objective, batches, self.classes.problem, advance))

    def summary(self, trained: Trained) -> Summary:
        last = trained.last
        classes = self.classes
        objective = self._objective(trained.trainable.model, None)
        held_out = predict(objective, last.held_out.once(), classes.problem)

        calibrated = {}
        if self.train.calibrate:
            classes, calibrated = self._calibrated(objective, last, held_out)

        named = {
            "task": "classify",
            "loss_on": "last token",
            "class_weights": self.train.class_weights,
        }
        report = {
            "labels": len(classes.labels),
            "mistakes": held_out.mistakes(classes.labels),
        }
        facts = {"classifier": classes.to_json()}
        return summarized(trained, named, facts, report, calibrated)

    def _calibrated(
        self, objective: Any, data: PhaseData, held_out: Predictions
    ) -> tuple[Classes, dict[str, float | None]]:
        """Return the classes with a temperature, and the held-out metrics that depend on it."""
        valid = data.splits["valid"]
        chosen = np.arange(valid.count)
        batches = self.evaluation(data.phase, valid, chosen).once()
        fitted_to = predict(objective, batches, self.classes.problem)
        if fitted_to.all_right:
            text = "1, since all validation examples are right, which determines no other"
            self.display.line("temperature", text)
            return self.classes, {}

        temperature = fit_temperature(fitted_to)
        metrics = held_out.at(temperature).metrics()
        names = ("log_loss", "log_loss_se", "calibration_error", "calibration_error_se")
        values = {f"calibrated_{name}": metrics[name] for name in names}
        if data.held_out_split == "valid":
            self.display.line("note", "the temperature is fitted to the examples it is shown on")

        text = (
            f"{temperature:.3f}, fitted to {valid.count:,} valid examples · held-out calibration "
            f"error {metrics['calibration_error']:.4f}, log loss {metrics['log_loss']:.4f}"
        )
        self.display.line("temperature", text)
        return replace(self.classes, temperature=temperature), values
