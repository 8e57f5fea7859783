"""Errors: the same message in terms of the command line and of Python, its code and setting."""

import pytest

from mlx_packs.errors import PackError, did_you_mean


@pytest.mark.parametrize(
    ("message", "python", "flag"),
    [
        (
            "--max-seq-length 8: is too short. Pass a larger --max-seq-length.",
            "max_seq_length 8: is too short. Pass a larger max_seq_length.",
            "max_seq_length",
        ),
        (
            "--no-double-quant: needs --quantize nf4.",
            "double_quant=False: needs quantize nf4.",
            "double_quant",
        ),
        (
            "d: is a folder. Run `packs import d --out e`, or pass --model.",
            "d: is a folder. Run `packs import d --out e`, or pass model.",
            None,
        ),
        ("a--b: is not a-flag or x--y, but --c.", "a--b: is not a-flag or x--y, but c.", None),
    ],
)
def test_message_is_in_terms_of_its_surface(message, python, flag):
    error = PackError(message)
    assert (error.format_message(), str(error), error.flag) == (message, python, flag)


def test_flag_that_is_named_wins_over_the_one_in_the_message():
    assert PackError("--out o: is there.", "exists", flag="overwrite").flag == "overwrite"


def test_show_prints_one_line_that_cannot_steer_a_terminal(capsys):
    PackError("--out \x1b]0;x\n: is there.").show()
    assert capsys.readouterr() == ("", "packs: --out ?]0;x?: is there.\n")


def test_did_you_mean_names_the_nearest_or_all():
    assert "'rank'" in did_you_mean("rnak", ["rank", "alpha"])
    assert did_you_mean("zzz", ["b", "a"]).index("a") < did_you_mean("zzz", ["b", "a"]).index("b")


def test_the_text_stays_apart_from_its_place():
    error = PackError("--rank: must be 2.", "data", where="recipe.yaml")
    assert (error.message, error.text) == ("recipe.yaml: --rank: must be 2.", "--rank: must be 2.")
    assert (error.where, error.code, error.flag) == ("recipe.yaml", "data", None)
