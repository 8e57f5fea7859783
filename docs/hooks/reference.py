"""Parts of pages that are made from the code: the commands from click, the keys from their fields.

A page has ``<!-- generated: commands -->`` or ``<!-- generated: settings -->`` where they belong.
"""

import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import click

from mlx_packs.cli.main import COMMANDS, packs
from mlx_packs.config.fields import SECTIONS, default_in_words, facts_of, flags_of, valid_range
from mlx_packs.config.recipe import RunOptions
from mlx_packs.config.schema import DataConfig, LoRAConfig, TrainConfig
from mlx_packs.config.tasks import Phase

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_FLAG = re.compile(r"(?<![\w`-])(--[a-z][\w-]*)")
_DEFAULT = re.compile(r"\s*\[([^\[\]]*)\]$")


def _prose(text: str) -> str:
    """Return a help text as Markdown: nothing in it is markup, and flags are code."""
    plain = re.sub(r"([*_\[\]\\])", r"\\\1", " ".join(text.split())).replace("<", "&lt;")
    return _FLAG.sub(r"`\1`", plain)


def _definition(term: str, anchor: str, text: str) -> str:
    return f"`{term}`{{ #{anchor} }}\n:   {text}\n"


def commands() -> str:
    """Return the reference of all commands."""
    root = click.Context(packs, info_name="packs", **packs.context_settings)
    parts = []
    for section, names in COMMANDS.items():
        parts.append(f"## {section}\n")
        for name in names:
            parts += _command(packs.get_command(root, name), name, root)
    return "\n".join(parts)


def _command(command: click.Command, name: str, root: click.Context) -> Iterator[str]:
    context = click.Context(command, root, f"packs {name}")
    usage = " ".join(["packs", name, *command.collect_usage_pieces(context)])
    yield f"### packs {name}\n\n```text\n{usage}\n```\n"
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        yield _prose(paragraph) + "\n"
    sections: dict[str, list[str]] = {}
    for param in command.get_params(context):
        if (record := param.get_help_record(context)) and isinstance(param, click.Option):
            written = _option(name, param, *record)
            sections.setdefault(getattr(param, "section", "Output"), []).append(written)
    for section in sorted(sections, key=SECTIONS.index):
        if len(sections) > 1:
            yield f"#### {section} {{ #{name}-{section.lower().replace(' ', '-')} }}\n"
        yield from sections[section]
    if command.epilog:
        yield from _examples(command.epilog)


def _option(command: str, option: click.Option, term: str, text: str) -> str:
    default = _DEFAULT.search(text)
    sentence = _prose(_DEFAULT.sub("", text))
    if default:
        sentence += f" {_bracketed(default.group(1))}."
    flag = next(name for name in option.opts if name.startswith("--"))[2:]
    return _definition(term, f"{command}-{flag}", sentence)


def _bracketed(text: str) -> str:
    """Return what help shows in brackets (a default, or "required") as a sentence."""
    if not text.startswith("default: "):
        return text.capitalize()
    value = text.removeprefix("default: ")
    return f"Default: {_prose(value) if ' ' in value else f'`{value}`'}"


def _examples(epilog: str) -> Iterator[str]:
    lines = inspect.cleandoc(epilog.replace("\b", "")).splitlines()
    shown = [line for line in lines[1:] if line.strip()]
    code = [
        line.strip() if line.startswith("    ") else f"# {line.strip().rstrip(':')}"
        for line in shown
    ]
    yield "\n".join(["#### Examples\n", "```sh", *code, "```", ""])


def settings() -> str:
    """Return the reference of all keys of a configuration, by section."""
    sections: dict[str, list[dataclasses.Field]] = {}
    for config in (RunOptions, DataConfig, LoRAConfig, TrainConfig):
        for field in dataclasses.fields(config):
            sections.setdefault(facts_of(field).section, []).append(field)
    parts = []
    for section in sorted(sections, key=SECTIONS.index):
        parts += [f"## {section}\n", *(_key(field, field.name) for field in sections[section])]
    parts.append("## Keys of a phase\n")
    parts += [_key(field, f"phases-{field.name}") for field in dataclasses.fields(Phase)]
    return "\n".join(parts)


def _key(field: dataclasses.Field, anchor: str) -> str:
    return _definition(field.name, anchor, " ".join([_prose(facts_of(field).help), *_notes(field)]))


def _notes(field: dataclasses.Field) -> Iterator[str]:
    facts = facts_of(field)
    if facts.choices:
        yield f"One of {_listed(facts.choices)}."
    if (facts.at_least, facts.above) != (None, None):
        yield f"Valid: {valid_range(facts)}."
    if default := default_in_words(field):
        yield f"Default: {_prose(default) if ' ' in default else f'`{default}`'}."
    if flags := flags_of(field):
        yield f"Flag: {_listed(flags)}."
    else:
        yield "In files and Python only."


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


GENERATED = {"commands": commands, "settings": settings}


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """Return a page with its generated parts."""
    for name, generate in GENERATED.items():
        marker = f"<!-- generated: {name} -->"
        if marker in markdown:
            markdown = markdown.replace(marker, generate())
    return markdown
