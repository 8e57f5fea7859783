"""The files by which sentence-transformers opens a merged embedder or reranker."""

import json
from pathlib import Path
from typing import Any

from ..bases.geometry import Heads
from ..bases.sentence_config import MODULES, PROMPTS, QUERY, SETTINGS, read_sentence_config
from ..data.rankings import INSTRUCTION, answer_tokens, question_parts
from ..files import to_json
from ..objectives.embedding import with_eos
from ..packs.compatibility import text_limit
from ..packs.pack import Pack
from ..reading import read_json

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
