"""Queries with documents, of the pairs of `encoders`: what belongs together must be learned."""

from tests.helpers.encoders import all_pairs


def all_rankings(negatives: int = 3, seed: int = 0) -> list[dict]:
    """A query, the document that means the same, and some that do not: 144 rows."""
    pairs = all_pairs(seed)
    documents = [row["positive"] for row in pairs]
    return [
        {
            "query": row["anchor"],
            "positive": row["positive"],
            "negatives": [documents[(i + j) % len(pairs)] for j in range(1, negatives + 1)],
        }
        for i, row in enumerate(pairs)
    ]


def all_labelled(seed: int = 0) -> list[dict]:
    """The same with labels: 2 for what means the same, 1 for another row's, 0 for a third's."""
    return [
        {
            "query": row["query"],
            "documents": [row["negatives"][0], row["positive"], row["negatives"][1]],
            "labels": [1, 2, 0],
        }
        for row in all_rankings(2, seed)
    ]
