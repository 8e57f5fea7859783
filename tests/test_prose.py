"""README, docs, help and public docstrings follow the rules of prose (tests/helpers/prose.py)."""

import dataclasses
import inspect
from collections.abc import Iterator

import click
import pytest

import mlx_packs
from mlx_packs.cli.examples import EXAMPLES
from mlx_packs.cli.main import packs
from mlx_packs.config.data import DataConfig
from mlx_packs.config.fields import facts_of
from mlx_packs.config.lora import LoRAConfig
from mlx_packs.config.phase import Phase
from mlx_packs.config.recipe import RunOptions
from mlx_packs.config.schema import TrainConfig
from tests.helpers import documents, prose
from tests.helpers.documents import DOCUMENTS

RECORDS = "a record of what was done, which is not rewritten"
EXEMPT = {
    "CHANGELOG.md": RECORDS,
    "benchmarks/LOG.md": RECORDS,
    "benchmarks/README.md": RECORDS,
    "docs/decisions.md": RECORDS,
}


@pytest.mark.parametrize("page", [page for page in DOCUMENTS if page not in EXEMPT])
def test_a_page_reads_as_plain_english(page):
    document = documents.read(page)
    assert not list(prose.breaks_of_page(document))
    assert prose.mean_words(document) <= prose.WORDS


def help_texts() -> Iterator[tuple[str, str | None]]:
    """Every text of help, with the command or the setting that it is of."""
    context = click.Context(packs)
    for name in packs.list_commands(context):
        command = packs.get_command(context, name)
        assert command is not None
        yield name, command.help
        for option in command.params:
            for fact in ("help", "common", "default_text"):
                yield f"{name} {option.opts[-1]}", getattr(option, fact, None)

        for line, _ in EXAMPLES.get(name, ()):
            yield name, line

    for config in (RunOptions, DataConfig, LoRAConfig, TrainConfig, Phase):
        for field in dataclasses.fields(config):
            if "facts" in field.metadata:
                yield field.name, facts_of(field).help


def docstrings() -> Iterator[tuple[str, str | None]]:
    """The docstrings of all public names and of their public methods, which docs/python.md shows."""
    for name in mlx_packs.__all__:
        public = getattr(mlx_packs, name)
        yield name, inspect.getdoc(public)
        if inspect.isclass(public):
            for method, value in inspect.getmembers(public):
                if not method.startswith("_"):
                    yield f"{name}.{method}", inspect.getdoc(value)


@pytest.mark.parametrize(("texts", "least"), [(help_texts, 500), (docstrings, 100)])
def test_texts_of_the_package_read_as_plain_english(texts, least):
    by_owner = {(owner, text) for owner, text in texts() if isinstance(text, str)}
    assert len(by_owner) > least
    broken = []
    for owner, text in by_owner:
        broken += [(owner, *each) for each in prose.breaks(" ".join(text.split()))]
    assert not broken


@pytest.mark.parametrize("name", prose.RULES)
def test_a_rule_finds_its_example_and_passes_good_english(name):
    rule = prose.RULES[name]
    page = documents.parse("docs/x.md", f"# Plain\n\n- {rule.bad}\n- {rule.good}\n\n`{rule.bad}`\n")
    assert {(line, found) for line, found, _ in prose.breaks_of_page(page)} == {(3, name)}


def test_headings_and_long_sentences_are_found():
    heading, long = prose.HEADING, " ".join(["word"] * 30)
    page = documents.parse("docs/x.md", f"# {heading.bad}\n\nA {long}.\n\n## {heading.good}\n")
    (found,) = prose.breaks_of_page(page)
    assert found.line == 1 and "heading" in found.rule
    assert prose.mean_words(page) > prose.WORDS
