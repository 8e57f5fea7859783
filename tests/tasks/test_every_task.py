"""What holds for every task: a resumed run is bit-identical; a setting without a meaning is a line."""

import pytest

from mlx_packs import LoRAConfig, TrainConfig, train_pack
from mlx_packs.runtime import mx
from tests.helpers.bases import saved_base, small_base
from tests.helpers.decoder_embedders import write_embedder
from tests.helpers.encoders import all_pairs, write_pairs
from tests.helpers.errors import raises
from tests.helpers.preferences import preference, rated
from tests.helpers.rows import labelled, splits_of, write_rows
from tests.helpers.tasks import interrupted
from tests.tasks.test_distill import LORA, OWN, base_with, cache_of, chats, settings
from tests.tasks.test_grpo import SETTINGS as GRPO
from tests.tasks.test_grpo import shorter
from tests.tasks.test_share_prefix import chat

ACCUMULATED = {"recompute": "block", "grad_accumulation_steps": 2}
# By task and what is special: rows, and settings; six batches begin a second epoch.
RESUMED = {
    "lm packed": ("chats", {"packing": True, "share_prefix": "off"}),
    "lm on trees": ("system", {"share_prefix": "on"}),
    "classify": ("labels", {"class_weights": "balanced"}),
    "reward": ("preferences", {"center_rewards_coefficient": 0.1, "method": "dora", **ACCUMULATED}),
    "kto": ("rated", {}),
    "dpo accumulated": ("preferences", ACCUMULATED),
    "dpo in pieces": ("preferences", {"micro_batches": 2, "method": "dora"}),
    "grpo": ("prompts", {**GRPO, "iters": 4}),
    "grpo accumulated": ("prompts", {**GRPO, "iters": 4, "beta": 0.1, **ACCUMULATED}),
    "embedding": ("pairs", {"loss": "cached-mnrl", "mini_batch_size": 3}),
    "distill packed": ("chats", {"packing": True}),
    "distill accumulated": ("chats", {"grad_accumulation_steps": 2}),
    "distill beside": ("chats", {**OWN, "on_policy": 0.5, "loss": "reverse-kl"}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rows = {
        "preferences": [preference(i) for i in range(24)],
        "rated": [rated(i) for i in range(24)],
        "prompts": [{"prompt": preference(i)["prompt"]} for i in range(24)],
        "chats": chats(),
        "system": [chat(i) for i in range(24)],
    }
    made = {
        name: write_rows(folder / name, train=each[:16], valid=each[16:])
        for name, each in rows.items()
    }
    made["labels"] = write_rows(folder / "labels", **splits_of(labelled))
    made["pairs"] = write_pairs(folder / "pairs", all_pairs())
    made["embedder"] = write_embedder(folder / "embedder")
    cache_of(folder / "cache", made["chats"])
    made["teacher"] = saved_base(base_with(1), folder / "teacher")
    return made


@pytest.mark.slow  # three runs each
@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_is_bit_identical(folders, tmp_path, name):
    task = name.split()[0]
    rows, changes = RESUMED[name]
    if task == "distill":
        caches = {"teacher_cache": str(folders["chats"].parent / "cache"), "max_seq_length": 48}
        changes = {**({"teacher": folders["teacher"]} if "beside" in name else caches), **changes}
    train = settings(**{"task": task, "max_seq_length": 96, **changes})
    options = {"reward": shorter} if task == "grpo" else {}

    def run(folder, **more):
        base = folders["embedder"] if task == "embedding" else small_base()
        return train_pack(base, folders[rows], LORA, train, folder, **options, **more)

    first = run(tmp_path / "whole")
    assert bool(first.report.get("shared_prefix")) or "trees" not in name
    whole = first.pack.tensors
    again = run(interrupted(tmp_path / "whole", tmp_path / "cut"), resume=True).pack.tensors
    assert set(whole) == set(again)
    assert all(mx.array_equal(whole[name], again[name]) for name in whole)


MEANINGLESS = [
    ("lm", {"share_prefix": "on", "cache_frozen": "on"}, "conflict", "cache_frozen", "prefix on"),
    ("classify", {"method": "full"}, "conflict", "method", ""),
    ("classify", {"packing": True}, "conflict", "packing", "needs --task lm or distill."),
    ("classify", {"head": "lm"}, "conflict", "head", ""),
    ("reward", {"center_rewards_coefficient": -1}, "invalid", "center_rewards_coefficient", ""),
    ("reward", {"share_prefix": "on"}, "conflict", "task", "--share-prefix on"),
    ("rerank", {"head": "score", "method": "full"}, "conflict", "method", "full"),
    ("lm", {"head": "score"}, "conflict", "head", "--task classify or rerank"),
    ("orpo", {"loss": "ipo"}, "conflict", "loss", "needs --task"),
    ("dpo", {"label_smoothing": 0.5}, "invalid", "label_smoothing", "below 0.5"),
    ("dpo", {"loss": "ipo", "label_smoothing": 0.1}, "conflict", "label_smoothing", "--loss ipo"),
    ("dpo", {"cache_frozen": "on"}, "conflict", "cache_frozen", "--task lm"),
    ("distill", {"on_policy": 0.5}, "conflict", "on_policy", ""),
    (
        *("distill", {"teacher": "t", "teacher_cache": "c", "on_policy": 0.5}),
        *("conflict", "on_policy", ""),
    ),
    ("distill", {"teacher": "t", "packing": True}, "conflict", "packing", ""),
    ("distill", {"teacher": "t", "temperature": 0.5}, "conflict", "temperature", ""),
    ("distill", {"teacher": "t", "on_policy": 0.5, "ce_weight": 0.5}, "conflict", "ce_weight", ""),
    ("distill", {"teacher": "t", "on_policy": 0.5, "loss_on": "all"}, "conflict", "loss_on", ""),
    ("distill", {"teacher": "t", "on_policy": 1.5}, "invalid", "on_policy", ""),
]


@pytest.mark.parametrize(("task", "changes", "code", "flag", "text"), MEANINGLESS, ids=str)
def test_a_setting_without_a_meaning_is_one_line(task, changes, code, flag, text):
    with raises(code, flag, text) as error:
        TrainConfig(task=task, **changes)
    assert "\n" not in error.value.message


def test_the_score_has_no_adapters(folders, tmp_path):
    with raises("conflict", "modules_to_save"):
        lora = LoRAConfig(rank=2, target_modules=("score",))
        train = TrainConfig(task="reward", iters=1)
        train_pack(small_base(), folders["preferences"], lora, train, tmp_path / "p")
