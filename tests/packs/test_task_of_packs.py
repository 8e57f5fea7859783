"""The task of a pack, by what its manifest says."""

import pytest

from mlx_packs.config.choices import PackFacts
from mlx_packs.packs.manifest import is_reward_model, pack_facts, task_code, task_of

HEAD = {"replaced": [{"name": "score.weight", "shape": [1, 8]}]}


def manifest(task: str | None = None, adapters: dict | None = None, **parts) -> dict:
    return {"objective": {"task": task} if task else {}, "adapters": adapters or {}, **parts}


@pytest.mark.parametrize(
    ("stored", "task"),
    [
        (manifest("dpo"), "dpo"),
        (manifest("rerank", HEAD), "rerank"),
        (manifest(), None),
        (manifest(adapters=HEAD), "reward"),
        (manifest("unknown", HEAD), "reward"),
        (manifest("lm", HEAD), "reward"),
        (manifest("reward", HEAD, classifier={"head": "score"}), "classify"),
        (manifest("classify", HEAD), "reward"),  # nothing says which labels it has
    ],
)
def test_a_pack_is_of_the_task_that_trained_it_or_goes_with_its_head(stored, task):
    assert task_of(stored) == task and is_reward_model(stored) == (task == "reward")


def test_facts_name_the_code_for_a_pack():
    assert task_code(manifest("rerank", HEAD), "evaluator").__name__ == "RerankEvaluator"
    assert pack_facts(manifest("unknown")) == PackFacts()
