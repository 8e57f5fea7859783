"""The loss of tasks that have several, and the settings of training embeddings."""

from dataclasses import dataclass
from functools import partial

from .choices import DISTANCES, TASKS
from .conflicts import TrainConflicts
from .fields import option

_embedding = partial(option, section="Embedding", tasks=("embedding",))


@dataclass(frozen=True, repr=False)
class EmbeddingSettings(TrainConflicts):
    """The part of `TrainConfig` that is about losses by name, most of them of embeddings."""

    loss: str = option(
        "auto",
        "Loss of preferences (dpo, cpo): sigmoid, robust (to wrong preferences), hinge or ipo. Loss of "
        "embeddings: cosine or cosent for pairs with scores, mnrl (in-batch negatives) or "
        "cached-mnrl for anchors with positives, triplet for those with negatives. auto is sigmoid; "
        "of embeddings cosine or mnrl, by the data.",
        choices=("auto", *dict.fromkeys(loss for facts in TASKS.values() for loss in facts.losses)),
        tasks=tuple(name for name, facts in TASKS.items() if facts.losses),
        section="Model and data",
        memory=True,
    )
    similarity_scale: float = _embedding(
        20.0,
        "Factor on the cosines in mnrl, cached-mnrl and cosent (1 / temperature).",
        metavar="FACTOR",
        above=0,
    )
    mini_batch_size: int = _embedding(
        32,
        "Number of texts whose activations cached-mnrl keeps in memory at a time.",
        at_least=1,
        memory=True,
    )
    triplet_margin: float = _embedding(
        5.0, "Margin of the triplet loss.", metavar="MARGIN", at_least=0
    )
    triplet_distance: str = _embedding(
        "euclidean", "Distance function of the triplet loss.", choices=DISTANCES
    )
