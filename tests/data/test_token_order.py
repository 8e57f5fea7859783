"""Examples are sorted by their tokens."""

import numpy as np
import pytest

from mlx_packs.data.encoding import Example, Examples
from mlx_packs.data.groups import token_order


def example(tokens, targets=(), where="x") -> Example:
    target = np.isin(np.arange(len(tokens)), [i % len(tokens) for i in targets])
    return Example(np.array(tokens, np.int32), target, where)


def examples_of(*items: Example) -> Examples:
    return Examples(list(items), "chat", "assistant")


def random_examples(seed: int, count: int = 60) -> Examples:
    """Many begin alike, some begin others, some are equal: of two tokens each, or of long runs."""
    random = np.random.default_rng(seed)
    stems = [random.integers(0, 2, 50) for _ in range(3)]
    items = []
    for _ in range(count):
        stem = stems[random.integers(3)][: random.integers(0, 51)]
        tokens = np.concatenate([stem, random.integers(0, 2, random.integers(2, 4))])
        items.append(example(tokens, random.integers(1, len(tokens), 2)))
    return examples_of(*items)


@pytest.mark.parametrize("seed", range(2))
def test_examples_are_sorted_by_their_tokens(seed):
    examples = random_examples(seed)
    order = token_order(examples, np.arange(len(examples)))
    tokens = [e.tokens.tolist() for e in examples.items]
    assert order.indices.tolist() == sorted(range(len(tokens)), key=lambda i: (tokens[i], i))
    for before, after, common in zip(
        order.indices, order.indices[1:], order.common[1:], strict=False
    ):
        pairs = zip(tokens[before], tokens[after], strict=False)
        differing = [i for i, (one, other) in enumerate(pairs) if one != other]
        shortest = min(len(tokens[before]), len(tokens[after]))
        assert common == (differing[0] if differing else shortest)
