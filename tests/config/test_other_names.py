"""Flags and keys of other trainers are answered with ours."""

from mlx_packs.cli.main import packs
from mlx_packs.cli.options import SETTINGS
from mlx_packs.config.fields import facts_of
from mlx_packs.config.other_names import _VALUES, OTHER_NAMES, without_removed
from mlx_packs.config.recipe import _OWNERS, resolve
from mlx_packs.errors import flag_of
from tests.helpers.errors import raises


def test_all_are_answered_with_a_setting_and_are_none():
    assert set(OTHER_NAMES.values()) <= set(_OWNERS)
    assert not set(OTHER_NAMES) & set(_OWNERS)
    with raises("unknown", None, "adam_beta2", OTHER_NAMES["adam_beta2"]):
        resolve({"adam_beta2": 1}, "recipe.yaml")  # flags: tests/cli/test_help.py


def test_a_value_is_answered_with_ours():
    for setting, value, ours in (
        ("task", "sft", "Use lm."),
        ("method", "qlora", "Use lora, and add --quantize nf4."),
        ("report_to", "none", "Leave it out."),
    ):
        with raises("unknown", setting, value, ours):
            packs(["train", flag_of(setting), value], standalone_mode=False)


def test_values_that_are_suggested_are_no_other_setting():
    for setting in SETTINGS.keys() & _VALUES.keys():
        values = _VALUES[setting]
        choices = set(facts_of(SETTINGS[setting]).choices)
        theirs = {value for names in values.values() for value in names.split()}
        assert {ours.partition(",")[0] for ours in values} <= choices
        assert not theirs & choices


def test_lr_is_the_learning_rate():
    with raises("invalid", "learning_rate"):
        packs(["train", "--lr", "-1"], standalone_mode=False)


def test_removed_settings_of_a_file_are_left_out_unless_they_were_used():
    assert without_removed({"for_merge": "none", "rank": 4}) == {"rank": 4}
    assert without_removed({"for_merge": "affine4"}) == {"for_merge": "affine4"}
