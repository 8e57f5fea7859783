"""Small encoders as sentence-transformers saves them, and sentence pairs to train them on."""

import itertools
import json
import random
from pathlib import Path

from mlx.utils import tree_flatten

from mlx_packs.bases.encoder import encoder_class
from mlx_packs.bases.sentence_config import SentenceConfig
from mlx_packs.runtime import mx


def _synonyms(text: str) -> dict[str, str]:
    return dict(pair.split() for pair in text.split(", "))


# Each thing by two words that share no piece of a word: what belongs together must be learned.
DEEDS = _synonyms(
    "fix repair, buy purchase, clean wash, find locate, move carry, paint colour, sell trade, "
    "open unlock, build assemble, throw toss, hide conceal, lift raise"
)
THINGS = _synonyms(
    "car vehicle, house home, boat ship, shop store, road street, garden yard, coat jacket, "
    "stone rock, lamp light, bag sack, sofa couch, picture image"
)
_OTHERS = "how do i a the ways to way for steps please tell me".split()
WORDS = [*DEEDS, *DEEDS.values(), *THINGS, *THINGS.values(), *_OTHERS]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCABULARY = list(
    dict.fromkeys(
        [
            *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS),
            *(f"##{letter}" for letter in LETTERS),
            *(word for word in WORDS if len(word) > 1),
            *("##s", "##ing", ".", ",", "?"),
        ]
    )
)
SMALL = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
}
MODERN = {
    "model_type": "modernbert",
    "architectures": ["ModernBertModel"],
    "num_hidden_layers": 4,
    "intermediate_size": 48,
    "hidden_activation": "gelu",
    "local_attention": 8,
    "norm_eps": 1e-5,
}
MINILM = SMALL | {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
}


def write_vocabulary(folder: Path) -> Path:
    """vocab.txt and what a BERT tokenizer needs beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 64}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_encoder(
    folder: Path,
    pooling: str = "mean",
    normalize: bool = True,
    prefix: str = "",
    max_seq_length: int = 48,
    dtype: mx.Dtype = mx.float32,
    **changes,
) -> Path:
    """A random encoder in the folder layout of all-MiniLM-L6-v2.

    prefix: of its tensors' names, as a checkpoint of masked language modelling has (``bert.``).
    """
    config = SMALL | changes
    write_vocabulary(folder)
    (folder / "config.json").write_text(json.dumps(config))
    if config["model_type"] != "bert":  # whose tokenizer is not known by the kind of model
        from transformers import BertTokenizerFast

        BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)

    mx.random.seed(11)
    model = encoder_class(config)(config, SentenceConfig())
    tensors = {
        f"{prefix}{name}": _spread(name, a).astype(dtype)
        for name, a in tree_flatten(model.parameters())
    }
    d = config["hidden_size"]
    unused = {
        "embeddings.position_ids": mx.arange(config["max_position_embeddings"])[None],
        "pooler.dense.weight": mx.zeros((d, d)),
        "pooler.dense.bias": mx.zeros(d),
    }
    tensors |= {f"{prefix}{name}": tensor for name, tensor in unused.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "pt"})

    write_modules(folder, pooling, d, normalize)
    settings = {"max_seq_length": max_seq_length, "do_lower_case": False}
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    return folder


def write_modules(folder: Path, pooling: str, width: int, normalize: bool = True) -> None:
    """The files that say how sentence-transformers makes a vector of a model's states."""
    parts = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    paths = ["", *(f"{i}_{kind}" for i, kind in enumerate(parts) if i)]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(zip(paths, parts, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))

    (folder / "1_Pooling").mkdir(exist_ok=True)
    kinds = {"mean": "mean_tokens", "cls": "cls_token", "max": "max_tokens"}
    kinds["lasttoken"] = "lasttoken"
    switches = {f"pooling_mode_{name}": kind == pooling for kind, name in kinds.items()}
    switches |= {"word_embedding_dimension": width, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(switches))


def _spread(name: str, a: mx.array) -> mx.array:
    """Weights wide enough that texts differ, and no bias or norm that says nothing."""
    if name.endswith(("LayerNorm.weight", "norm.weight")):
        return 1 + 0.1 * mx.random.normal(a.shape)
    if a.ndim == 1:
        return 0.1 * mx.random.normal(a.shape)
    return mx.random.normal(a.shape) * (0.4 if "embeddings" in name else 1.5 / a.shape[1] ** 0.5)


def _said(deed: str, thing: str) -> tuple[str, str]:
    """The same question in two ways without a common word that matters."""
    return f"how do i {deed} a {thing}?", f"steps to {DEEDS[deed]} the {THINGS[thing]}"


def all_pairs(seed: int = 0) -> list[dict]:
    """Every deed with every thing, shuffled: 144 rows of anchor and positive."""
    rows = [_said(deed, thing) for deed, thing in itertools.product(DEEDS, THINGS)]
    random.Random(seed).shuffle(rows)
    return [{"anchor": a, "positive": b} for a, b in rows]


def all_triplets(seed: int = 0) -> list[dict]:
    """The same, with the positive of another row as negative."""
    pairs = all_pairs(seed)
    others = [*pairs[1:], pairs[0]]
    return [{**row, "negative": b["positive"]} for row, b in zip(pairs, others, strict=True)]


def all_scored(seed: int = 0) -> list[dict]:
    """Rows with scores: 1 where both mean the same, 0 where they do not."""
    rows = []
    for at, row in enumerate(all_triplets(seed)):
        alike = at % 2 == 0
        other = row["positive"] if alike else row["negative"]
        rows.append({"sentence1": row["anchor"], "sentence2": other, "score": float(alike)})
    return rows


def write_pairs(folder: Path, rows: list[dict], held_out: int = 44) -> Path:
    """A data folder; the last rows are for validation and test."""
    folder.mkdir(parents=True, exist_ok=True)
    half = held_out // 2
    splits = {"train": rows[:-held_out], "valid": rows[-held_out:-half], "test": rows[-half:]}
    for split, result in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in result))
    return folder


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
