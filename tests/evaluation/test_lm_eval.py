"""Tasks of lm-evaluation-harness: the language model that it is given, and the results."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import mlx.nn as nn
import pytest

from mlx_packs import evaluate, evaluate_tasks
from mlx_packs.evaluation.lm_eval import language_model
from mlx_packs.runtime import mx
from tests.helpers.errors import raises
from tests.helpers.packs import random_pack

TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {rows}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
CHOICE = """output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
ANSWER = """output_type: generate_until
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["."], max_gen_toks: 6}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
QUESTIONS = [
    {"question": "In the beginning God created the", "choices": [" heaven", " list"], "answer": 0},
    {"question": "The lord of", "choices": [" the house", " zebra table"], "answer": 0},
    {"question": "He was a", "choices": [" quux", " good man"], "answer": 1},
]


def alone(base, context: str, continuation: str) -> float:
    """The log-likelihood by one forward of the model."""
    start = len(base.tokenizer.encode(context))
    tokens = base.tokenizer.encode(context + continuation)
    scores = nn.log_softmax(base.model(mx.array([tokens[:-1]]))[0], axis=-1)
    return sum(scores[i, tokens[i + 1]].item() for i in range(start - 1, len(tokens) - 1))


def test_without_lm_eval_the_message_says_how_to_get_it(small_base, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with raises("dependency", None, "lm_eval", "[lm-eval]'`"):
        evaluate_tasks(small_base, None, ["arc_easy"])


def test_a_base_that_carries_a_pack_is_not_taken_for_the_base(small_base):
    with small_base.applied(random_pack(small_base, 0)):
        with raises("conflict", None, small_base.name):
            evaluate_tasks(small_base, None, ["arc_easy"])
        with raises("conflict", None, small_base.name):
            evaluate(small_base, None, limit=1)


@pytest.fixture
def tasks(tmp_path, monkeypatch) -> Path:
    """A folder with two tasks of the real harness, ``choose`` and ``answer``."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS))
    for name, kind in (("choose", CHOICE), ("answer", ANSWER)):
        head = TASK.format(name=name, rows=tmp_path / "rows.jsonl")
        (tmp_path / f"{name}.yaml").write_text(head + kind)
    return tmp_path


@pytest.mark.interop
def test_harness_runs_tasks_of_a_folder_with_a_pack(small_base, small_folder, tasks, run):
    pack = random_pack(small_base, 0).save(tasks / "p")
    named = ("--tasks", "choose,answer", "--task-path", tasks, "--limit", 3)
    code, out, err = run("eval-tasks", pack.path, "--model", small_folder, *named, "--json")
    figures = json.loads(out)  # what the harness prints is not on stdout
    assert code == 0 and {"base", "pack", "base_se", "pack_se"} <= set(figures["choose"]["acc"])
    assert "exact_match" in figures["answer"], err

    pairs = [(q["question"], choice) for q in QUESTIONS for choice in q["choices"]]
    with small_base.applied(pack):
        asked = [SimpleNamespace(args=pair) for pair in pairs]
        scored = language_model(small_base).loglikelihood(asked)
        wanted = [alone(small_base, *pair) for pair in pairs]
    assert [value for value, _ in scored] == pytest.approx(wanted, rel=1e-4)


@pytest.fixture
def known(monkeypatch):
    """The harness knows one task; to read all of its own takes ten seconds."""
    manager = SimpleNamespace(match_tasks=lambda names: [n for n in names if n == "known"])
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **_: manager)


@pytest.mark.interop
def test_questions_are_put_into_the_chat_template_of_the_pack(small_base, known, monkeypatch):
    pack = random_pack(small_base, 0)
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    pack.manifest["recipe"] = {"chat_template": template}
    prompts = []

    def evaluated(model, **options):
        prompts.append(model.apply_chat_template([{"role": "user", "content": "a"}]))
        return {"results": {"known": {"nll,none": 1.0}}}

    monkeypatch.setattr("lm_eval.simple_evaluate", evaluated)
    evaluate_tasks(small_base, pack, ["known"], chat=True)
    assert prompts == ["[a]["] * 2  # of the base model alone, too; an answer begins with [


@pytest.mark.interop
def test_sampled_answers_are_rejected(small_base):
    asked = SimpleNamespace(args=("a", {"do_sample": True, "temperature": 0.7, "until": ["."]}))
    with raises("unsupported", "tasks", "greedy"):
        language_model(small_base).generate_until([asked])


@pytest.mark.interop
def test_evaluate_tasks_names_what_is_wrong(small_base, known):
    with raises("unknown", "tasks", "other"):
        evaluate_tasks(small_base, None, ["known", "other"])
    with raises("not-found", "task_path", "nowhere"):
        evaluate_tasks(small_base, None, ["known"], task_path="nowhere")
