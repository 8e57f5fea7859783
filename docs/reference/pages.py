"""Write the reference: ``python docs/reference/pages.py`` writes commands, settings and python.md.

The text is the program's own: help of the commands, facts of the settings, and docstrings of the
names that docs/python.md lists. It is stored so that it can be read where nothing is built.
"""

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

import mlx_packs
from mlx_packs.cli.main import COMMANDS, packs
from mlx_packs.config.fields import SECTIONS, default_in_words, facts_of, flags_of, valid_range
from mlx_packs.config.recipe import RunOptions
from mlx_packs.config.schema import DataConfig, LoRAConfig, TrainConfig
from mlx_packs.config.tasks import Phase

FOLDER = Path(__file__).parent
_SETTINGS = {"LoRAConfig", "TrainConfig", "DataConfig", "Phase"}  # whose fields settings.md has
_LINK = re.compile(r"\[`(\w+)`\]\(reference/python\.md#\w+\)")
_PART = re.compile(r"^(Args|Attributes|Returns|Raises|Yields):$")
_TITLES = {"Args": "Arguments"}
_ENTRY = re.compile(r"^(\*{0,2}\w+): (.*)$", re.DOTALL)
_FLAG = re.compile(r"(?<![\w`-])(--[a-z][\w-]*)")
_DEFAULT = re.compile(r"\s*\[([^\[\]]*)\]$")


def _prose(text: str) -> str:
    """Return a help text as Markdown: nothing in it is markup, and flags are code."""
    plain = re.sub(r"([*_\[\]\\])", r"\\\1", " ".join(text.split())).replace("<", "&lt;")
    return _FLAG.sub(r"`\1`", plain)


def _definition(term: str, anchor: str, text: str) -> str:
    return f'- <a id="{anchor}"></a>`{term}`: {text}'


def commands() -> str:
    """Return the page of all commands."""
    root = click.Context(packs, info_name="packs", **packs.context_settings)
    parts = ["# Commands\n", "The text of `packs COMMAND -h --all`.\n"]
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
            yield f"**{section}**\n"
        yield "\n".join(sections[section]) + "\n"
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
    yield "\n".join(["**Examples**\n", "```sh", *code, "```", ""])


def settings() -> str:
    """Return the page of all keys of a configuration, by section."""
    sections: dict[str, list[dataclasses.Field]] = {}
    for config in (RunOptions, DataConfig, LoRAConfig, TrainConfig):
        for field in dataclasses.fields(config):
            sections.setdefault(facts_of(field).section, []).append(field)
    parts = ["# Settings", "Keys of recipe files, flags, and names in Python."]
    for section in sorted(sections, key=SECTIONS.index):
        parts.append(f"## {section}")
        parts.append("\n".join(_key(field, field.name) for field in sections[section]))
    parts.append("## Keys of a phase")
    keys = (_key(field, f"phases-{field.name}") for field in dataclasses.fields(Phase))
    return "\n\n".join([*parts, "\n".join(keys)])


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


def python() -> str:
    """Return the page of the public names, in the sections of docs/python.md."""
    parts = ["# Python names\n"]
    sections = (FOLDER.parent / "python.md").read_text("utf-8").split("\n## ")[1:]
    for section in sections:
        if names := _LINK.findall(section):
            parts.append(f"## {section.splitlines()[0]}\n")
            for name in names:
                parts += _public(name, getattr(mlx_packs, name), "###")
    return "\n".join(parts)


def _public(name: str, value: Any, heading: str) -> Iterator[str]:
    """Yield the heading of a name, its signature and docstring, and the same of its methods."""
    yield f"{heading} {name}\n"
    if name in _SETTINGS:
        yield inspect.cleandoc(value.__doc__).split("\n\n")[0] + "\n"
        yield "Its fields are [settings](settings.md), given by name.\n"
        return
    if callable(value) and not (inspect.isclass(value) and issubclass(value, Exception)):
        yield f"```python\n{_signature(name, value)}\n```\n"
    yield from _docstring(inspect.getdoc(value) or "")
    if inspect.isclass(value):
        for method, found in vars(value).items():
            function = inspect.unwrap(getattr(found, "__func__", found))
            if inspect.isfunction(function) and not method.startswith("_"):
                yield from _public(f"{name}.{method}", getattr(value, method), "####")


def _signature(name: str, function: Any) -> str:
    """Return a call with the names and defaults of all arguments."""
    parameters = [
        parameter.replace(annotation=parameter.empty)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name != "self"
    ]
    call = f"{name}{inspect.Signature(parameters)}"
    return textwrap.fill(call, 88, subsequent_indent="    ", break_on_hyphens=False)


def _docstring(text: str) -> Iterator[str]:
    """Yield the paragraphs of a docstring, its arguments and attributes as lists."""
    for paragraph in text.split("\n\n"):
        head, *lines = paragraph.splitlines()
        if not (part := _PART.match(head)):
            yield _code(paragraph) + "\n"
            continue
        yield f"**{_TITLES.get(part[1], part[1])}**\n"
        yield "\n".join(f"- {_entry(entry)}" for entry in _entries(lines)) + "\n"


def _entries(lines: Iterable[str]) -> list[str]:
    """Return the entries of a section of a docstring; further lines of one are indented."""
    entries: list[str] = []
    for line in lines:
        if line.startswith("     ") and entries:
            entries[-1] += " " + line.strip()
        else:
            entries.append(line.strip())
    return entries


def _entry(entry: str) -> str:
    if named := _ENTRY.match(entry):
        return f"`{named[1]}`: {_code(named[2])}"
    return _code(entry)


def _code(text: str) -> str:
    """Return the text of a docstring as Markdown; what is indented is an example."""
    if text.startswith("    "):
        return f"```python\n{inspect.cleandoc(text)}\n```"
    return text.replace("``", "`").replace("<", "&lt;")


PAGES = {"commands.md": commands, "settings.md": settings, "python.md": python}


def main() -> None:
    """Write the pages."""
    for name, generate in PAGES.items():
        text = f"<!-- written by docs/reference/pages.py -->\n{generate().strip()}\n"
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
