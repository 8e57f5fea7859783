"""The seam of training: a task is one class and one name."""

import json

import mlx.nn as nn
import numpy as np

from mlx_packs import LoRAConfig, Pack, TrainConfig, train_pack
from mlx_packs.config.choices import TASKS, TaskFacts
from mlx_packs.data.batches import TokenCollate
from mlx_packs.data.dataset import Batch, Dataset, FixedOrder
from mlx_packs.data.encoding import Example, Examples
from mlx_packs.objectives.objective import Objective, arrays_of
from mlx_packs.objectives.score import StoredScore
from mlx_packs.runtime import mx
from mlx_packs.tasks.phases import PhaseData
from mlx_packs.tasks.task import Summary, Task
from tests.helpers.bases import small_base
from tests.helpers.rows import chat, write_rows

WORD = 42


class OneWord(Objective):
    """The same word after every token."""

    unit = "words"

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def loss(self, inputs, layout=()) -> tuple[mx.array, mx.array]:
        tokens = inputs["tokens"]
        targets = mx.full(tokens.shape, WORD)
        total = nn.losses.cross_entropy(self.model(tokens), targets, reduction="sum")
        return total, mx.array(float(tokens.size))

    def score(self, data: Dataset, advance=None) -> StoredScore:
        return self.mean(data.once())

    def score_trained(self, batch: Batch) -> StoredScore:
        return self.mean([batch])

    def mean(self, batches: list[Batch]) -> StoredScore:
        self.model.eval()
        sums = [self.loss(arrays_of(batch)) for batch in batches]
        return StoredScore(sum(s.item() for s, _ in sums) / sum(n.item() for _, n in sums))


class OneWordTask(Task):
    """A task that no other file knows."""

    def encode(self, base, phases, splits) -> list[PhaseData]:
        def example(row) -> Example:
            tokens = base.tokenizer.encode(row.value["messages"][0]["content"])[:9]
            return Example(np.array(tokens, np.int32), np.arange(9) > 0, "row")

        (read,), (phase,) = splits, phases
        texts = {
            split: Examples([*map(example, read.rows[split])], "chat", "all")
            for split in read.present()
        }
        train = self.evaluation(phase, texts["train"], np.arange(3))
        return [PhaseData(self, phase, texts, train)]

    def evaluation(self, phase, examples, chosen) -> Dataset:
        return Dataset(examples, TokenCollate(1, 8), FixedOrder([*chosen[:, None]]))

    def sampled(self, data: PhaseData) -> np.ndarray:
        return np.arange(2)

    def bind(self, binding) -> list[OneWord]:
        return [OneWord(binding.trainable.model)]

    def summary(self, trained) -> Summary:
        before, after = (score.value for score in trained.ends())
        losses = {"loss_before": before, "loss_after": after}
        return Summary({"split": "valid", "rows": 2, **losses}, {"task": "one-word"})

    @staticmethod
    def report_lines(report) -> list[str]:
        return [f"done    {report['loss_after']}"]


def test_a_task_is_one_class_and_one_name(tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, "one-word", TaskFacts(f"{__name__}:OneWordTask", "decoder"))
    words = "one two six".split()
    rows = [chat(f"Say {word} and nothing else, please, friend.", "Yes.") for word in words]
    data = write_rows(tmp_path / "d", train=rows, valid=rows[:2])
    settings = {"task": "one-word", "iters": 6, "learning_rate": 1e-2, "matmul_path": "dense"}
    train = TrainConfig(**settings, steps_per_report=2, steps_per_eval=4, save_every=3)

    run = train_pack(small_base(), data, LoRAConfig(rank=2), train, tmp_path / "p")
    report = run.report
    assert report["loss_after"] < report["loss_before"] - 1
    assert report["trained_words"] == 6 * 8 and report["words_per_s"] > 0
    assert [line["batch"] for line in run.curve if "valid_loss" in line] == [4]

    manifest = Pack.open(tmp_path / "p").manifest
    assert manifest["objective"] == {"task": "one-word"}
    assert manifest["recipe"]["task"] == "one-word"
    assert manifest["data"]["rows"] == {"train": 3, "valid": 2}

    longer = TrainConfig(**{**settings, "iters": 8})
    resumed = train_pack(
        small_base(), data, LoRAConfig(rank=2), longer, tmp_path / "p", resume=True
    )
    assert resumed.report["steps"] == 8

    lines = (tmp_path / "p-run" / "metrics.jsonl").read_text().splitlines()
    assert {key for line in lines for key in json.loads(line)} >= {"words_per_s", "trained_words"}
