"""Formats of rows that single tasks train on: which task each is of, and rows as other libraries have them."""

import pytest

from mlx_packs.config.choices import TASKS, TaskFacts
from mlx_packs.config.data import DataConfig
from mlx_packs.config.schema import TrainConfig
from mlx_packs.data.dataset import Batch
from mlx_packs.data.left_out import template_notes
from mlx_packs.data.pairs import PairCollate, encode_pairs
from mlx_packs.data.rankings import RerankPrompt, encode_rankings
from mlx_packs.data.row_format import Row, RowFormat
from mlx_packs.data.texts import TextGroups
from mlx_packs.tasks.phases import resolve_phases
from tests.helpers.errors import raises
from tests.helpers.rows import write_rows

# Two numbers as texts, which also match the format of texts.
SUMS = (RowFormat("sums", ("text", "other")),)


@pytest.fixture
def sum_task(monkeypatch) -> str:
    """A task with a format of its own, as an installed package adds one."""
    formats = f"{__name__}:SUMS"
    facts = TaskFacts("mlx_packs.tasks.causal_lm:CausalLMTask", "decoder", formats=formats)
    monkeypatch.setitem(TASKS, "sum", facts)
    return "sum"


def test_rows_of_a_task_of_a_package_have_its_format_first(sum_task, tmp_path):
    folder = write_rows(tmp_path, train=[{"text": "1", "other": "2"}] * 4)
    columns = DataConfig(data=str(folder))
    own = resolve_phases(TrainConfig(task=sum_task), columns)[0]
    other = resolve_phases(TrainConfig(), columns)[0]
    assert own.load_rows().format is SUMS[0]
    assert other.load_rows().format.name == "text"


COLUMNS = DataConfig()


def rows_of(values: list[dict]) -> list[Row]:
    return [Row(f"f:{i + 1}", value) for i, value in enumerate(values)]


@pytest.fixture
def pairs_of(tokenizer):
    def read(*values: dict) -> tuple[TextGroups, list[list[str]]]:
        pairs = encode_pairs(rows_of(list(values)), tokenizer._tokenizer, 50)
        return pairs, [
            [tokenizer.decode(text, skip_special_tokens=True) for text in pairs.tokens(i)]
            for i in range(len(pairs))
        ]

    return read


@pytest.fixture
def rankings_of(tokenizer):
    def read(*values: dict) -> TextGroups:
        return encode_rankings(rows_of(list(values)), RerankPrompt(tokenizer, "find", 200))

    return read


FORMS = {
    "numbered columns": {"anchor": "a", "positive": "p", "negative_1": "n", "negative_2": "m"},
    "a list": {"anchor": "a", "positive": "p", "negative": ["n", "m"]},
    "a list as JSON": {"anchor": "a", "positive": "p", "negatives": '["n", "m"]'},
    "FlagEmbedding": {"query": "a", "pos": ["p"], "neg": ["n", "m"]},
}


@pytest.mark.parametrize("row", FORMS.values(), ids=FORMS)
def test_all_negatives_of_an_anchor_are_read(pairs_of, rankings_of, tokenizer, row):
    pairs, texts = pairs_of(row)
    assert texts == [["a", "p", "n", "m"]] and pairs.format.name == "triplets"
    assert template_notes(rows_of([row]), pairs.format, COLUMNS, tokenizer) == []

    rankings = rankings_of(row)
    assert rankings.labels[0].tolist() == [1, 0, 0] and len(rankings.tokens(0)) == 3


@pytest.mark.parametrize("name", ["document", "documents", "pos", "positive"])
def test_a_query_and_what_answers_it_are_a_pair(pairs_of, name):
    pairs, texts = pairs_of({"query": "a", name: ["p"]}, {"query": "b", name: ["q", "r"]})
    assert pairs.format.name == "pairs"
    assert texts == [["a", "p"], ["b", "q"], ["b", "r"]]  # a pair for each positive
    assert pairs.where_of([0, 1, 2]) == ["f:1", "f:2", "f:2"]


def test_fewer_negatives_are_repeated(pairs_of):
    _, texts = pairs_of(
        {"anchor": "a", "positive": "p", "negative": ["n", "m", "o"]},
        {"anchor": "b", "positive": "q", "negative": "x"},
        {"anchor": "c", "positive": "r", "negative": ["y", "z"]},
    )
    assert [each[2:] for each in texts] == [["n", "m", "o"], ["x", "x", "x"], ["y", "z", "y"]]


def test_a_batch_has_an_array_for_each_text(pairs_of):
    pairs, _ = pairs_of(FORMS["a list"], {**FORMS["a list"], "negative": ["x", "y"]})
    batch: Batch = PairCollate(2, 50)(pairs, [0, 1])
    assert [name for name in batch.inputs if name not in ("lengths", "weights")] == [
        *("first", "second", "third", "text_4")
    ]
    assert batch.inputs["lengths"].shape == (2, 4)


def test_documents_of_a_query_are_one_row(rankings_of):
    with raises("data", None, "f:1", "{query, documents, labels}"):
        rankings_of({"query": "a", "document": "x", "label": 1})


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"anchor": "a", "positive": "p", "negative": []}, "'negative' is empty"),
        ({"anchor": "a", "positive": "p", "negative_1": 3}, "'negative_1' must be a text or"),
        ({"anchor": "a", "positive": "p", "negative": ["n"] * 40}, "has 40 negatives"),
        ({"anchor": ["a"], "positive": "p"}, "'anchor' must be a text"),
        ({"query": "a", "document": "p", "label": 1}, "--task rerank"),
    ],
)
def test_what_is_no_pair_is_named(pairs_of, row, fault):
    with raises("data", None, "f:1", fault):
        pairs_of(row)


def test_scored_sentences_may_have_a_label(pairs_of):
    pairs, _ = pairs_of({"sentence1": "a", "sentence2": "b", "label": "1"})
    assert pairs.labels.tolist() == [1] and pairs.labels.dtype.kind == "f"
