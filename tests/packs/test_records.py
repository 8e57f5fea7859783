"""What packs record for their use, compared where packs meet, in any order."""

from itertools import permutations

import pytest

from mlx_packs import Pack
from mlx_packs.packs.compatibility import agreed_records, check_same_use
from mlx_packs.packs.weighted_sum import weighted_sum
from tests.helpers.errors import raises
from tests.helpers.models import base_of
from tests.helpers.packs import random_pack


def _pack(part: str = "recipe", **entries) -> Pack:
    base = {"id": "b", "fingerprint": "0", "model_type": "llama", "quantization": None}
    adapters = {"modules": [], "groups": []}
    manifest = {"base": base, "adapters": adapters, "recipe": {}, "objective": {}}
    manifest[part] = entries
    name = "+".join(map(str, entries.values())) or "none"
    return Pack({**manifest, "sum_of": [{"pack": name, "weight": 1.0}]})


@pytest.mark.parametrize(
    "part, names",
    [
        ("objective", ("pooling", "normalize", "head", "query_prompt", "instruction")),
        ("recipe", ("chat_template", "template_kwargs")),
    ],
)
def test_packs_that_compute_different_things_are_rejected_in_any_order(part, names):
    for name in names:
        for packs in permutations((_pack(part, **{name: "x"}), _pack(part, **{name: "y"}))):
            with raises("mismatch", None, f"{name} is x in 1 x and y in 1 y"):
                check_same_use(packs)


def test_a_pack_that_records_no_pooling_has_its_bases():
    check_same_use([_pack("objective", pooling="mean"), _pack("objective")])
    with raises("mismatch", None, "chat_template is not recorded in 1 none and x in 1 x"):
        check_same_use([_pack(chat_template="x"), _pack()])


def test_packs_of_different_tasks_are_rejected_in_any_order():
    text, dpo = _pack("objective"), _pack("objective", task="dpo")
    embedding, unknown = (_pack("objective", task=task) for task in ("embedding", "another"))
    check_same_use([text, dpo])
    for pair in ((text, embedding), (embedding, dpo), (unknown, text), (embedding, unknown)):
        for packs in permutations(pair):
            with raises("mismatch", None, "task is "):
                check_same_use(packs)


def test_a_sum_has_the_smaller_length_and_what_all_have_in_common():
    a = _pack(max_seq_length=512, max_pixels=100, text_feature="body")
    b = _pack(max_seq_length=256, template_kwargs={})
    for packs in permutations((a, b)):
        check_same_use(packs)
        assert agreed_records(packs)["recipe"] == {"max_seq_length": 256, "max_pixels": 100}


def test_a_weighted_sum_is_of_packs_of_one_use():
    base = base_of("qwen3")
    a, b = random_pack(base, 0), random_pack(base, 1)
    for pack in (a, b):
        pack.manifest["objective"] = {"task": "embedding"}
    assert weighted_sum([(a, 0.5), (b, 0.5)]).manifest["objective"] == {"task": "embedding"}
    del b.manifest["objective"]
    with raises("mismatch", None, "task is embedding in"):
        weighted_sum([(a, 0.5), (b, 0.5)])
