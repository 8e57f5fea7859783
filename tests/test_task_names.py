"""Code that is not of a task never names one: it asks for facts (`config.choices.TASKS`).

So a new task is its own files, its facts and its settings, and no other file changes.
"""

import ast
from functools import cache

import pytest

from mlx_packs.config.choices import PREFERENCE_TASKS, TASKS
from tests.helpers.imports import PACKAGE, nodes_of

# Its facts, its settings, and the default of --task.
OF_ALL = {"config/choices.py", "config/tasks.py", "config/common.py"}


def modules(names: str) -> tuple[str, ...]:
    return tuple(f"{name}.py" for name in names.split())


# The files of each task, in addition to those in `OF_ALL`; each names that task alone.
OWN = {
    "lm": modules("tasks/causal_lm"),
    "embedding": modules("tasks/embedding objectives/embedding evaluation/embeddings data/pairs"),
    **dict.fromkeys(PREFERENCE_TASKS, modules("tasks/preference objectives/preference")),
    "reward": modules("tasks/reward packs/scored evaluation/preferences"),
    "classify": modules(
        "tasks/classify objectives/reader evaluation/classification data/labelled data/labels "
        "packs/scored"
    ),
    "rerank": modules("tasks/rerank objectives/reader evaluation/rankings data/rankings"),
    "grpo": modules("tasks/grpo objectives/grpo"),
    "distill": modules(
        "tasks/distill tasks/teacher objectives/distillation evaluation/teacher data/teacher_cache"
    ),
}

# Features in addition to a task, which it works without, and the tasks that each names.
FEATURES = {
    "cli/classify.py": ("classify",),  # the command `packs classify`
    "cli/learn.py": ("kto", "dpo", "lm"),  # what rated answers train
    "cli/main.py": ("classify",),  # its place in the list of commands
    # the argument of `mlx_packs.train`, and what other libraries call these tasks
    "config/other_names.py": ("reward", "lm", "grpo"),
    "serving/registry.py": ("lm",),  # what a server answers with if nothing else is asked for
    "serving/embedding.py": ("embedding", "rerank"),  # `/v1/embeddings` and `/v1/rerank`
    "cli/serve.py": ("lm", "embedding"),  # what a server without packs answers with
    "learning/comparison.py": ("kto", "dpo", "lm"),  # what each gains
    "learning/rows.py": ("kto", "dpo", "lm"),  # the rows of each
    "packs/base.py": ("classify", "rerank", "reward"),  # the methods of these tasks
    "packs/manifest.py": ("classify", "reward"),  # what imported heads are
    "studio/jobs.py": ("reward",),  # the setting that may name a function
    "training/run.py": ("reward",),  # the argument of `mlx_packs.train`
    "training/settings.py": ("reward",),  # the argument of `mlx_packs.train`
}

# Words that are something else as well, and where they are.
OTHER_MEANINGS = {
    # the table of tokens: kind of an adapter, name of a module, entry of an answer
    "embedding": modules(
        "adapters/attach adapters/lora bases/quantization convert/formats convert/external "
        "convert/peft extras/projection_stack objectives/frozen_activations packs/manifest "
        "packs/pack serving/answers"
    ),
    # the mean reward of a batch, and the setting --reward
    "reward": modules(
        "objectives/grpo objectives/score report/facts tasks/grpo training/observers/__init__"
    ),
    "lm": modules("memory/decoder tasks/rerank"),  # a value of --head
}


@cache
def named() -> set[tuple[str, str]]:
    """Files of the package, each with a task that a text in it is the name of."""
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in nodes_of(path):
            if isinstance(node, ast.Constant) and node.value in list(TASKS):
                found.add((path.relative_to(PACKAGE).as_posix(), node.value))

    return {(file, task) for file, task in found if file not in OF_ALL}


def allowed() -> set[tuple[str, str]]:
    return {
        *((file, task) for task, files in OWN.items() for file in files),
        *((file, task) for file, tasks in FEATURES.items() for task in tasks),
        *((file, word) for word, files in OTHER_MEANINGS.items() for file in files),
    }


def test_only_files_of_a_task_and_features_name_it():
    assert not named() - allowed(), (
        "Code that is not of a task asks for a fact of it: add a field to TaskFacts or PackFacts "
        "(config/choices.py). Files of a new task belong in OWN."
    )


def test_every_exception_is_needed():
    needed = {*((f, t) for f, tasks in FEATURES.items() for t in tasks)}
    needed |= {(file, word) for word, files in OTHER_MEANINGS.items() for file in files}
    assert not needed - named()


@pytest.mark.parametrize("task", TASKS)
def test_the_files_of_a_task_exist(task):
    assert all((PACKAGE / file).is_file() for file in OWN[task])
    module = TASKS[task].code.partition(":")[0].removeprefix("mlx_packs.")
    assert f"{module.replace('.', '/')}.py" in OWN[task]
