"""`packs train --show-mask`: which tokens of some examples the loss is on."""

from functools import partial
from typing import TYPE_CHECKING

from ..bases.files import TINY, check_files, resolve_checkpoint, vocab_size_of
from ..bases.tokenizer import load_tokenizer
from ..bases.unsupported import unreadable
from ..config.recipe import Recipe
from ..data.masks import masked
from ..data.preferences import encode_tokens
from ..display import Display
from ..errors import library_errors
from ..training.phases import resolve_phases
from ..training.tasks.tokens import encoding_options
from .output import print_report, print_spans, wants_json

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

COUNT = 5  # of the examples of each phase that are shown


def show_mask(recipe: Recipe, display: Display) -> None:
    """Print the first training examples of each phase; targets are green, or between ⟦ and ⟧."""
    shown, loss_on = _masked_examples(recipe)
    if wants_json():
        print_report(shown, [])
        return
    print_masked(shown)
    display.line("mask", f"loss on {loss_on}; --loss-on all, completion or assistant")


def print_masked(masked: list[dict]) -> None:
    """Print examples as `masked` returns them; targets are green, or between ⟦ and ⟧."""
    for example in masked:
        targets = f"{example['learned']} of {example['total']} tokens are trained on"
        spans = [(span["text"], span["learned"]) for span in example["spans"]]
        print_spans(f"{example['where']}: {targets}", spans)


def _masked_examples(recipe: Recipe) -> tuple[list[dict], str]:
    """Training examples in spans of text that are targets or not, and what the loss is on."""
    run, train = recipe.run, recipe.train
    tokenizer, vocab_size = tokenizer_of(
        run.get("model", TINY), run.get("trust_remote_code", False)
    )
    shown, losses = [], {}
    for phase in resolve_phases(train, recipe.data):
        splits = phase.load_rows()
        options = encoding_options(train, "train", splits.format, vocab_size)
        rows, columns = splits.rows["train"][:COUNT], phase.sources[0]
        examples = encode_tokens(rows, tokenizer, columns, options, splits.format)
        shown += [masked(example, tokenizer) for example in examples.items]
        losses[examples.loss_on] = None
    return shown, ", ".join(losses)


def tokenizer_of(model: str, trust_remote_code: bool) -> tuple["TokenizerWrapper", int]:
    """Return the tokenizer of a base model and the size of its vocabulary; load no weights."""
    from mlx_lm.utils import load_config

    path = resolve_checkpoint(model)
    stored = check_files(path)
    with library_errors(partial(unreadable, path, stored)):
        config = load_config(path)
    return load_tokenizer(path, config, trust_remote_code), vocab_size_of(stored, path)
