"""The task of a pack, and what the facts of the task are for other commands."""

import pytest

from mlx_packs.config.choices import TASKS, PackFacts, TaskFacts
from mlx_packs.packs.manifest import is_reward_model, pack_facts, task_code, task_of

HEAD = {"replaced": [{"name": "score.weight", "shape": [1, 8]}]}


def manifest(task: str | None = None, adapters: dict | None = None, **parts) -> dict:
    return {"objective": {"task": task} if task else {}, "adapters": adapters or {}, **parts}


@pytest.fixture
def graded(monkeypatch) -> str:
    """A task with a head of its own, whose packs are described by facts."""
    pack = PackFacts("a grader", evaluator="mlx_packs.evaluation.rankings:RerankEvaluator")
    facts = TaskFacts("a:B", "decoder", heads=("score",), pack=pack)
    monkeypatch.setitem(TASKS, "grade", facts)
    return "grade"


def test_a_pack_is_of_the_task_that_trained_it(graded):
    assert task_of(manifest("dpo")) == "dpo"
    assert task_of(manifest(graded, HEAD)) == graded
    assert not is_reward_model(manifest(graded, HEAD))


def test_an_imported_head_is_of_the_task_that_it_goes_with():
    assert task_of(manifest()) is None
    assert task_of(manifest(adapters=HEAD)) == "reward"
    assert task_of(manifest("unknown", HEAD)) == task_of(manifest("lm", HEAD)) == "reward"
    assert task_of(manifest("reward", HEAD, classifier={"head": "score"})) == "classify"
    assert is_reward_model(manifest("classify", HEAD))  # nothing says which labels it has


def test_facts_name_the_code_for_a_pack(graded):
    assert task_code(manifest(graded, HEAD), "evaluator").__name__ == "RerankEvaluator"
    assert task_code(manifest(graded, HEAD), "worker") is None
    assert pack_facts(manifest("unknown")) == PackFacts()
