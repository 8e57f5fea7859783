"""What packs record for their use, compared where packs meet: each entry, in any order."""

from itertools import permutations

import pytest

from mlx_packs import Pack
from mlx_packs.config.choices import TASKS
from mlx_packs.packs.compatibility import (
    TRAINING_ONLY,
    agreed_records,
    check_same_use,
    note_of_start,
    use_records,
)
from mlx_packs.packs.manifest import recorded_keys
from mlx_packs.packs.weighted_sum import weighted_sum
from tests.helpers.errors import raises
from tests.helpers.models import base_of
from tests.helpers.packs import random_pack

# Entries of other facts than the use: of training, of examples and of evaluations.
_KNOWN_TRAINING = {
    "objective": {
        *"loss loss_on beta reward class_weights center_rewards_coefficient teacher".split(),
        *"graph note stack ppl_before ppl_after".split(),
    },
    "recipe": {
        *"quantize template_date chat_feature prompt_feature".split(),
        *"completion_feature text_feature".split(),
    },
}


def _pack(part: str = "recipe", **entries) -> Pack:
    base = {"id": "b", "fingerprint": "0", "model_type": "llama", "quantization": None}
    adapters = {"modules": [], "groups": []}
    manifest = {"base": base, "adapters": adapters, "recipe": {}, "objective": {}}
    manifest[part] = entries
    name = "+".join(map(str, entries.values())) or "none"
    return Pack({**manifest, "sum_of": [{"pack": name, "weight": 1.0}]})


@pytest.mark.parametrize(
    "part, name", [(p, name) for p in TRAINING_ONLY for name in sorted(recorded_keys(p) - {"task"})]
)
def test_every_checked_entry_is_compared_unless_it_is_known_to_be_of_training(part, name, caplog):
    pair = (_pack(part, **{name: "x"}), _pack(part, **{name: "y"}))
    if name in _KNOWN_TRAINING[part]:
        assert name not in use_records(pair[0].manifest)
        return

    if name in ("pooling", "normalize", "head", "chat_template"):
        for packs in permutations(pair):
            with raises("mismatch", None, f'{name} is "x" in 1 x and "y" in 1 y'):
                check_same_use(packs)
        return

    check_same_use(pair)
    assert f'{name} is "x" in 1 x and "y" in 1 y' in caplog.text
    assert agreed_records(pair) == agreed_records(pair[::-1])


def test_a_pack_that_records_no_pooling_has_its_bases():
    check_same_use([_pack("objective", pooling="mean"), _pack("objective")])
    with raises("mismatch", None, "chat_template"):
        check_same_use([_pack(chat_template="x"), _pack()])


def test_packs_of_different_tasks_are_rejected_in_any_order():
    kinds = {None, "dpo", "embedding", "rerank", "another"}
    packs = {kind: _pack("objective", **({"task": kind} if kind else {})) for kind in kinds}
    for a, b in permutations(kinds, 2):
        if {a, b} == {None, "dpo"}:
            check_same_use([packs[a], packs[b]])
            continue
        with raises("mismatch", None, "task is "):
            check_same_use([packs[a], packs[b]])


def test_a_sum_has_the_smaller_length_and_no_variable_that_differs(caplog):
    a = _pack(max_seq_length=512, template_kwargs={"enable_thinking": False}, max_pixels=100)
    b = _pack(max_seq_length=256, template_kwargs={})
    for packs in permutations((a, b)):
        recipe = agreed_records(packs)["recipe"]
        assert recipe == {"max_seq_length": 256, "max_pixels": 100, "template_kwargs": {}}

    check_same_use([_pack(), _pack(template_kwargs={}), _pack(text_feature="body")])
    assert not caplog.records
    check_same_use([a, b])
    assert "template_kwargs is" in caplog.text and "not recorded" in caplog.text
    parts = [_pack(template_kwargs={"a": 1, "b": n}) for n in (2, 3)]
    assert agreed_records(parts)["recipe"] == {"template_kwargs": {"a": 1}}


def test_a_weighted_sum_is_of_packs_of_one_use():
    base = base_of("qwen3")
    a, b = random_pack(base, 0), random_pack(base, 1)
    a.manifest["objective"] = {"task": "embedding", "query_prompt": "Find: "}
    b.manifest["objective"] = {"task": "embedding"}
    total = weighted_sum([(a, 0.5), (b, 0.5)]).manifest
    assert total["objective"] == {"task": "embedding"}
    del b.manifest["objective"]
    with raises("mismatch", None, "task is embedding in"):
        weighted_sum([(a, 0.5), (b, 0.5)])


def test_a_run_says_what_it_records_otherwise_than_the_pack_that_it_started_from():
    start, end = (_pack("objective", task="embedding", **e) for e in ({"query_prompt": "Q: "}, {}))
    note = note_of_start(start.manifest, end.manifest)
    assert note.startswith('query_prompt is not recorded, but was "Q: "')
    assert note_of_start(start.manifest, start.manifest) == ""


def test_every_entry_of_tasks_is_checked_in_a_manifest():
    declared = {name for facts in TASKS.values() for name in facts.pack.objective}
    assert declared <= recorded_keys("objective") | TRAINING_ONLY["objective"]
