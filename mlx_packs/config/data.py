"""The settings for the location of examples and the names of their columns."""

from dataclasses import dataclass
from functools import partial

from .choices import DECODER_TASKS
from .fields import Settings, fields_where, option

_data = partial(option, section="Model and data")
_column = partial(_data, tasks=DECODER_TASKS, metavar="COLUMN", column=True)


@dataclass(frozen=True)
class DataConfig(Settings):
    """The source of the examples, and the names of their columns."""

    data: str = _data(
        "tiny",
        "Training data: a folder, a file, files by a pattern ('DIR/*.jsonl'), a Hugging Face dataset id "
        "(hf:ID streams it), or 'tiny' (bundled).",
        metavar="DATA",
        phase=True,
    )
    chat_feature: str = _column("messages", "Column with the messages of a chat.")
    prompt_feature: str = _column("prompt", "Column with the prompt.")
    completion_feature: str = _column("completion", "Column with the completion.")
    text_feature: str = _column("text", "Column with plain text.")
    on_bad_row: str = _data(
        "stop",
        "What to do with examples that cannot be used: stop with an error that names file and "
        "line, skip and count them, or also write them to bad-rows.jsonl in the run folder "
        "(quarantine).",
        choices=("stop", "skip", "quarantine"),
    )
    hold_out: str = _data(
        "sample",
        "Examples to hold out if there are none for validation: a random sample, which is the "
        "same in every run and keeps near-duplicates together, or the last ones.",
        choices=("sample", "last"),
    )
    hf_dataset: dict | list | None = _data(
        None, "Hugging Face datasets with splits and columns, as in mlx-lm.", flags=(), phase=True
    )


# The settings that name columns of the data.
COLUMN_SETTINGS = fields_where(DataConfig, column=True)
