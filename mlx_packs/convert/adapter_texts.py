"""What an adapter's folder says about templates and tokens, beside what its base says.

Trainers save the tokenizer that an adapter was trained with next to it. A pack has none: it answers
by its base's. Only JSON and texts are read here; no tokenizer is loaded.
"""

from collections.abc import Iterator
from pathlib import Path

from ..bases.files import MORE_TEMPLATES
from ..errors import PackError, printable
from ..reading import read_json, read_text

_CONFIG = "tokenizer_config.json"
_TOKENIZER = "tokenizer.json"
_ADDED = "added_tokens.json"
_DEFAULT = "default"  # the chat template that no name chooses
_SHOWN = 3  # added tokens that a note names


def differing_texts(adapter: Path, base: Path, name: str) -> str:
    """Return a note on how an adapter's tokenizer differs from its base's; empty if it does not.

    What the folder of the adapter does not have does not differ; ``name`` is of the base.
    """
    try:
        differences = list(_differences(adapter, base))
    except PackError as error:
        return f"the tokenizer beside the adapter cannot be compared with the base's: {error}"

    if not differences:
        return ""
    return (
        f"the adapter was trained with {' and '.join(differences)}: the pack answers as {name} "
        "does. To answer as it was trained, use a copy of the base with the adapter's tokenizer "
        "and template files"
    )


def _differences(adapter: Path, base: Path) -> Iterator[str]:
    of_base = _templates(base)
    for name, template in _templates(adapter).items():
        if template != of_base.get(name, of_base.get(_DEFAULT)):
            which = f" '{printable(name)}'" if name != _DEFAULT else ""
            yield f"another chat template{which}"

    eos = _eos(adapter)
    eos_of_base = _eos(base)
    if eos is not None and eos_of_base is not None and eos != eos_of_base:
        yield f"another EOS ({printable(eos)} instead of {printable(eos_of_base)})"

    added = sorted(_added(adapter) - _added(base))
    if added:
        shown = ", ".join(printable(token) for token in added[:_SHOWN])
        if len(added) > _SHOWN:
            shown += ", …"
        yield f"{len(added)} more added tokens ({shown})"


def _json_of(folder: Path, name: str) -> dict:
    file = folder / name
    if not file.is_file():
        return {}
    return read_json(file)


def _templates(folder: Path) -> dict[str, str]:
    """Return a folder's chat templates by name, from where transformers looks for them."""
    files = {file.stem: file for file in sorted(folder.glob(MORE_TEMPLATES))}
    if (file := folder / "chat_template.jinja").is_file():
        files[_DEFAULT] = file
    if files:
        return {name: read_text(file).strip() for name, file in files.items()}

    template = _json_of(folder, _CONFIG).get("chat_template")
    if template is None:
        template = _json_of(folder, "chat_template.json").get("chat_template")
    named = {_DEFAULT: template}
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}

    return {
        name: text.strip()
        for name, text in named.items()
        if isinstance(name, str) and isinstance(text, str)
    }


def _eos(folder: Path) -> str | None:
    for name in (_CONFIG, "special_tokens_map.json"):
        token = _json_of(folder, name).get("eos_token")
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            return token
    return None


def _added(folder: Path) -> set[str]:
    tokens = {token for token in _json_of(folder, _ADDED) if isinstance(token, str)}
    entries = []
    decoder = _json_of(folder, _CONFIG).get("added_tokens_decoder")
    if isinstance(decoder, dict):
        entries += decoder.values()
    listed = _json_of(folder, _TOKENIZER).get("added_tokens")
    if isinstance(listed, list):
        entries += listed

    texts = (entry.get("content") for entry in entries if isinstance(entry, dict))
    return tokens | {text for text in texts if isinstance(text, str)}
