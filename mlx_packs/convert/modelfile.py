"""The Modelfile of a pack for Ollama: the model it starts from, checked, and the pack's prompts.

FROM is an absolute path, since Ollama reads a relative one from the folder of the Modelfile.
Ollama's templates are no Jinja: the texts around messages are found by rendering probes.
https://docs.ollama.com/modelfile
"""

import os.path
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bases.chat_template import reads_clock
from ..bases.files import check_files, resolve_checkpoint
from ..bases.readers import DENSE, is_local_model, local_model
from ..bases.tokenizer import adds_bos, load_tokenizer, with_template
from ..bases.turns import answer_end, given_variables, render_conversation
from ..config.data import PLAIN
from ..errors import PackError, errors_of
from ..packs.compatibility import check_checkpoint
from ..packs.manifest import chat_template_of, template_kwargs_of
from ..packs.pack import Pack
from ..terminal import printable

_NAME = re.compile(r"[\w.\-/:]+", re.ASCII)
_ROLES = {"s": "system", "u": "user", "a": "assistant"}
_PROBES = {role: f"\ue000{role}\ue001" for role in _ROLES}
_OWN_TEMPLATE = (
    "Ollama uses the template that it has for the model. Write TEMPLATE into the Modelfile if the "
    "pack needs another one"
)


def modelfile(pack: Pack, adapter: str, start: str | None) -> tuple[str, str, list[str]]:
    """Return a Modelfile, the base model as llama.cpp names it, and notes.

    Without ``start``, FROM is a GGUF for the user to add.
    """
    base = printable(pack.manifest["base"]["id"])
    lines = [f"# {printable(pack.name)}: an adapter of {base}. FROM must be that model."]
    prompts: list[str] = []
    file = None
    if start is None:
        lines.append("# Put its GGUF here as base.gguf, or name the model that you pulled.")
    else:
        start = start.removeprefix(DENSE).removeprefix("ollama:")
        file = _file_of(start)

    notes = []
    if start is not None and file is None:
        try:
            _checked_base(pack, local_model(f"ollama:{start}"))
        except PackError as error:
            if error.code == "mismatch":
                raise
            notes.append(f"Ollama has no {start} here: it was not compared with the pack's base")

    if file is not None:
        folder, config = _checked_base(pack, file)
        tokenizer = load_tokenizer(folder, config, trust_remote_code=False)
        tokenizer = with_template(tokenizer, chat_template_of(pack.manifest))
        prompts = _prompts(tokenizer, template_kwargs_of(pack.manifest))
        start = base = str(file)
    if not prompts and (file is not None or chat_template_of(pack.manifest) is not None):
        notes.append(_OWN_TEMPLATE)

    lines += [f"FROM {start or './base.gguf'}", f"ADAPTER ./{adapter}", *prompts, ""]
    return "\n".join(lines), base, notes


def _file_of(start: str) -> Path | None:
    """Return the file that ``--from`` names; None if it is a model of Ollama."""
    if is_local_model(start):
        return local_model(start).resolve()

    path = Path(start).expanduser()
    is_path = path.suffix.lower() == ".gguf" or start.startswith((".", "/", "~")) or path.is_file()
    if is_path and not path.is_file():
        raise PackError(f"--from {start}: no such file.", "not-found", "from")
    if not (is_path or _NAME.fullmatch(start)) or not str(path).isprintable():
        raise PackError(
            f"--from {start!r:.80}: is no name of Ollama and no .gguf file.", flag="from"
        )
    return Path(os.path.abspath(path)) if is_path else None


def _checked_base(pack: Pack, file: Path) -> tuple[Path, dict]:
    """Return the checkpoint folder of a GGUF file and its config, if it is the pack's base."""
    base = pack.manifest["base"]
    with errors_of("from"):
        if base["id"].lower().endswith(".gguf") or is_local_model(base["id"]):
            prefix = DENSE if base["id"].startswith(DENSE) else ""
            return check_checkpoint(pack, f"{prefix}{file}")
        # it was trained on other weights of the same model
        folder = resolve_checkpoint(file)
        config = check_files(folder)
        _check_shapes(pack, config)
    return folder, config


