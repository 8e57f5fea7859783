"""The tokens of an example that are trained on, as text for people."""

from typing import TYPE_CHECKING

from .encoding import Example

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper


def masked(example: Example, tokenizer: "TokenizerWrapper") -> dict:
    """Split an example into spans of text that are targets or not.

    The result has ``where`` (its row), ``learned`` and ``total`` (numbers of tokens), and
    ``spans``, each with ``text`` and ``learned``.
    """
    target = example.target
    total = len(example.tokens)
    edges = [0, *(i for i in range(1, total) if target[i] != target[i - 1]), total]

    spans = [
        {
            "text": tokenizer.decode(example.tokens[start:end].tolist()),
            "learned": bool(target[start]),
        }
        for start, end in zip(edges, edges[1:], strict=False)
    ]

    return {"where": example.where, "learned": int(target.sum()), "total": total, "spans": spans}
