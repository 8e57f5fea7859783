"""Rewards of generated completions: a function of the user's, or a metric of answers."""

import importlib.util
import inspect
import numbers
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..bases.tokenizer import split_thoughts
from ..config.data import DataConfig
from ..data.prompts import Prompts, wanted_text
from ..errors import Code, PackError, reason_of
from ..evaluation.metrics import METRICS

# Takes prompts, completions and the other columns of the rows, a list each; returns a number each,
# or None for a completion that it does not score.
RewardFunction = Callable[..., Sequence[float | None]]


def load_reward(name: str) -> RewardFunction:
    """Return the function ``FILE.py:NAME``; the file is executed.

    Raises:
        PackError: there is no such file or function, or the file cannot be executed.
    """
    file, colon, function = name.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise _error(name, f"must be FILE.py:NAME, or one of {', '.join(METRICS)}.", "unknown")

    path = Path(file).expanduser()
    if not path.is_file():
        raise _error(name, f"{file} is no file.", "not-found")

    spec = importlib.util.spec_from_file_location("reward_function", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        text = f"{file} cannot be executed ({_named(error)})."
        raise _error(name, text, "unreadable") from error

    if not callable(found := getattr(module, function, None)):
        raise _error(name, f"{file} has no function {function}.", "not-found")
    return found


class Reward:
    """The rewards of completions, each a finite number, or NaN where the function returns None.

    Args:
        function: the user's own, or the name of a metric of answers.
        columns: what the columns are called.
    """

    def __init__(self, function: RewardFunction | str, columns: DataConfig) -> None:
        self._columns = columns
        if isinstance(function, str):
            self.name = function
            self._function: RewardFunction = _metric_reward(function)
        else:
            self.name = function.__name__
            self._function = function

    @property
    def is_metric(self) -> bool:
        """Whether it compares answers, without their thoughts, with the expected ones."""
        return self.name in METRICS

    def check(self, prompts: Prompts) -> None:
        """Check that the rows have what a metric needs."""
        if not self.is_metric:
            return
        for i in range(len(prompts)):
            if wanted_text(prompts.row(i), self._columns) is None:
                raise PackError(
                    f"{prompts.where(i)}: --reward {self.name} needs the expected completion in "
                    f"'{self._columns.completion_feature}'.",
                    "data",
                    "reward",
                )

    def __call__(
        self, prompts: Prompts, indices: Sequence[int], completions: Sequence[str]
    ) -> np.ndarray:
        """Return the reward of each completion of the prompts at ``indices``, float32 [N].

        Raises:
            PackError: the function raises, or returns other than as many finite numbers or None.
        """
        rows = [prompts.row(i) for i in indices]
        names = dict.fromkeys(name for row in rows for name in row.value)
        columns: dict[str, list] = {name: [row.value.get(name) for row in rows] for name in names}
        prompt = columns.pop(self._columns.prompt_feature)
        wanted = [wanted_text(row, self._columns) for row in rows]

        passed: list = list(completions)
        if not self.is_metric:
            passed = [_like(p, c) for p, c in zip(prompt, completions, strict=True)]

        try:
            values = self._function(prompts=prompt, completions=passed, expected=wanted, **columns)
        except Exception as error:
            first = prompts.where(indices[0])
            text = f"raised {_named(error)} for the completions of {first}."
            raise _error(self.name, text) from error

        if inspect.isawaitable(values) or not isinstance(values, (Sequence, np.ndarray)):
            raise self._fault(f"returned a {type(values).__name__}", len(rows))
        if len(values) != len(rows):
            raise self._fault(f"returned {len(values)} values", len(rows))
        for i, value in zip(indices, values, strict=True):
            if value is None:
                continue
            if not isinstance(value, numbers.Real) or not np.isfinite(float(value)):
                text = f"returned {value!r:.40} for a completion of {prompts.where(i)}"
                raise self._fault(text, len(rows))

        return np.array(list(values), np.float32)  # NaN for None

    def _fault(self, fault: str, count: int) -> PackError:
        return _error(
            self.name,
            f"{fault}, but must return a list of {count} finite numbers, one for each completion, "
            "or None for those that it does not score.",
        )


def _like(prompt: Any, completion: str) -> str | list[dict[str, str]]:
    """Return a completion in the form of its prompt: a text, or messages as TRL has them."""
    if isinstance(prompt, str):
        return completion
    return [{"role": "assistant", "content": completion}]


def _metric_reward(name: str) -> RewardFunction:
    """Return the reward of a metric: 1 for a right answer, and else 0."""
    is_right = METRICS[name].is_right

    def reward(completions: Sequence[str], expected: Sequence[str], **_: Any) -> list[float]:
        answers = [split_thoughts(None, text)[1] for text in expected]
        return [float(is_right(c, a)) for c, a in zip(completions, answers, strict=True)]

    return reward


def _error(name: str, text: str, code: Code = "data") -> PackError:
    return PackError(f"--reward {name}: {text}", code, "reward")


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {reason_of(error)}"


def reward_of(given: RewardFunction | None, setting: str | None) -> RewardFunction | str:
    """Return the reward of a run: the function given in Python, or what ``--reward`` names.

    Raises:
        PackError: there is none, or both.
    """
    if given is not None and setting is not None:
        raise PackError(
            "reward: is given twice, as a function and by --reward.", "conflict", "reward"
        )

    if given is not None:
        return given
    if setting is None:
        raise PackError(
            "--reward: --task grpo needs one: FILE.py:NAME, or the expected completion by "
            f"{', '.join(METRICS)}.",
            "invalid",
            "reward",
        )
    if setting in METRICS:
        return setting
    return load_reward(setting)
