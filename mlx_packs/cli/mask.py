"""`packs train --show-mask`: which tokens of some examples the loss is on."""

from dataclasses import replace
from datetime import date
from functools import partial
from typing import TYPE_CHECKING, Any

from ..bases.chat_template import reads_clock
from ..bases.files import check_files, resolve_checkpoint, vocab_size_of
from ..bases.sentence_config import read_sentence_config
from ..bases.templated import with_template
from ..bases.tokenizer import load_encoder_tokenizer, load_tokenizer, take_images
from ..bases.unsupported import unreadable
from ..config.choices import TASKS, architecture_of
from ..config.recipe import Recipe
from ..config.tasks import tasks_of
from ..data.encoding import encode
from ..data.formats import PREFERENCE
from ..data.labelled import NO_LIMIT
from ..data.left_out import template_notes
from ..data.preferences import encode_preferences
from ..data.task_formats import RATED
from ..data.token_store import masked
from ..display import Display
from ..errors import library_errors
from ..objectives.decoder_embedding import with_eos
from ..tasks.phases import resolve_phases
from ..tasks.tokens import encoding_options
from .output import print_report, print_spans, wants_json

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

COUNT = 5  # of the examples of each phase that are shown


def show_mask(recipe: Recipe, display: Display) -> None:
    """Print the first training examples of each phase; targets are green, or between ⟦ and ⟧."""
    shown, loss_on, notes = _masked_examples(recipe)
    if wants_json():
        print_report({"loss_on": loss_on, "examples": shown}, [])
        return

    print_masked(shown)
    display.line("mask", f"loss on {loss_on}")
    for note in notes:
        display.line("data", note)


def print_masked(masked: list[dict]) -> None:
    """Print examples as `masked` returns them; targets are green, or between ⟦ and ⟧."""
    for example in masked:
        targets = f"{example['learned']} of {example['total']} tokens are trained on"
        spans = [(span["text"], span["learned"]) for span in example["spans"]]
        print_spans(f"{example['where']}: {targets}", spans)


def _masked_examples(recipe: Recipe) -> tuple[list[dict], str, list[str]]:
    """Return training examples in spans of text, what the loss is on, and what is left out."""
    train = recipe.train
    tokenizer, vocab_size = tokenizer_of(recipe.model, recipe.run.get("trust_remote_code", False))
    shown = []
    losses = {}
    notes = []
    phases = resolve_phases(train, recipe.data)

    for phase in phases:
        splits = phase.load_rows()
        task = phase.train.task
        row_format = splits.format
        encoded = encode
        if TASKS[task].sequences == 2:  # preferences, whose rows may have other columns too
            encoded = encode_preferences
            row_format = RATED if TASKS[task].rated else PREFERENCE

        options = encoding_options(train, "train", row_format, vocab_size)
        rows = splits.rows["train"][:COUNT]
        columns = phase.sources[0]
        tokenizer = with_template(tokenizer, columns.chat_template)
        if columns.template_date is None and reads_clock(tokenizer):
            columns = replace(columns, template_date=date.today().isoformat())

        examples = encoded(rows, tokenizer, columns, options, row_format)
        shown += [masked(example, tokenizer) for example in examples.items]
        losses[examples.loss_on] = None
        notes += template_notes(splits.rows["train"], row_format, columns, tokenizer)

    loss_on = ", ".join(losses)
    if any(phase.train.task in tasks_of("loss_on") for phase in phases):
        loss_on += "; --loss-on all, completion or assistant"
    return shown, loss_on, list(dict.fromkeys(notes))


def text_tokenizer_of(model: str, trust_remote_code: bool) -> tuple[Any, int]:
    """Return the tokenizer with which a base embeds texts, and the most tokens that it reads."""
    path = resolve_checkpoint(model)
    config = check_files(path)
    is_decoder = architecture_of(config["model_type"]) == "decoder"
    sentences = read_sentence_config(path, is_decoder)

    if not is_decoder:
        lower_case = sentences.lower_case
        tokenizer = load_encoder_tokenizer(path, config, lower_case, trust_remote_code)
    else:
        tokenizer = tokenizer_of(model, trust_remote_code)[0]._tokenizer
        if sentences.adds_eos:
            tokenizer = with_eos(tokenizer, path)
    return tokenizer, sentences.max_seq_length or NO_LIMIT


def tokenizer_of(model: str, trust_remote_code: bool) -> tuple["TokenizerWrapper", int]:
    """Return the tokenizer of a base model and the size of its vocabulary; load no weights."""
    from mlx_lm.utils import load_config

    path = resolve_checkpoint(model)
    stored = check_files(path)
    with library_errors(partial(unreadable, path, stored)):
        config = load_config(path)
    tokenizer = load_tokenizer(path, config, trust_remote_code)
    take_images(tokenizer, model, path, stored)
    return tokenizer, vocab_size_of(stored, path)