def _check_shapes(pack: Pack, config: dict) -> None:
    base = pack.manifest["base"]
    family = base["model_type"].removesuffix("_text")
    blocks = [int(n) for path in pack.specs for n in re.findall(r"\.layers\.(\d+)\.", path)]
    widths = {s.in_features for path, s in pack.specs.items() if path.endswith("q_proj")}
    fits = max(blocks, default=0) < config["num_hidden_layers"]
    if (
        family != config["model_type"].removesuffix("_text")
        or not fits
        or (widths and widths != {config["hidden_size"]})
    ):
        raise PackError(
            f"{pack.name}: was trained on {base['id']}, and the file is another model.", "mismatch"
        )


@dataclass(frozen=True)
class _Texts:
    """The texts around messages, by which a template of Ollama writes a conversation."""

    before_system: str
    after_system: str
    before_user: str
    before_answer: str
    after_answer: str
    default_system: str | None  # None writes nothing if a conversation has no system message
    system_in_question: bool  # after what begins the first question

    @classmethod
    def of(cls, rendered: Mapping[str, str], end: str) -> "_Texts":
        """Cut probes at their messages; ValueError or IndexError if one of them is missing."""
        opening, before_answer = rendered["u"].split(_PROBES["u"])
        between = rendered["uau"].split(_PROBES["a"])[1].split(_PROBES["u"])[0]
        before_system, rest = rendered["su"].split(_PROBES["s"])
        after_system = rest.split(_PROBES["u"])[0]

        before_user = os.path.commonprefix([opening[::-1], between[::-1]])[::-1]
        if end and end in before_user:  # it ends a default system message, too
            before_user = before_user.rpartition(end)[2].lstrip()
        after_answer = between.removesuffix(before_user)

        if before_system == opening:
            texts = (after_system, before_user, before_answer, after_answer)
            return cls("", *texts, None, system_in_question=True)

        default = None
        after_system = after_system.removesuffix(before_user)
        if first := opening.removesuffix(before_user):
            default = first.removeprefix(before_system).removesuffix(after_system)
        texts = (before_system, after_system, before_user, before_answer, after_answer)
        return cls(*texts, default, system_in_question=False)

    def render(self, roles: str) -> str:
        """Return the prompt that Ollama makes of probes."""
        system = _PROBES["s"] if roles.startswith("s") else self.default_system

        text = ""
        for turn in roles.removeprefix("s").split("a"):
            if text:
                text += _PROBES["a"] + self.after_answer
            text += self._question(system or "", _PROBES["u"], is_first=bool(system and not text))
            text += self.before_answer * len(turn)

        return text

    def lines(self) -> list[str]:
        """Return the instructions of a Modelfile."""
        system = f"{{{{ if .System }}}}{self.before_system}{{{{ .System }}}}{self.after_system}"
        parts = [f"{system}{{{{ end }}}}", self.before_user]
        if self.system_in_question:
            parts.reverse()

        text = f"{''.join(parts)}{{{{ .Prompt }}}}{self.before_answer}{{{{ .Response }}}}"
        lines = [f'TEMPLATE """{text}{self.after_answer}"""']
        if self.default_system is not None:
            lines.append(f'SYSTEM """{self.default_system}"""')
        return lines

    def _question(self, system: str, question: str, is_first: bool) -> str:
        parts = [f"{self.before_system}{system}{self.after_system}" * is_first, self.before_user]
        if self.system_in_question:
            parts.reverse()
        return "".join(parts) + question


def _prompts(tokenizer: Any, variables: Mapping[str, Any]) -> list[str]:
    """Return the lines that make Ollama's prompts equal a tokenizer's; none if it cannot."""
    if not tokenizer.has_chat_template or PLAIN in str(tokenizer.chat_template):
        return ['TEMPLATE """{{ .Prompt }}"""']

    if reads_clock(tokenizer):
        return []

    def rendered(roles: str) -> str:
        messages = [{"role": _ROLES[role], "content": _PROBES[role]} for role in roles]
        options = {**given_variables(variables), "add_generation_prompt": True}
        text = render_conversation(tokenizer, messages, **options)
        return text.removeprefix(bos)

    bos = tokenizer.bos_token if adds_bos(tokenizer) else ""  # which llama.cpp adds, too
    end = answer_end(tokenizer).text
    try:
        probes = {roles: rendered(roles) for roles in ("u", "su", "uau", "suau")}
        texts = _Texts.of(probes, end)
    except (PackError, ValueError, IndexError):
        return []

    lines = texts.lines()
    has_syntax = any("{{" in text or '"""' in text for text in probes.values())
    if (
        has_syntax
        or texts.default_system == ""
        or any(texts.render(roles) != text for roles, text in probes.items())
    ):
        return []
    if end:
        lines.append(f'PARAMETER stop "{end}"')
    return lines
