"""The share of held-out prompts that are answered as wanted, with its error, and some answers."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..bases.tokenizer import opens_thoughts, split_thoughts, thought_marks, tokenizer_errors
from ..config.data import DataConfig
from ..data.conversations import Content
from ..data.formats import Row, TokenFormat
from ..errors import PackError
from ..inference.generate import stream_batch
from ..inference.generate import text_of as text_of_tokens
from ..objectives.score import Score
from ..packs.base import Base
from .metrics import Metric

_SAMPLES = 3
_MOST_AT_ONCE = 64
_TIMES_AT_ONCE = 4


@dataclass(frozen=True)
class Question:
    """A held-out prompt, its tokens, and the answer that its example has."""

    text: str
    tokens: list[int]
    wanted: str
    thoughts: int = 0  # tokens of the thoughts that its example has before the answer


@dataclass(frozen=True)
class Accuracy:
    """Mean score of answers with its standard error, and share of answers in valid form.

    ``valid`` is None where the metric requires no form.
    """

    share: float
    se: float
    valid: float | None = None


@dataclass(frozen=True)
class AnswerReport:
    """Accuracy of a base, and of the base with a pack (None without one), on the same questions."""

    metric: str
    rows: int
    before: Accuracy
    after: Accuracy | None = None
    commonest_share: float | None = None  # of the wanted answers

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class AnsweredScore(Score):
    """The score of validation examples of which some were answered, too."""

    score: Score
    metric: str
    share: float  # of the answers, those that are right

    @property
    def value(self) -> float:
        return self.score.value

    @property
    def entries(self) -> dict[str, float]:
        """Entries of the line in a run's metrics, with the share of right answers."""
        return {**self.score.entries, f"valid_{self.metric}": self.share}

    @property
    def text(self) -> str:
        return f"{self.score.text}, {self.metric} {self.share:.1%}"


