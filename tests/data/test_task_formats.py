"""Formats of rows that one task trains on, and that its facts name."""

import pytest

from mlx_packs.config.choices import TASKS, TaskFacts
from mlx_packs.config.data import DataConfig
from mlx_packs.config.schema import TrainConfig
from mlx_packs.data.formats import FORMATS, PREFERENCE, formats_of, tasks_of
from mlx_packs.data.row_format import Row, RowFormat
from mlx_packs.data.task_formats import PAIR_FORMATS, RANKING_FORMATS
from mlx_packs.tasks.phases import resolve_phases
from tests.helpers.rows import write_rows


class Sums(RowFormat):
    """Two numbers as texts, which also match the format of texts."""

    name = "sums"

    def columns(self, names: DataConfig) -> tuple[str, ...]:
        return ("text", "other")

    def texts(self, row: Row, names: DataConfig) -> list[str]:
        return [row.value["text"], row.value["other"]]


SUMS = (Sums(),)


@pytest.fixture
def sum_task(monkeypatch) -> str:
    """A task with a format of its own, as an installed package adds one."""
    formats = f"{__name__}:SUMS"
    facts = TaskFacts("mlx_packs.tasks.causal_lm:CausalLMTask", "decoder", formats=formats)
    monkeypatch.setitem(TASKS, "sum", facts)
    return "sum"


def test_a_format_of_a_task_tells_which():
    assert {tuple(tasks_of(each)) for each in PAIR_FORMATS} == {("embedding",)}
    assert {tuple(tasks_of(each)) for each in RANKING_FORMATS} == {("rerank",)}
    assert tasks_of(FORMATS[0]) == [] and "dpo" in tasks_of(PREFERENCE)


def test_a_task_looks_for_its_own_formats_first():
    assert formats_of("lm") == FORMATS
    assert formats_of("rerank")[: len(RANKING_FORMATS)] == RANKING_FORMATS
    assert set(formats_of("rerank")) == set(FORMATS)


def test_rows_of_a_task_of_a_package_have_its_format_first(sum_task, tmp_path):
    folder = write_rows(tmp_path, train=[{"text": "1", "other": "2"}] * 4)
    columns = DataConfig(data=str(folder))
    own = resolve_phases(TrainConfig(task=sum_task), columns)[0]
    other = resolve_phases(TrainConfig(), columns)[0]
    assert own.load_rows().format is SUMS[0]
    assert other.load_rows().format.name == "text"
