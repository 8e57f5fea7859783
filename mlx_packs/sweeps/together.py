"""Trials of a sweep that are trained in one batch: which ones, and how many at once."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from ..config.choices import SEARCHES
from ..config.recipe import Recipe
from ..config.together import check_together, common_settings
from ..errors import PackError
from ..files import to_json
from ..memory.read import read_headers
from ..memory.together import UNKNOWN, saving
from .plan import Plan
from .space import Values
from .trial import Trial

MOST = 8  # trials in one batch: more save little, and a crash would end them all


def check_trials(plan: Plan, where: str) -> None:
    """Raise a PackError if no two trials of a sweep can be trained in one batch."""
    search = plan.config.search
    if SEARCHES[search].learns:
        raise PackError(
            f"--together: with search {search} a trial starts after the results of earlier ones. "
            "Choose another --search, or leave --together out.",
            "conflict",
            "together",
        )
    if len(plan.values) < 2:
        text = "the sweep has one trial. Leave it out."
        raise PackError(f"--together: {text}", "conflict", "together")

    recipes = [plan.recipe_of(values) for values in plan.values]
    keys = Counter(key for recipe in recipes if (key := _key(recipe)) is not None)
    if any(count > 1 for count in keys.values()):
        return

    _check_all(recipes, where)
    first, *others = map(common_settings, recipes)
    differs = next(n for n in first if any(other.get(n) != first[n] for other in others))
    raise PackError(
        f"{where}: {differs}: differs between all trials, and packs in one batch have it in "
        "common. Leave --together out.",
        "conflict",
        differs,
    )


def _check_all(recipes: Sequence[Recipe], where: str) -> None:
    """Raise a PackError, which names the file, if a trial cannot share a batch with any other."""
    for recipe in recipes:
        try:
            check_together(recipe)
        except PackError as error:
            text = f"{where}: {error.message} For a sweep, leave --together out."
            raise PackError(text, error.code, error.flag) from None


def batches_of_trials(
    trials: Sequence[Trial], recipe_of: Callable[[Values], Recipe], workers: int
) -> Iterator[list[Trial]]:
    """Yield trials in batches: those with the same `common_settings`, `MOST` at a time.

    A trial that cannot share a batch comes alone; of the others every worker gets some.
    """
    alike: dict[str, list[Trial]] = {}
    for trial in trials:
        key = _key(recipe_of(trial.values)) or f"trial {trial.number}"
        alike.setdefault(key, []).append(trial)

    for same in alike.values():
        batches = max(-(-len(same) // MOST), min(workers, len(same) // 2))
        size = -(-len(same) // max(1, batches))
        for start in range(0, len(same), size):
            yield same[start : start + size]


def _key(recipe: Recipe) -> str | None:
    """Return what trials of one batch have in common, as text; None for one that has none."""
    try:
        check_together(recipe)
    except PackError:
        return None
    return to_json(common_settings(recipe))


def described(
    batches: Sequence[Sequence[Trial]], recipe_of: Callable[[Values], Recipe]
) -> list[str]:
    """Return in words which trials share a batch, why others do not, and what that saves."""
    lines = []
    for batch in batches:
        numbers = ", ".join(str(trial.number) for trial in batch)
        if len(batch) > 1:
            lines.append(f"trials {numbers} together")
        else:
            lines.append(f"trial {numbers} alone: {_why_alone(recipe_of(batch[0].values))}")

    if batches and (largest := max(batches, key=len))[1:]:
        lines.append(_saving(recipe_of(largest[0].values), len(largest)))
    return lines


def _why_alone(recipe: Recipe) -> str:
    try:
        check_together(recipe)
    except PackError as error:
        return error.message.partition(". ")[0]
    return "no other trial to be trained has the same other settings"


def _saving(recipe: Recipe, packs: int) -> str:
    try:
        saved = saving(read_headers(recipe.model), recipe.lora, recipe.train, packs)
    except PackError:  # of a base without a plan
        return UNKNOWN
    if saved is None:
        return UNKNOWN
    return saved.line()
