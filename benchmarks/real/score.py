"""Evaluates the adapters of all trainers of a job on its held-out examples, by one evaluator.

python -m benchmarks.real.score FOLDER TRAINER...    # started by `python -m benchmarks real`
"""

import json
import sys
from typing import Any

from mlx_packs import DataConfig, load_base
from mlx_packs.adapters.attach import attach
from mlx_packs.evaluation.evaluate import EvalSettings
from mlx_packs.evaluation.perplexity import PerplexityEvaluator
from mlx_packs.evaluation.rows import evaluation_rows
from mlx_packs.runtime import mx

from .jobs import Job, lora


def score(job: Job, trainers: list[str]) -> dict[str, dict[str, Any]]:
    """Return perplexity and right answers of each trainer's adapters, and of the base model."""
    base = load_base(job.model)
    columns = DataConfig(data=str(job.data))
    attached = attach(base, lora(), None, "dense", job.seed)
    settings = EvalSettings(columns, job.batch_size, job.max_seq_length, None, "dense", job.metric)
    evaluator = PerplexityEvaluator(base, evaluation_rows(columns, "test"), settings)

    with attached.disabled():
        before = evaluator.score()
    scores = {}
    for name in trainers:
        attached.load(dict(mx.load(str(job.adapters(name)))), name)
        report = evaluator.report(before, evaluator.score()).to_json()
        scores[name] = {key: report[key] for key in ("base", "pack", "answers")}
    return scores


def main(arguments: list[str]) -> int:
    folder, *trainers = arguments
    print(json.dumps(score(Job.read(folder), trainers)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
