"""README, docs, help and public docstrings follow the rules of prose (tests/helpers/prose.py)."""

import ast
import dataclasses
import inspect
from collections.abc import Iterator

import click

import mlx_packs
from mlx_packs.cli.examples import EXAMPLES
from mlx_packs.cli.main import packs
from mlx_packs.config.data import DataConfig
from mlx_packs.config.fields import facts_of
from mlx_packs.config.lora import LoRAConfig
from mlx_packs.config.recipe import RunOptions
from mlx_packs.config.schema import TrainConfig
from mlx_packs.config.tasks import Phase
from tests.helpers import documents, prose
from tests.helpers.budgets import OWNERS
from tests.helpers.documents import DOCUMENTS
from tests.helpers.imports import PACKAGE, nodes_of, written_files

# Records of what was done, which are not rewritten.
EXEMPT = {"benchmarks/LOG.md", "benchmarks/README.md"}


def test_pages_read_as_plain_english():
    broken = {}
    for page in set(DOCUMENTS) - EXEMPT:
        document = documents.read(page)
        broken[page] = list(prose.breaks_of_page(document))
        if (mean := prose.mean_words(document)) > prose.WORDS:
            broken[page].append(f"{mean:.1f} words per sentence")
    assert not {page: faults for page, faults in broken.items() if faults}


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


def test_help_and_docstrings_read_as_plain_english():
    by_owner = {each for each in (*help_texts(), *docstrings()) if isinstance(each[1], str)}
    assert len(by_owner) > 600
    broken = [
        (owner, *each) for owner, text in by_owner for each in prose.breaks(" ".join(text.split()))
    ]
    assert not broken


def messages() -> Iterator[tuple[str, str]]:
    """The texts of four or more words in the code, those of errors among them; no docstring."""
    for file in written_files():
        nodes = nodes_of(file)
        owners = (node for node in nodes if isinstance(node, OWNERS) and node.body)
        left_out = {getattr(owner.body[0], "value", None) for owner in owners}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                left_out |= set(node.values)
        for node in nodes:
            text = _text(node)
            if node not in left_out and len(text.split()) > 3:
                yield f"{file.relative_to(PACKAGE)}:{node.lineno}", " ".join(text.split())


def _text(node: ast.AST) -> str:
    """A text in the code, with X for what it is formatted with."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "X" for part in node.values)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return ""


def test_messages_and_errors_read_as_plain_english():
    texts = list(messages())
    assert len(texts) > 2000
    assert not [(where, *each) for where, text in texts for each in prose.breaks(text)]


def test_each_rule_finds_its_example_and_passes_good_english():
    for name, rule in {**prose.RULES, prose.NOUN: prose.HEADING}.items():
        mark = "# " if name == prose.NOUN else "- "
        text = f"{mark}{rule.bad}\n\n{mark}{rule.good}\n\n`{rule.bad}`\n"
        page = documents.parse("docs/x.md", text)
        assert {(line, found) for line, found, _ in prose.breaks_of_page(page)} == {(1, name)}
