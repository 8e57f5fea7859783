"""Merges of what embeds or reranks: fidelity by vectors or scores, files of sentence-transformers.

Logits say nothing of either: an embedder has none, and a reranker reads two of them.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..bases.geometry import Heads
from ..bases.sentence_config import MODULES, PROMPTS, QUERY, SETTINGS, read_sentence_config
from ..config.choices import MATMUL_PATHS
from ..data.formats import TOKEN_FORMATS, RowFormat, format_of
from ..data.rankings import INSTRUCTION, answer_tokens, question_parts
from ..data.task_formats import PAIR_FORMATS, RANKING_FORMATS
from ..errors import PackError
from ..evaluation.rows import evaluation_rows
from ..files import to_json
from ..memory.matmul_path import generation_path
from ..objectives.embedding import with_eos
from ..objectives.reader import ranking_reader, rerank_rows
from ..packs.base import Base, activated
from ..packs.compatibility import text_limit
from ..packs.pack import Pack
from ..reading import read_json
from .fidelity import (
    KL_NOISE,
    MAX_KL,
    Outcome,
    drift_limit,
    finer_settings,
    first_that_passes,
    load_for_comparison,
    merged_modules,
    replaced,
)
from .merge_plan import MergeRequest

_LARGEST_ANGLE = 1e-3  # limit of 1 - cosine
_ANGLE_NOISE = 1e-6  # of 1 - cosine, by rounding itself
_TEXTS_AT_ONCE = 32
_DOCUMENTS_AT_ONCE = 8
_POOLING = "1_Pooling"
_SCORE = "1_LogitScore"
_TRANSFORMER = "base.modules.transformer.Transformer"
_SIGMOID = "torch.nn.modules.activation.Sigmoid"
_TEMPLATE = """{{%- if messages | selectattr("role", "equalto", "query") | list %}}
{{%- set query = (messages | selectattr("role", "equalto", "query") | first).content %}}
{{%- set document = (messages | selectattr("role", "equalto", "document") | first).content %}}
{{{{- {before} + query + {between} + document + {after} }}}}
{{%- else %}}
{other}
{{%- endif %}}
"""

Distance = Callable[[np.ndarray, np.ndarray], float]


def compare_vectors(request: MergeRequest) -> Outcome:
    """Return the mean of 1 - cosine of embeddings, and the cheapest setting within the limit."""
    formats = (*PAIR_FORMATS, *RANKING_FORMATS, *TOKEN_FORMATS)
    texts = [text for row in _texts(request, formats) for text in row if text]
    if not texts:
        raise PackError(f"--data {request.columns.data}: has no text to compare on.", "data")
    base = load_for_comparison(request.pack, request.model, request.trust_remote_code)
    longest = text_limit(request.pack.manifest, base.config)

    def vectors() -> np.ndarray:
        return base.embedder.encode(texts, _TEXTS_AT_ONCE, longest)

    counts = {"texts": len(texts)}
    with request.display.working("drift", f"{len(texts)} texts"):
        return _compared(
            request, base, vectors, angle_between, counts, _LARGEST_ANGLE, _ANGLE_NOISE
        )


def compare_scores(request: MergeRequest) -> Outcome:
    """Return the mean divergence of the scores, and the cheapest setting within the limit.

    Of each document it is the KL divergence of relevant against not, with the probability that the
    sigmoid of its score is, in nats.
    """
    base = load_for_comparison(request.pack, request.model, request.trust_remote_code)
    instruction = request.pack._part("objective").get("instruction")
    limit = text_limit(request.pack.manifest, base.config)
    rows = [
        tokens
        for query, *documents in _queries(request)
        for tokens in rerank_rows(base, query, documents, instruction, limit)
    ]

    def scores() -> np.ndarray:
        return ranking_reader(base, None).of_rows(rows, _DOCUMENTS_AT_ONCE).astype(np.float64)

    with request.display.working("drift", f"{len(rows)} documents"):
        return _compared(request, base, scores, score_divergence, {"documents": len(rows)})


def angle_between(one: np.ndarray, other: np.ndarray) -> float:
    """Return the mean of 1 - cosine of rows."""
    one, other = (x.astype(np.float64) for x in (one, other))
    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    cosines = (one * other).sum(axis=1) / np.maximum(norms, 1e-24)
    return float(max(0.0, 1 - cosines.mean()))


def score_divergence(one: np.ndarray, other: np.ndarray) -> float:
    """Return the mean KL divergence of two outcomes of scores [N]: sigmoid, and what it leaves."""
    yes = 1 / (1 + np.exp(-one))
    of_yes = np.logaddexp(0, -other) - np.logaddexp(0, -one)  # log p - log q
    of_no = np.logaddexp(0, other) - np.logaddexp(0, one)
    return float(max(0.0, (yes * of_yes + (1 - yes) * of_no).mean()))


def _queries(request: MergeRequest) -> list[list[str]]:
    """Return queries, each with its documents; texts of other rows as they follow each other."""
    texts = [
        [text for text in row if text.strip()]
        for row in _texts(request, (*RANKING_FORMATS, *PAIR_FORMATS, *TOKEN_FORMATS))
    ]
    queries = [row for row in texts if len(row) > 1] or [[text for row in texts for text in row]]
    if len(queries[0]) < 2:
        raise PackError(f"--data {request.columns.data}: has no texts to compare on.", "data")
    return queries


def _texts(request: MergeRequest, formats: Sequence[RowFormat]) -> Iterator[list[str]]:
    """Yield the texts of each example, by the first format that it has."""
    columns = request.columns
    for row in evaluation_rows(columns, "test", request.rows):
        yield format_of(row, columns, formats).texts(row, columns)


def _compared(
    request: MergeRequest,
    base: Base,
    results: Callable[[], np.ndarray],
    distance: Distance,
    counts: Mapping[str, int],
    largest: float = MAX_KL,
    noise: float = KL_NOISE,
) -> Outcome:
    """Compare results of the modules that a base has: attached, merged, and without the pack."""
    pack = request.pack
    path = generation_path(base.model)
    if MATMUL_PATHS[path].keeps_dense:
        path = "transient"
    base.model.eval()
    with activated(base, None, path):
        plain = results()
    with activated(base, pack, path):
        attached = results()

    def distance_of(request: MergeRequest) -> float:
        with replaced(base.model, merged_modules(base, request)):
            return distance(attached, results())

    moved = distance(attached, plain)
    drift = distance_of(request)
    limit = drift_limit(request.max_drift, moved, largest, noise)
    others = finer_settings(request, distance_of)
    tried, passes = first_that_passes(request.requantize, drift, limit, others)

    scores = {"drift_mean": drift, "drift_of_pack": moved, **counts}
    return Outcome(scores, ("drift_mean",), limit, tried, passes)


def embedder_files(pack: Pack, source: Path, config: dict, tokenizer: Any) -> dict[str, str]:
    """The pooling of a decoder without modules, its end token, and the prompt before queries."""
    sentence_config = read_sentence_config(source, tokenizer is not None)
    limit = text_limit(pack.manifest, config)
    settings = read_json(source / SETTINGS) if (source / SETTINGS).is_file() else {}
    settings["max_seq_length"] = min(limit, sentence_config.max_seq_length or limit)
    files = {SETTINGS: to_json(settings)}

    if sentence_config.adds_eos:
        dims = Heads.of(config).hidden
        pooling = {"word_embedding_dimension": dims, "pooling_mode_lasttoken": True}
        kinds = {"Transformer": "", "Pooling": _POOLING, "Normalize": "2_Normalize"}
        files[MODULES] = _modules({f"models.{kind}": path for kind, path in kinds.items()})
        files[f"{_POOLING}/config.json"] = to_json(pooling | {"pooling_mode_mean_tokens": False})
        own = with_eos(tokenizer._tokenizer, source)
        files["tokenizer.json"] = own.backend_tokenizer.to_str()

    prompt = pack._part("objective").get("query_prompt")
    if prompt is not None:
        file = source / PROMPTS
        stored = read_json(file) if file.is_file() else {"default_prompt_name": None}
        prompts = {**sentence_config.prompts, QUERY: prompt}
        files[PROMPTS] = to_json({**stored, "prompts": prompts})
    return files


def reranker_files(pack: Pack, source: Path, config: dict, tokenizer: Any) -> dict[str, str]:
    """The question as a chat template with the roles query and document, and what gives scores."""
    instruction = pack._part("objective").get("instruction") or INSTRUCTION
    own = tokenizer.chat_template
    if not isinstance(own, str):  # several, by name
        own = None

    before, between, after = question_parts(tokenizer, instruction)
    template = _TEMPLATE.format(
        before=json.dumps(before, ensure_ascii=False),
        between=json.dumps(between, ensure_ascii=False),
        after=json.dumps(after, ensure_ascii=False),
        other=own or "",
    )
    yes, no = answer_tokens(tokenizer)
    scores = {"true_token_id": yes, "false_token_id": no, "module_input_name": "causal_logits"}
    modules = {_TRANSFORMER: "", "cross_encoder.modules.logit_score.LogitScore": _SCORE}
    method = {"method": "forward", "method_output_name": "logits"}
    settings = {
        "max_seq_length": text_limit(pack.manifest, config),
        "transformer_task": "text-generation",
        "modality_config": {"text": method, "message": {**method, "format": "flat"}},
        "module_output_name": "causal_logits",
    }

    return {
        PROMPTS: to_json({"model_type": "CrossEncoder", "activation_fn": _SIGMOID}),
        "chat_template.jinja": template,
        MODULES: _modules(modules),
        SETTINGS: to_json(settings),
        f"{_SCORE}/config.json": to_json(scores),
    }


def _modules(kinds: dict[str, str]) -> str:
    """``modules.json`` of modules of sentence-transformers, each with its folder."""
    return to_json(
        [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{kind}"}
            for i, (kind, path) in enumerate(kinds.items())
        ]
    )
