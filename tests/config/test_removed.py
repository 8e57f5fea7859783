"""Settings and commands that were removed are answered with what to use now."""

import pytest

import mlx_packs as mp
from mlx_packs.cli.main import REMOVED_COMMANDS, packs
from mlx_packs.config.arguments import checked_arguments
from mlx_packs.config.other_names import _WITHOUT, OTHER_NAMES, REMOVED
from mlx_packs.config.recipe import _OWNERS, resolve
from tests.helpers.errors import raises

INSTEAD = "Use --batch-size."


@pytest.fixture(autouse=True)
def removed(monkeypatch):
    monkeypatch.setitem(REMOVED, "old_size", INSTEAD)
    monkeypatch.setitem(REMOVED_COMMANDS, "old-command", "Use packs train.")


def run(*words: str) -> None:
    packs(list(words), standalone_mode=False)


@pytest.mark.parametrize("words", ["train --old-size", "serve --no-old-size", "eval --old-size=3"])
def test_a_flag_of_any_command(words):
    with raises("unknown", None, words.split()[1].partition("=")[0], INSTEAD):
        run(*words.split())


def test_a_key_of_a_recipe():
    with raises("unknown", "old_size", "recipe.yaml: old_size:", INSTEAD):
        resolve({"old_size": 1}, "recipe.yaml")


def test_an_argument_and_a_setting_in_python():
    with raises("unknown", "old_size", "TrainConfig: old_size:", INSTEAD):
        mp.TrainConfig(old_size=1)
    with raises("unknown", "old_size", "train_pack: old_size:", INSTEAD) as caught:
        mp.train_pack("data", "out", old_size=1)
    assert str(caught.value).endswith("Use batch_size.")

    @checked_arguments
    def generate(**options: int) -> None: ...

    with raises("unknown", "old_size", INSTEAD):
        generate(old_size=1)


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        ("train --for-merge affine4", "packs merge measures what a merge loses"),
        ("quantize --format bitsandbytes", "BitsAndBytesConfig(load_in_4bit=True"),
        ("train --on-long-row drop", "Use --on-bad-row skip"),
        ("serve --kv-bits 8", "raise --kv-memory"),
        ("serve --ratings-per-hour 9", "the key or the token"),
        ("quantize --block 32", "Use --group-size."),
        ("sweep --runner ray", "one after another on this machine"),
        ("eval-batch --hosts h.json", "Use it with packs train."),
    ],
)
def test_what_was_removed_says_what_to_use_now(words, instead):
    with raises("unknown", None, words.split()[1], "was removed", instead):
        run(*words.split())


def test_a_command():
    with raises("unknown", "command", "old-command", "Use packs train."):
        run("old-command")


def test_nothing_that_exists_was_removed():
    without = {name for names in _WITHOUT for name in names.split()}
    assert not {*REMOVED, *without} & {*_OWNERS, *OTHER_NAMES}
    assert not set(REMOVED_COMMANDS) & set(packs.list_commands(None))
    sentences = [*REMOVED.values(), *REMOVED_COMMANDS.values()]
    assert all(sentence.endswith(".") for sentence in sentences)
