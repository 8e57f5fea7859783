"""`packs train --show-mask`: which tokens of some examples the loss is on."""

from functools import partial
from typing import TYPE_CHECKING

from ..bases.files import TINY, check_files, resolve_checkpoint, vocab_size_of
from ..bases.tokenizer import load_tokenizer
from ..bases.unsupported import unreadable
from ..config.recipe import Recipe
from ..data.encoding import Example, encode
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
    masked, loss_on = _masked_examples(recipe)
    if wants_json():
        print_report(masked, [])
        return
    for example in masked:
        targets = f"{example['learned']} of {example['total']} tokens are trained on"
        spans = [(span["text"], span["learned"]) for span in example["spans"]]
        print_spans(f"{example['where']}: {targets}", spans)
    display.line("mask", f"loss on {loss_on}; --loss-on all, completion or assistant")


def _masked_examples(recipe: Recipe) -> tuple[list[dict], str]:
    """Training examples in spans of text that are targets or not, and what the loss is on."""
    run, train = recipe.run, recipe.train
    tokenizer, vocab_size = _tokenizer(run.get("model", TINY), run.get("trust_remote_code", False))
    masked, losses = [], {}
    for phase in resolve_phases(train, recipe.data):
        splits = phase.load_rows()
        options = encoding_options(train, "train", splits.format, vocab_size)
        examples = encode(splits.rows["train"][:COUNT], tokenizer, phase.sources[0], options)
        masked += [_masked(example, tokenizer) for example in examples.items]
        losses[examples.loss_on] = None
    return masked, ", ".join(losses)


def _masked(example: Example, tokenizer: "TokenizerWrapper") -> dict:
    """Return an example in spans of text that are targets or not."""
    target, total = example.target, len(example.tokens)
    edges = [0, *(i for i in range(1, total) if target[i] != target[i - 1]), total]
    spans = [
        {
            "text": tokenizer.decode(example.tokens[start:end].tolist()),
            "learned": bool(target[start]),
        }
        for start, end in zip(edges, edges[1:], strict=False)
    ]
    return {"where": example.where, "learned": int(target.sum()), "total": total, "spans": spans}


def _tokenizer(model: str, trust_remote_code: bool) -> tuple["TokenizerWrapper", int]:
    """Return the tokenizer of a base model and the size of its vocabulary; load no weights."""
    from mlx_lm.utils import load_config

    path = resolve_checkpoint(model)
    stored = check_files(path)
    with library_errors(partial(unreadable, path, stored)):
        config = load_config(path)
    return load_tokenizer(path, config, trust_remote_code), vocab_size_of(stored, path)
