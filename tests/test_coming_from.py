"""docs/coming_from.md has every name of other trainers, with the setting that errors name."""

import dataclasses
import re
from collections.abc import Iterator
from typing import NamedTuple

import click
import pytest

from mlx_packs.cli.main import packs
from mlx_packs.cli.options import SETTINGS
from mlx_packs.config.other_names import OTHER_NAMES, OTHER_VALUES, removal
from tests.helpers.documents import ROOT

PAGE = (ROOT / "docs" / "coming_from.md").read_text("utf-8")
# Arguments of a callback, of trainers that TRL keeps among its experiments, of transformers'
# function for schedules, and one that only transformers 4 has.
NO_FIELDS = {"early_stopping_patience", "lmbda", "teacher_model_name_or_path"}
NO_FIELDS |= {"num_warmup_steps", "warmup_ratio"}


class Row(NamedTuple):
    """A row of a table: names of another program, and the first part of ours."""

    program: str
    theirs: list[str]
    ours: str


def rows() -> Iterator[Row]:
    for section in PAGE.split("\n## ")[1:]:
        program = section.splitlines()[0]
        for line in section.partition("| theirs |")[2].splitlines()[2:]:
            if not line.startswith("|"):
                break
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            yield Row(program, re.findall(r"`(\w+)`", cells[0]), cells[1])


def flags() -> set[str]:
    context = click.Context(packs, **packs.context_settings)
    command = packs.get_command(context, "train")
    assert command is not None
    return {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}


def expected(name: str) -> set[str]:
    """The ways in which the page may write the setting that replaces a name."""
    ours = OTHER_NAMES[name]
    flag = f"--{ours.replace('_', '-')}"
    return {f"`{ours}`", f"`{flag}`", f"`{flag} {OTHER_VALUES.get(name)}`"}


def test_every_name_is_in_a_table_with_its_setting():
    table = list(rows())
    assert {name for row in table for name in row.theirs} >= set(OTHER_NAMES)

    wrong = []
    for row in table:
        ours = row.ours.split(",")[0]
        for name in row.theirs:
            if name in OTHER_NAMES and ours not in expected(name):
                wrong.append((name, row.ours, expected(name)))
    assert not wrong


def test_other_equivalents_exist_and_nothing_has_two():
    known = flags()
    for program, theirs, ours in rows():
        for name in set(theirs) - set(OTHER_NAMES):
            if ours == "the same":
                assert name in SETTINGS, (program, name)
            elif ours == "none":
                assert name not in SETTINGS and removal(name), (program, name)
            else:
                flag = re.match(r"`(--[a-z-]+|packs [a-z-]+)", ours).group(1)
                assert flag in known or flag.split()[-1] in packs.list_commands(None), name


def fields(*classes: type) -> set[str]:
    return {field.name for each in classes for field in dataclasses.fields(each)}


@pytest.mark.interop
def test_names_of_peft_and_trl_are_theirs():
    import inspect

    import peft
    import transformers
    import trl

    lora = fields(peft.LoraConfig)
    for quantization in (transformers.BitsAndBytesConfig, transformers.AwqConfig):
        lora |= set(inspect.signature(quantization).parameters)
    training = fields(trl.SFTConfig, trl.DPOConfig, trl.GRPOConfig, trl.ModelConfig)
    training |= fields(trl.ScriptArguments) | set(inspect.signature(trl.GRPOTrainer).parameters)

    for program, known in (("PEFT", lora), ("TRL and transformers", training | NO_FIELDS)):
        named = {name for row in rows() if row.program == program for name in row.theirs}
        assert len(named) > 15
        assert named - known == set()
