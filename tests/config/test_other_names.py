"""Flags and keys of other trainers, and those that were removed, are answered with ours."""

import pytest

import mlx_packs as mp
from mlx_packs.cli.main import REMOVED_COMMANDS, packs
from mlx_packs.cli.options import SETTINGS
from mlx_packs.config.arguments import checked_arguments
from mlx_packs.config.fields import facts_of
from mlx_packs.config.other_names import _VALUES, _WITHOUT, OTHER_NAMES, REMOVED, without_removed
from mlx_packs.config.recipe import _OWNERS, resolve
from tests.helpers.errors import raises


def run(words: str) -> None:
    packs(words.split(), standalone_mode=False)


def test_all_are_answered_with_a_setting_and_are_none():
    assert set(OTHER_NAMES.values()) <= set(_OWNERS)
    assert not set(OTHER_NAMES) & set(_OWNERS)
    with raises("unknown", None, "adam_beta2", OTHER_NAMES["adam_beta2"]):
        resolve({"adam_beta2": 1}, "recipe.yaml")  # flags: tests/cli/test_help.py


def test_a_value_is_answered_with_ours():
    for words, setting, ours in (
        ("--task sft", "task", "Use lm."),
        ("--task ppo", "task", "Use grpo."),
        ("--loss-on response", "loss_on", "Use completion."),
        ("--lr-schedule polynomial", "lr_schedule", "Use linear."),
        ("--method qlora", "method", "Use lora, and add --quantize nf4."),
        ("--report-to none", "report_to", "Leave it out."),
    ):
        with raises("unknown", setting, words.split()[1], ours):
            run(f"train {words}")
    with raises("invalid", "learning_rate"):
        run("train --lr -1")
    with raises("invalid", "to", "Use peft."):
        run("export packs/x --out a --to vllm")


def test_values_that_are_suggested_are_no_other_setting():
    for setting in SETTINGS.keys() & _VALUES.keys():
        values = _VALUES[setting]
        choices = set(facts_of(SETTINGS[setting]).choices)
        theirs = {value for names in values.values() for value in names.split()}
        assert {ours.partition(",")[0] for ours in values} <= choices
        assert not theirs & choices


def test_removed_settings_of_a_file_are_left_out_unless_they_were_used():
    assert without_removed({"for_merge": "none", "rank": 4}) == {"rank": 4}
    assert without_removed({"for_merge": "affine4"}) == {"for_merge": "affine4"}


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        ("train --for-merge affine4", "packs merge measures what a merge loses"),
        ("serve --no-kv-bits", "raise --kv-memory"),
        ("eval-batch --hosts=h.json", "Use it with packs train."),
    ],
)
def test_a_removed_flag_of_any_command_says_what_to_use_now(words, instead):
    flag = words.split()[1].partition("=")[0]
    with raises("unknown", None, f"{flag}: was removed. ", instead):
        run(words)


def test_a_removed_key_argument_or_setting_says_what_to_use_now():
    with raises("unknown", "block", "recipe.yaml: block:", "Use --group-size."):
        resolve({"block": 1}, "recipe.yaml")
    with raises("unknown", "block", "TrainConfig: block:"):
        mp.TrainConfig(block=1)
    with raises("unknown", "block", "train_pack: block:") as caught:
        mp.train_pack("data", "out", block=1)
    assert str(caught.value).endswith("Use group_size.")

    @checked_arguments
    def generate(**options: int) -> None: ...

    with raises("unknown", "block"):
        generate(block=1)


def test_nothing_that_exists_was_removed():
    without = {name for names in _WITHOUT for name in names.split()}
    assert not {*REMOVED, *without} & {*_OWNERS, *OTHER_NAMES}
    assert not set(REMOVED_COMMANDS) & set(packs.list_commands(None))
    sentences = [*REMOVED.values(), *REMOVED_COMMANDS.values()]
    assert all(sentence.endswith(".") for sentence in sentences)
