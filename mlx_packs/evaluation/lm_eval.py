"""Standard tasks of lm-evaluation-harness on a base and a pack (the extra ``lm-eval``).

mlx-lm scores and answers its requests.

https://github.com/EleutherAI/lm-evaluation-harness
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from ..bases.supported import is_batchable
from ..bases.turns import render_conversation
from ..config.arguments import checked_arguments
from ..errors import PackError, pip_install
from ..inference.generate import check_batches
from ..packs.base import Base, activated, check_no_pack, loaded_base
from ..packs.compatibility import check_base, check_generates
from ..packs.manifest import chat_template_of
from ..packs.pack import Pack


@checked_arguments
def evaluate_tasks(  # noqa: PLR0913 - a public facade
    base: Base | str | Path,
    pack: Pack | str | Path | Mapping[str | Path, float] | None = None,
    tasks: Sequence[str] = (),
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    task_path: str | Path | None = None,
    chat: bool = False,
    matmul_path: str = "quantized",
) -> dict[str, dict]:
    """Run tasks of lm-evaluation-harness without and with a pack.

    Args:
        base: A base model without an active pack: a loaded one, or a name as in `load_base`.
        pack: A pack, its folder, or several packs with weights; None evaluates only the base
            model.
        tasks: Names of the tasks.
        num_fewshot: Number of solved examples before each question; None is the task's own.
        limit: Maximum number of examples per task; None uses all.
        batch_size: Examples per batch.
        task_path: Folder with custom tasks in YAML, in addition to the harness's own.
        chat: Whether to put each question into the chat template of the base model.
        matmul_path: How frozen weights are used: ``"quantized"``, ``"transient"`` or ``"dense"``.

    Returns:
        ``{task: {metric: {base, base_se, pack, pack_se}}}``; ``_se`` is the standard error.

    Raises:
        PackError: If lm_eval is not installed, a task is unknown, the pack does not fit, or a pack
            is active.
    """
    base, opened = loaded_base(base, pack)
    check_no_pack(base)
    if opened is not None:
        base = base.with_chat_template(chat_template_of(opened.manifest))
    base.check_architecture("eval-tasks", "decoder")

    manager = _task_manager(tasks, task_path)
    if limit is not None and limit < 1:
        raise PackError(f"--limit {limit}: must be positive.")
    if chat and not base.tokenizer.has_chat_template:
        raise PackError(f"{base.name}: the tokenizer has no chat template.", "unsupported", "chat")

    if opened is not None:
        check_generates(opened)
        check_base(opened, base)

    options = {
        "tasks": list(tasks),
        "num_fewshot": num_fewshot,
        "limit": limit,
        "task_manager": manager,
        "apply_chat_template": chat,
    }

    figures: dict[str, dict] = {}
    models = {"base": None}
    if opened:
        models["pack"] = opened
    for name, active in models.items():
        with activated(base, active, matmul_path):
            results = _results(base, batch_size, options)
        for task, metric, part, value in _figures(results):
            figures.setdefault(task, {}).setdefault(metric, {})[name + part] = value
    return figures


def _task_manager(tasks: Sequence[str], task_path: str | Path | None) -> Any:
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise PackError(
            f"lm_eval: cannot be imported ({error}). Run `{pip_install('lm-eval')}`.",
            "dependency",
        ) from None

    if task_path is not None and not Path(task_path).is_dir():
        raise PackError(f"--task-path {task_path}: is no folder.", "not-found")
    include_path = str(task_path) if task_path is not None else None
    manager = TaskManager(include_path=include_path)

    if not tasks:
        raise PackError("--tasks: name one or more, separated by commas.")
    for task in tasks:
        if not manager.match_tasks([task]):
            raise PackError(f"--tasks {task}: lm_eval has no such task.", "unknown")
    return manager


def _results(base: Base, batch_size: int, options: Mapping[str, Any]) -> dict[str, dict]:
    """Run tasks on a base as it is; the harness's results by task."""
    from lm_eval import simple_evaluate

    try:
        with redirect_stdout(sys.stderr):  # the harness prints, and stdout is for results
            evaluated = simple_evaluate(
                model=language_model(base, batch_size, options["apply_chat_template"]),
                log_samples=False,
                **options,
            )
    except OSError as error:  # data that cannot be had from the hub
        reason = " ".join(str(error).split())[:300]
        names = ",".join(options["tasks"])
        raise PackError(f"--tasks {names}: the data cannot be read: {reason}", "network") from None
    return evaluated["results"]


def _figures(results: Mapping[str, Mapping]) -> Iterator[tuple[str, str, str, float]]:
    """Task, metric, '' or '_se', value of the harness's ``acc,none`` and ``acc_stderr,none``."""
    for task, figures in results.items():
        for key, value in figures.items():
            metric = key.partition(",")[0]
            if isinstance(value, (int, float)) and "," in key:
                suffix = "_se" if metric.endswith("_stderr") else ""
                yield task, metric.removesuffix("_stderr"), suffix, value


def language_model(base: Base, batch_size: int = 8, chat: bool = False) -> Any:
    """Return a base with its active pack as mlx-lm's LM, for `lm_eval.simple_evaluate`.

    Without ``chat`` the tokenizer adds its special tokens to a prompt.
    """
    from lm_eval.api.model import LM
    from mlx_lm.evaluate import MLXLM

    class BaseLM(MLXLM):
        tokenizer_name = base.public_name

        def __init__(self) -> None:
            LM.__init__(self)  # mlx-lm's own loads a model
            self._model = base.model
            self.tokenizer = base.tokenizer
            self.use_chat_template = chat
            self._max_tokens = None
            self._batch_size = batch_size
            self._sampler = None

        def generate_until(self, requests: list) -> list[str]:
            check_batches(base)
            options = [request.args[1] for request in requests]
            if any(each.get("do_sample") and each.get("temperature", 1) for each in options):
                raise PackError(
                    "--tasks: one asks for sampled answers, but answers are greedy. Leave it out.",
                    "unsupported",
                    "tasks",
                )
            if not is_batchable(base.name, base.model):
                self._batch_size = 1
            return super().generate_until(requests)

        def apply_chat_template(
            self, chat_history: list, add_generation_prompt: bool = True
        ) -> str:
            return render_conversation(
                self.tokenizer,
                chat_history,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )

    return BaseLM()
