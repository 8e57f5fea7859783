"""The settings for the location of examples, the names of their columns, and chat templates."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import PackError
from ..reading import read_text
from .choices import DECODER_TASKS
from .fields import Fault, Settings, fields_where, option

_data = partial(option, section="Model and data")
_text = partial(_data, tasks=DECODER_TASKS)
_column = partial(_text, metavar="COLUMN", column=True)

NO_METRIC = "none"
_EMBEDDED_METRIC = "exact"  # of the embedded data set, where none is named
MOST_QUESTIONS = 100  # that are answered for a metric
FOLLOWED = 5  # prompts that --sample-every answers

# Arguments of transformers' apply_chat_template, and of the functions here that render.
_RENDERER = frozenset(
    "self tools documents add_generation_prompt continue_final_message conversation chat_template "
    "tokenize padding truncation max_length return_tensors return_dict "
    "return_assistant_tokens_mask tokenizer_kwargs sanitize_control_tokens messages template_date "
    "base tokenizer".split()
)

# The prompt and then the completion, as TRL trains on both without a template. A tokenizer that
# begins texts with BOS begins these with it (`bases.tokenizer`).
PLAIN = """\
{%- for message in messages %}
{%- if loop.index > 2 or message.role != ('user' if loop.first else 'assistant') %}
{{- raise_exception('plain text is one prompt and one completion. Name a template of roles by \
--chat-template') }}
{%- endif %}
{{- message.content }}
{%- endfor %}
"""
_CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
CHAT_TEMPLATES = {"plain": PLAIN, "chatml": _CHATML}
# What each marks turns with: tokens that the tokenizer of a base must have.
MARKS = {_CHATML: ("<|im_start|>", "<|im_end|>")}


@dataclass(frozen=True, repr=False)
class DataConfig(Settings):
    """The source of the examples, and the names of their columns."""

    data: str | Any = _data(  # Python has examples in memory, too
        "tiny",
        "Training data, as a folder, a file, files by a pattern ('DIR/*.jsonl'), a Hugging Face "
        "dataset id (hf:ID streams it), or 'tiny' (bundled).",
        metavar="DATA",
        phase=True,
    )
    chat_feature: str = _column("messages", "Column with the messages of a chat.")
    prompt_feature: str = _column("prompt", "Column with the prompt (what is asked).")
    completion_feature: str = _column("completion", "Column with the completion (what is learned).")
    text_feature: str = _column("text", "Column with plain text.")
    on_bad_row: str = _data(
        "stop",
        "What to do with examples that cannot be used, or whose images do not fit into "
        "--max-seq-length: stop with an error that names file and line, or skip and count them.",
        choices=("stop", "skip"),
    )
    hold_out: str = _data(
        "sample",
        "Examples to hold out if there are none for validation: a random sample, which is the "
        "same in every run and keeps near-duplicates together, or the last ones.",
        choices=("sample", "last"),
    )
    chat_template: str | None = _text(
        None,
        f"Chat template in place of the base model's, in training and in use: "
        f"{', '.join(CHAT_TEMPLATES)}, or a .jinja file. plain joins prompt and completion.",
        shown_default="the base model's; plain for prompts and completions if it has none",
        metavar="NAME",
    )
    template_kwargs: dict = _text(
        {},
        "Variables of the chat template, such as '{\"enable_thinking\": false}', in training and "
        "wherever the pack generates. A column chat_template_kwargs sets them for one example.",
        metavar="JSON",
    )
    template_date: str | None = _text(
        None,
        "Date that a chat template which reads the clock sees in training.",
        shown_default="the day on which the run starts",
        metavar="YYYY-MM-DD",
    )
    max_pixels: int = _text(
        1280 * 28 * 28,
        "Maximum number of pixels of an image. Larger images are made smaller, in their shape; 0 "
        "leaves all as they are.",
        at_least=0,
    )
    allow_urls: bool = _text(
        False,
        "Fetch the images that examples name by an HTTP URL, at most 20 MB each. By default such a "
        "URL is an error.",
        resumable=True,
    )
    hf_dataset: dict | list | None = _data(
        None, "Hugging Face datasets with splits and columns, as in mlx-lm.", flags=(), phase=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chat_template is not None:
            object.__setattr__(self, "chat_template", template_text(self.chat_template))

    def _conflicts(self) -> Iterator[Fault]:
        if self.data is None or isinstance(self.data, (bool, int, float)):
            text = f"must be text that names a source, or examples, but is {self.data!r}."
            yield Fault("data", text)
        if taken := renderer_argument(self.template_kwargs):
            yield Fault(
                "template_kwargs", f"{taken} is not a variable of the template. Leave it out."
            )
        if self.template_date is not None and not _is_date(self.template_date):
            text = f"must be a date such as 2026-01-31, but is {self.template_date!r:.60}."
            yield Fault("template_date", text)


Columns = DataConfig | Mapping[str, Any]  # as a public function takes them


# Parts of the layout of JSON in answers, which packs record, and what each may be: a grammar of
# answers has them in regular expressions.
JSON_LAYOUT = {
    "item_separator": r"[ \t]{0,4},[ \t]{0,4}",
    "key_separator": r"[ \t]{0,4}:[ \t]{0,4}",
    "inside": r" {0,4}|\r?\n[ \t]{0,16}",  # after the first bracket
    "opening": r"\s{0,8}(```\w{0,16}\s{1,8})?",  # before the first bracket
}


def template_text(value: str) -> str:
    """Return the text of a template: of a known name, of a file, or the text itself."""
    if value in CHAT_TEMPLATES:
        return CHAT_TEMPLATES[value]
    if "{{" in value or "{%" in value:
        return value

    try:
        text = read_text(Path(value).expanduser())
    except (OSError, PackError):
        fault = "is no file that can be read"
    else:
        if "{{" in text or "{%" in text:
            return text
        fault = "has no template in Jinja"
    names = ", ".join(CHAT_TEMPLATES)
    raise PackError(
        f"--chat-template {value:.60}: {fault}. Name a .jinja file, such as chat_template.jinja of "
        f"the instruct model, or one of {names}.",
        "invalid",
        "chat_template",
    )


def renderer_argument(variables: Iterable[str]) -> str | None:
    """Return the first name that is an argument of the renderer, no variable of a template."""
    return next((name for name in variables if name in _RENDERER), None)


def metric_of(name: str | None, columns: DataConfig) -> str | None:
    """Return the metric for some data: the named one, or the embedded data set's default."""
    if name is None:
        is_embedded = columns.data == "tiny" and columns.hf_dataset is None
        return _EMBEDDED_METRIC if is_embedded else None
    if name == NO_METRIC:
        return None
    return name


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


# The settings that name columns of the data.
COLUMN_SETTINGS = fields_where(DataConfig, column=True)
OF_EXAMPLES = (*COLUMN_SETTINGS, "on_bad_row")  # without which some data cannot be read
