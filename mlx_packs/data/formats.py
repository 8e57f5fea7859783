"""Row formats: which columns each has, and what becomes of a row.

To add a format, write its class and name it in `FORMATS`.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple

from ..bases.tokenizer import text_tokens
from ..config.choices import LOSSES
from ..config.data import DataConfig
from ..errors import PackError
from .bad_rows import RowError
from .chat_formats import Alpaca, Chat, Completion, ShareGPT
from .conversations import Span
from .images import plain_text
from .row_format import Row as Row
from .row_format import RowFormat as RowFormat
from .row_format import TokenFormat as TokenFormat
from .row_format import check_unicode as check_unicode
from .row_format import plain, shown, text_of

_MOST_SCORE = 3e38  # of float32
_MOST_LABEL = 1e6
_PROMPT_TOKENS = 32  # that are to be continued; of a short text at most half


class Text(TokenFormat):
    """A plain text, all of which is supervised."""

    name = "text"
    loss_on = "all"
    special_tokens = True

    def columns(self, names: DataConfig) -> tuple[str, ...]:
        return (names.text_feature,)

    def render(
        self, row: Row, names: DataConfig, loss_on: str, tokenizer: Any
    ) -> tuple[str, list[Span]]:
        text = text_of(row, names.text_feature)
        if not text:
            raise row.error(f"'{names.text_feature}' is empty.", "empty")
        return text, []

    def prompt(self, row: Row, names: DataConfig, tokenizer: Any) -> tuple[str, list[int]]:
        tokens = text_tokens(tokenizer, row.value[names.text_feature])
        tokens = tokens[: max(1, min(_PROMPT_TOKENS, len(tokens) // 2))]
        shown = tokens[1:] if tokens[0] == tokenizer.bos_token_id else tokens
        return tokenizer.decode(shown), tokens

    def texts(self, row: Row, names: DataConfig) -> list[str]:
        return [text_of(row, names.text_feature)]

    def resolve_loss_on(self, loss_on: str | None) -> str:
        """Anything but ``all`` is an error: a text has no prompt that could be left out."""
        if loss_on not in (None, "all"):
            raise PackError(
                f"--loss-on {loss_on}: text examples have no prompt. Use --loss-on all.", "conflict"
            )
        return "all"


class PairFormat(RowFormat):
    """Rows of sentence-transformers, which an encoder trains on."""

    text_columns: ClassVar[tuple[str, ...]]
    score_column: ClassVar[str | None] = None  # None where rows have no score

    @property
    def has_anchors(self) -> bool:
        """Whether the first text of a row is a query, which the others answer."""
        return "anchor" in self.text_columns

    @property
    def has_negatives(self) -> bool:
        """Whether every row has a negative of its own."""
        return "negative" in self.text_columns

    @property
    def losses(self) -> list[str]:
        """The losses that the columns suffice for; the first is what ``auto`` takes."""
        return [
            name
            for name, facts in LOSSES.items()
            if facts.scored == bool(self.score_column) and facts.texts <= len(self.text_columns)
        ]

    def columns(self, names: DataConfig) -> tuple[str, ...]:
        if not self.score_column:
            return self.text_columns
        return (*self.text_columns, self.score_column)

    def texts(self, row: Row, names: DataConfig) -> list[str]:
        return [text_of(row, column) for column in self.text_columns]

    def usable(self, row: Row, names: DataConfig) -> tuple[list[str], float | None]:
        """Return the texts of a row and its score, or the RowError that says what is wrong."""
        texts = self.texts(row, names)
        for column, text in zip(self.text_columns, texts, strict=True):
            check_unicode(row, text)
            if not text.strip():
                raise row.error(f"'{column}' is empty.", "empty")

        if self.score_column is None:
            return texts, None
        return texts, self._score(row, self.score_column)

    def _score(self, row: Row, column: str) -> float:
        """In tables a score is a text."""
        value = row.value[column]
        is_number = isinstance(value, (int, float, str)) and not isinstance(value, bool)

        with suppress(ValueError, OverflowError):
            if is_number and abs(score := float(value)) <= _MOST_SCORE:  # not even NaN
                return score
        raise row.error(f"'{column}' must be a number, but is {shown(value)}.", "wrong type")


class ScoredPairs(PairFormat):
    """Two sentences and how alike they are."""

    name = "scored pairs"
    text_columns = ("sentence1", "sentence2")
    score_column = "score"


class Triplets(PairFormat):
    """An anchor, what belongs to it, and what does not."""

    name = "triplets"
    text_columns = ("anchor", "positive", "negative")


class AnchorPairs(PairFormat):
    """An anchor and what belongs to it."""

    name = "pairs"
    text_columns = ("anchor", "positive")


class Ranking(NamedTuple):
    """A query, its documents, and how well each answers it: 0 or more."""

    query: str
    documents: list[str]
    labels: list[float]


class RankingFormat(RowFormat):
    """A kind of row with a query and its documents."""

    def texts(self, row: Row, names: DataConfig) -> list[str]:
        ranking = self._ranking(row)
        return [ranking.query, *ranking.documents]

    def usable(self, row: Row) -> Ranking:
        """Return the ranking of a row, or raise the RowError that says what is wrong."""
        ranking = self._ranking(row)
        for text in (ranking.query, *ranking.documents):
            check_unicode(row, text)
            if not text.strip():
                raise row.error("a query or document is empty.", "empty")

        if len(set(ranking.labels)) < 2:
            fault = "all labels are equal, but a ranking needs documents of different ones."
            raise row.error(fault, "no target")
        return ranking

    @abstractmethod
    def _ranking(self, row: Row) -> Ranking: ...


class PositiveAndNegatives(RankingFormat):
    """A query, one document or several that answer it, and others that do not."""

    name = "queries with negatives"

    def columns(self, names: DataConfig) -> tuple[str, ...]:
        return ("query", "positive", "negatives")

    def _ranking(self, row: Row) -> Ranking:
        positives = row.value["positive"]
        if isinstance(positives, str):
            positives = [positives]

        positives = _list_of_texts(row, "positive", positives)
        negatives = _list_of_texts(row, "negatives", row.value["negatives"])
        labels = [1.0] * len(positives) + [0.0] * len(negatives)
        return Ranking(text_of(row, "query"), positives + negatives, labels)


class LabelledDocuments(RankingFormat):
    """A query, documents, and a label of each: the higher, the better it answers."""

    name = "labelled documents"

    def columns(self, names: DataConfig) -> tuple[str, ...]:
        return ("query", "documents", "labels")

    def _ranking(self, row: Row) -> Ranking:
        documents = _list_of_texts(row, "documents", row.value["documents"])
        labels = plain(row.value["labels"])
        if not isinstance(labels, list) or not all(
            type(label) in (int, float) and 0 <= label <= _MOST_LABEL for label in labels
        ):
            fault = f"'labels' must be numbers of 0 or more, but is {shown(labels)}."
            raise row.error(fault, "wrong type")

        if len(labels) != len(documents):
            fault = f"has {len(documents)} documents, but {len(labels)} labels."
            raise row.error(fault, "wrong type")
        return Ranking(text_of(row, "query"), documents, [float(label) for label in labels])


def _list_of_texts(row: Row, column: str, values: object) -> list[str]:
    values = plain(values)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        fault = f"'{column}' must be a list of texts, but is {shown(values)}."
        raise row.error(fault, "wrong type")

    if not values:
        raise row.error(f"'{column}' is empty: a query needs documents.", "empty")
    return values


class Preference(RowFormat):
    """A prompt with a completion that is chosen and one that is rejected, as TRL has them.

    Without a prompt both are conversations that begin with the same messages.
    """

    name = "preferences"

    def columns(self, names: DataConfig) -> tuple[str, ...]:
        """The prompt may be part of both, so its own column is optional."""
        return ("chosen", "rejected")

    def texts(self, row: Row, names: DataConfig) -> list[str]:
        return [
            text
            for column in (names.prompt_feature, *self.columns(names))
            for text in _texts(row, column)
        ]


class Prompt(RowFormat):
    """A prompt whose completions are generated; a reward function sees all columns of its row."""

    name = "prompts"

    def columns(self, names: DataConfig) -> tuple[str, ...]:
        return (names.prompt_feature,)

    def texts(self, row: Row, names: DataConfig) -> list[str]:
        return _texts(row, names.prompt_feature)


def _texts(row: Row, column: str) -> list[str]:
    """A column has a text, or messages with one each; without the column there is none."""
    if not isinstance(value := row.value.get(column, []), list):
        return [text_of(row, column)]
    contents = [plain_text(m.get("content")) for m in value if isinstance(m, Mapping)]
    return [content for content in contents if content]


COMPLETION = Completion()
# A row is of the first format that it matches; mlx-lm has the same order of the first three.
TEXT = Text()
TOKEN_FORMATS: tuple[TokenFormat, ...] = (COMPLETION, Chat(), TEXT, Alpaca(), ShareGPT())
PAIR_FORMATS: tuple[PairFormat, ...] = (ScoredPairs(), Triplets(), AnchorPairs())
RANKING_FORMATS: tuple[RankingFormat, ...] = (PositiveAndNegatives(), LabelledDocuments())
PREFERENCE = Preference()
PROMPT = Prompt()
FORMATS: tuple[RowFormat, ...] = (
    *TOKEN_FORMATS,
    PREFERENCE,
    *PAIR_FORMATS,
    *RANKING_FORMATS,
    PROMPT,
)


def format_of(row: Row, names: DataConfig, formats: Sequence[RowFormat] = FORMATS) -> RowFormat:
    """Return the first of ``formats`` that a row matches; a row without one is an error.

    A column that is null, as in tables put together, only counts if no other format matches.
    """
    if not isinstance(row.value, Mapping):
        fault = f"must be a JSON object, but is a {type(row.value).__name__}."
        raise row.error(fault, "not an object")

    matching = [each for each in formats if each.matches(row, names)]
    for row_format in matching:
        if all(row.value[column] is not None for column in row_format.columns(names)):
            return row_format
    if matching:
        return matching[0]

    columns = " or ".join("{" + ", ".join(each.columns(names)) + "}" for each in formats)
    own = shown(sorted(row.value)) if row.value else "none"
    fault = f"must have the columns {columns}, but has {own}."
    if any(isinstance(each, TokenFormat) for each in formats):
        flags = "--chat-feature, --prompt-feature, --completion-feature, --text-feature"
        raise row.error(f"{fault} Other names: {flags}.", "missing columns")
    raise row.error(f"{fault} Other examples are for --task lm.", "missing columns", "task")


def check_format(
    row: Row,
    row_format: RowFormat,
    first: str,
    names: DataConfig,
    formats: Sequence[RowFormat] = FORMATS,
) -> None:
    """Raise an error if a row has another format than the row called ``first``."""
    if (other := format_of(row, names, formats)) is not row_format:
        raise row.error(
            f"mixed formats: this example is {other.name}, but {first} is {row_format.name}.",
            "another format",
        )


def first_format(
    rows: Sequence[Row], names: DataConfig, formats: Sequence[RowFormat] = FORMATS
) -> tuple[Row, RowFormat]:
    """Return the first row that has one of ``formats``, and that format.

    The first row's error is raised if it stops the run (``names.on_bad_row``) or no row has one.
    """
    first = None
    for row in rows:
        try:
            return row, format_of(row, names, formats)
        except RowError as error:
            if names.on_bad_row == "stop":
                raise
            first = first or error

    raise first or PackError("--data: the split has no examples.", "data")
