"""Write the manual pages of the commands: ``python docs/man/pages.py`` writes man1/*.1.

click-man writes the roff; the text that it is given is escaped here, since click-man escapes none.
"""

import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
from click_man.man import ManPage

from mlx_packs import __version__
from mlx_packs.cli.main import COMMANDS, packs
from mlx_packs.config.fields import SECTIONS

FOLDER = Path(__file__).parent / "man1"
_SPECIAL = str.maketrans(
    {"\\": r"\e", "-": r"\-", "'": r"\(aq", "`": r"\(ga", "^": r"\(ha", "~": r"\(ti"}
)
_LEFT = ".nh\n.ad l\n"  # no word is hyphenated, and no line is justified
_FLAG = re.compile(r"(?<![\w-])((?:\\-){1,2}[a-z](?:\w|\\-)*)")  # escaped


def eager() -> click.Group:
    """Return the root command with all of its commands imported."""
    root = click.Context(packs)
    commands = {name: packs.get_command(root, name) for name in packs.list_commands(root)}
    return click.Group("packs", commands, help=packs.help, params=packs.params)


def escape(line: str) -> str:
    """Return a line of text as roff that prints it as it is, so that it can be copied."""
    return line.translate(_SPECIAL).replace(".", r"\&.", line.startswith("."))


def prose(text: str) -> str:
    """Return a paragraph with its flags in bold."""
    lines = textwrap.wrap(text, 72, break_long_words=False, break_on_hyphens=False)
    return "\n".join(_FLAG.sub(r"\\fB\1\\fP", escape(line)) for line in lines)


def literal(lines: Iterable[str]) -> str:
    """Return lines that stay as they are."""
    return "\n".join([".RS 4", ".nf", *map(escape, lines), ".fi", ".RE"])


def description(text: str) -> str:
    """Return the paragraphs of a help text; after a backspace one keeps its lines."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(
        literal(lines[1:]) if (lines := paragraph.splitlines())[0] == "\b" else prose(paragraph)
        for paragraph in paragraphs
    )


def term(record: str) -> str:
    """Return the flags and the value of an option, as one word: click-man splits at spaces."""
    flags, _, value = record.rpartition(" ")
    if not flags or value.startswith("-"):
        flags, value = record, ""
    marked = re.sub(r"([,/ ]+)", r"\\fR\1\\fB", flags)
    return marked.replace(" ", r"\~") + (rf"\fR\~\fI{value}" if value else "")


def listed(rows: Iterable[tuple[str, str]]) -> str:
    """Return a list of definitions."""
    page = ManPage("")
    page.options = list(rows)
    return str(page).partition(".SH OPTIONS\n")[2]


def options(context: click.Context) -> Iterator[str]:
    """Write the options, in the sections of the help."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for param in context.command.get_params(context):
        record = param.get_help_record(context)
        if record and isinstance(param, click.Option):
            row = (term(record[0]), prose(record[1]))
            sections.setdefault(getattr(param, "section", "Output"), []).append(row)
    yield ".SH OPTIONS\n"
    for section in sorted(sections, key=SECTIONS.index):
        if len(sections) > 1:
            yield f".SS {section}\n"
        yield listed(sections[section])


def commands(context: click.Context) -> Iterator[str]:
    """Write the commands of the root, in the sections of its help."""
    yield ".SH COMMANDS\n"
    for section, names in COMMANDS.items():
        yield f".SS {section}\n"
        yield listed((rf"packs\~{name}", short(context.command.commands[name])) for name in names)


def short(command: click.Command) -> str:
    """Return the first sentence of a command's help."""
    return prose(command.get_short_help_str(limit=1000).rstrip("."))


def examples(epilog: str) -> str:
    """Write what each example does, and its command."""
    lines = inspect.cleandoc(epilog.replace("\b", "")).splitlines()[1:]
    paragraphs = [
        literal([line.strip()]) if line.startswith("    ") else prose(line.strip())
        for line in lines
    ]
    return ".SH EXAMPLES\n" + "\n.PP\n".join(paragraphs) + "\n"


def references(name: str) -> str:
    """Write the pages to see: from the root all, from a command the root and those of its section."""
    names = [f"packs-{other}" for section in COMMANDS.values() for other in section]
    if name:
        section = next(section for section in COMMANDS.values() if name in section)
        names = ["packs", *(f"packs-{other}" for other in section if other != name)]
    return ".SH SEE ALSO\n" + ",\n".join(rf"\fB{escape(other)}\fP(1)" for other in names) + "\n"


def head(context: click.Context) -> str:
    """Return title, name, synopsis and description; click-man leaves hyphens of a name as they are."""
    command, path = context.command, context.command_path
    manual = ManPage(path)
    manual.date = ""  # the same page every day
    manual.version = f"mlx-packs {__version__}"
    manual.short_help = short(command)
    manual.synopsis = " ".join(command.collect_usage_pieces(context))
    manual.description = description(command.help)
    title, rest = str(manual).split("\n", 1)
    title = title.replace(path.upper(), path.upper().replace(" ", "-"))
    rest = rest.replace(path.replace(" ", r"\-"), escape(path.replace(" ", "-")), 1)
    return f"{title}\n{_LEFT}{rest.replace(f'.B {path}', f'.B {escape(path)}', 1)}"


def page(context: click.Context, name: str = "") -> str:
    """Return the page of a command."""
    parts = [head(context), *options(context)]
    if isinstance(context.command, click.Group):
        parts += commands(context)
    if context.command.epilog:
        parts.append(examples(context.command.epilog))
    return "".join([*parts, references(name)])


def main() -> None:
    """Write all pages."""
    group = eager()
    root = click.Context(group, info_name="packs", **packs.context_settings)
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "packs.1").write_text(page(root), encoding="utf-8")
    for name, command in group.commands.items():
        context = click.Context(command, root, name)
        (FOLDER / f"packs-{name}.1").write_text(page(context, name), encoding="utf-8")


if __name__ == "__main__":
    main()