class Exam:
    """Questions for a base, evaluated again whenever it changes.

    ``tokens_at_once`` are the tokens of a batch that the
    base is evaluated on or trained with; a few times as many are generated together, since only
    their keys and values are kept.
    """

    def __init__(
        self, base: Base, metric: Metric, questions: Sequence[Question], tokens_at_once: int
    ) -> None:
        self.metric = metric
        self.questions = questions
        self._base = base
        self._tokens_at_once = tokens_at_once

        with tokenizer_errors(base.tokenizer):
            longest = max(q.thoughts + len(base.tokenizer.encode(q.wanted)) for q in questions)

        self._limit = longest + metric.spare_tokens
        one = self._limit + max(len(q.tokens) for q in questions)
        self._batch_size = max(1, min(_MOST_AT_ONCE, _TIMES_AT_ONCE * tokens_at_once // one))

    def first(self, count: int) -> "Exam":
        return Exam(self._base, self.metric, self.questions[:count], self._tokens_at_once)

    def answers(self, advance: Callable[[], None] = lambda: None) -> list[str]:
        """Return the base's greedy answers as it is now; ``advance`` is called as each ends."""
        tokens: list[list[int]] = [[] for _ in self.questions]
        prompts = [q.tokens for q in self.questions]

        stream = stream_batch(self._base, prompts, self._limit, self._batch_size)
        for i, token, is_end in stream:
            if not is_end:
                tokens[i].append(token)
            if is_end or len(tokens[i]) == self._limit:
                advance()

        answers = []
        for question, generated in zip(self.questions, tokens, strict=True):
            text = text_of_tokens(self._base, generated)
            answers.append(answer_of(self._base, question.tokens, text).strip())
        return answers

    def validated(self, score: Score) -> AnsweredScore:
        """Return a score with the share of the questions that the base answers right now."""
        share = self._accuracy(self.answers()).share
        return AnsweredScore(score, self.metric.name, share)

    def report(self, before: Sequence[str], after: Sequence[str] | None = None) -> AnswerReport:
        with_pack = None if after is None else self._accuracy(after)
        wanted = Counter(question.wanted.strip() for question in self.questions)
        commonest = max(wanted.values()) / len(self.questions)
        return AnswerReport(
            self.metric.name, len(before), self._accuracy(before), with_pack, commonest
        )

    def samples(self, before: Sequence[str], after: Sequence[str]) -> list[dict[str, str]]:
        """Return up to three answers that are better with the pack.

        Each has ``prompt``, ``wanted``, ``before`` and ``after``. If there are none, the first
        question is returned instead.
        """
        score = self.metric.score
        results = list(zip(self.questions, before, after, strict=True))
        gained = [
            (question, wrong, right)
            for question, wrong, right in results
            if score(right, question.wanted) > score(wrong, question.wanted)
        ]

        candidates = gained or results[:1]
        count = min(_SAMPLES, len(candidates))
        spread = [candidates[i * len(candidates) // count] for i in range(count)]
        return [
            {"prompt": question.text, "wanted": question.wanted, "before": one, "after": other}
            for question, one, other in spread
        ]

    def _accuracy(self, answers: Sequence[str]) -> Accuracy:
        count = len(answers)
        pairs = zip(answers, self.questions, strict=True)
        scores = np.array([self.metric.score(answer, q.wanted) for answer, q in pairs], float)
        valid = None
        if (is_valid := self.metric.is_valid) is not None:
            valid = sum(map(is_valid, answers)) / count
        return Accuracy(float(scores.mean()), float(scores.std()) / math.sqrt(count), valid)


def answer_of(base: Base, prompt: Sequence[int], text: str) -> str:
    """Return the part of a generated text after its thoughts, which the prompt may have opened."""
    is_open = opens_thoughts(base.tokenizer, prompt)
    return split_thoughts(base.tokenizer, text, is_open)[1]


def expected_answer(content: Content, base: Base, prompt: Sequence[int]) -> tuple[str | None, int]:
    """Return the answer of an example after its thoughts, and how many tokens these are."""
    text = content.answer
    if text is None:
        return None, 0

    opening, end = thought_marks(base.tokenizer)
    is_open = end in text and opens_thoughts(base.tokenizer, prompt)
    written, answer = split_thoughts(base.tokenizer, text, is_open)
    thoughts = content.thoughts or written
    if not thoughts:
        return answer, 0

    with tokenizer_errors(base.tokenizer):
        return answer, len(base.tokenizer.encode(f"{opening}\n{thoughts}\n{end}\n\n"))


def questions_of(
    rows: Iterable[Row],
    row_format: TokenFormat,
    columns: DataConfig,
    base: Base,
    metric: Metric,
    longest: int,
    most: int = -1,
) -> list[Question]:
    """Return the questions of some examples: those that have an answer with something in it.

    Those with more than ``longest`` tokens of prompt and answer are skipped; ``most`` takes the
    first, -1 all. Raises a PackError if no example has an answer, or an answer is not in the
    metric's form.
    """
    questions: list[Question] = []
    has_answers = False
    for row in rows:
        if len(questions) == most:
            break
        content = row_format.read(row, columns, base.tokenizer)
        if not content.answer:
            continue
        text, tokens = content.prompt()
        expected, thoughts = expected_answer(content, base, tokens)
        if not expected or not expected.strip():
            continue

        has_answers = True
        if metric.is_valid is not None and not metric.is_valid(expected):
            raise PackError(
                f"{row.where}: its answer is not {metric.name}. Use --metric exact or contains.",
                "data",
                "metric",
            )

        with tokenizer_errors(base.tokenizer):
            length = len(tokens) + thoughts + len(base.tokenizer.encode(expected))
        if length <= longest:
            questions.append(Question(text, tokens, expected, thoughts))

    if not questions:
        reason = (
            f"these examples ({row_format.name}) have no wanted answers. Leave it out, or give "
            "chats or prompts with completions."
        )
        if has_answers:
            reason = f"every example is longer than {longest} tokens. Raise --max-seq-length."
        raise PackError(f"--metric {metric.name}: {reason}", "conflict", "metric")

    return questions
