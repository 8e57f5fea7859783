"""`packs eval`, `eval-tasks` and `eval-batch`: a base model and packs on the same examples."""

import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from ..config.data import COLUMN_SETTINGS, DataConfig
from ..display import Display
from ..errors import PackError
from ..terminal import with_error
from . import options
from .options import option
from .output import exit_if_failed, print_report, text_table
from .topics import TopicCommand

if TYPE_CHECKING:
    from ..evaluation.compare import BatchReport
    from ..packs.pack import Pack

_AS_TRAINED = "as the pack was trained"
_BUNDLED = DataConfig.data
_SUM = "PACK[=WEIGHT]"


@click.command(
    "eval", cls=TopicCommand, common="model flagged data split metric limit batch_size json".split()
)
@options.model_of_pack
@options.packs("Pack to evaluate; the deltas of several are added up, each times its WEIGHT.", _SUM)
@options.data(default=None, default_text="tiny, for packs that were trained on it")
@options.split
@options.setting("batch_size", default=4, type=click.IntRange(1))
@options.setting("max_seq_length", _AS_TRAINED, type=click.IntRange(2))
@options.add(*(options.setting(name, _AS_TRAINED) for name in COLUMN_SETTINGS))
@options.template_kwargs("Variables of the chat template.")
@options.setting("max_pixels", _AS_TRAINED, type=click.IntRange(0))
@options.setting("allow_urls", default=False)
@options.setting("on_bad_row", "stop")
@options.loss_on
@options.metric
@options.setting("share_prefix", default="auto")
@options.limit
@options.offload_base
@options.execution
def evaluate(
    packs: tuple[str, ...],
    model: str | None,
    data: str | None,
    trust_remote_code: bool,
    offload_base: str,
    **settings,
) -> None:
    """Compare perplexity and accuracy with and without a pack.

    The pack of an encoder is evaluated by correlation with scores, retrieval or triplet accuracy,
    depending on the examples, a reward model by preference accuracy and reward margin. Base model
    and pack see the same examples, and each result has its standard error. The ratio is paired
    by example, so its error is smaller. With --metric, the share of right answers is reported
    too, with greedy decoding. Without a pack, the base model is evaluated, such as on examples
    with your best prompt.
    """
    from ..evaluation.evaluate import evaluate
    from ..evaluation.rows import columns_of

    if not packs and not (model and data):
        text = "is required. To evaluate a base model without one, pass --model and --data."
        raise PackError(f"PACK: {text}", flag="pack")
    if sum("=" not in text for text in packs) > 1:
        names = " ".join(packs)
        raise PackError(
            f"PACK {names}: to compare packs, use packs eval-batch {names}. To add them up, give "
            "each a weight, as in a=0.7 b=0.3.",
            "conflict",
            "pack",
        )
    opened = options.one_pack(packs)
    if opened is not None:
        data = data or _data_of(opened)

    names = (*COLUMN_SETTINGS, "template_kwargs", "max_pixels", "allow_urls", "on_bad_row")
    columns = {name: settings.pop(name) for name in names}
    columns = {name: value for name, value in columns.items() if value or value == 0}

    report = evaluate(
        options.load_base(model, opened, trust_remote_code, offload_base),
        opened,
        data,
        columns=columns_of(opened, data, **columns),
        progress=Display(),
        **settings,
    )
    print_report(report.to_json(), report.lines())


def _data_of(pack: "Pack") -> str:
    """Return the examples; a pack of other data cannot be evaluated on the bundled ones."""
    trained = pack._part("recipe").get("data", _BUNDLED)
    if trained != _BUNDLED:
        raise PackError(
            f"--data: {pack.name} was trained on {trained}. Name the examples to evaluate on "
            "(a folder with valid.jsonl or test.jsonl, or a file).",
            flag="data",
        )
    return _BUNDLED


@click.command()
@options.model_of_pack
@options.packs("Pack to evaluate; the deltas of several are added up, each times its WEIGHT.", _SUM)
@option(
    "--tasks", required=True, metavar="NAMES", help="Names of lm_eval tasks, separated by commas."
)
@option(
    "--num-fewshot",
    type=click.IntRange(0),
    help="Number of solved examples before each question.",
    default_text="the task's",
)
@option(
    "--limit",
    type=click.IntRange(1),
    help="Number of examples to evaluate of each task.",
    default_text="all",
)
@options.setting("batch_size", default=8, type=click.IntRange(1))
@option("--task-path", metavar="DIR", help="Folder with custom tasks in YAML.")
@option("--chat", is_flag=True, help="Put each question into the chat template of the base model.")
@options.matmul_path()
@options.execution
def eval_tasks(
    packs: tuple[str, ...], model: str | None, tasks: str, trust_remote_code: bool, **settings
) -> None:
    """Run tasks of lm-evaluation-harness with and without packs.

    The harness is the extra lm-eval of mlx_packs; it downloads its data from the Hub.
    """
    from ..evaluation.lm_eval import evaluate_tasks

    pack = options.text_pack(packs)
    base = options.load_base(model, pack, trust_remote_code)
    report = evaluate_tasks(base, pack, options.names(tasks), **settings)
    print_report(report, _task_lines(report))


def _task_lines(report: dict) -> list[str]:
    lines = []
    for task, metrics in report.items():
        for metric, values in metrics.items():
            results = " → ".join(
                with_error(values[name], values.get(f"{name}_se"), ".4f")
                for name in ("base", "pack")
                if name in values
            )
            lines.append(f"{task} · {metric}  {results}")
    return lines


@click.command("eval-batch")
@options.model_of_pack
@options.packs("Pack to compare; PACK=0.5 applies half of its delta. Repeatable.")
@options.data()
@options.split
@option(
    "--batch-size",
    "sizes",
    default="1,4,8",
    metavar="N,N",
    help="Batch sizes to time generation with, separated by commas.",
)
@option(
    "--sequence-length",
    type=int,
    help="Maximum number of tokens per example, and length of the timed prompts.",
    default_text="as the packs were trained",
)
@option("--max-tokens", default=32, help="Number of tokens to generate per prompt.")
@option("--rounds", default=3, help="Number of timing rounds.")
@options.limit
@options.loss_on
@options.matmul_path("auto")
@options.setting("max_ppl_ratio", type=float)
@options.setting("min_tps_ratio", type=float)
@options.setting("max_pack_mb", type=float)
@option("--csv", "csv_file", metavar="FILE", help="Also write all results to FILE as CSV.")
@options.execution
def eval_batch(
    model: str | None,
    packs: tuple[str, ...],
    sizes: str,
    csv_file: str | None,
    trust_remote_code: bool,
    **settings,
) -> None:
    """Compare a base model and packs on the same examples.

    The report has perplexity and its paired ratio, token accuracy, speed of batched generation,
    memory and size. The base model is loaded once. The exit code is 1 if a pack fails a gate.
    """
    from ..evaluation.compare import as_csv, evaluate_batch, failed, named_packs
    from ..files import atomic_write

    csv_path = options.writable_file(csv_file, "--csv")
    chosen = [pack for _, pack in named_packs([options.one_pack([p]) for p in packs])]
    batch_sizes = _batch_sizes(sizes)
    first = chosen[0] if chosen else None
    base = options.load_base(model, first, trust_remote_code)
    display = Display()
    display.line("base", base.summary())

    compared = evaluate_batch(base, chosen, batch_sizes=batch_sizes, progress=display, **settings)
    lines = _lines(compared)
    failures = failed(compared)
    if csv_path is not None:
        atomic_write(csv_path, as_csv(compared))
        lines.append(f"csv     {csv_path}")
    if any(one.gates for one in compared):
        lines.append(f"gates   {'FAILED' if failures else 'ok'}")

    print_report({"results": [one.to_json() for one in compared]}, lines)
    exit_if_failed(failures)


def _batch_sizes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise PackError(f"--batch-size {text}: must be numbers above 0, as in 1,4,8.") from None


def _lines(compared: Sequence["BatchReport"]) -> list[str]:
    first = compared[0]
    quality = [_quality(one) for one in compared if one.batch_size == first.batch_size]
    speed = [_speed(one) for one in compared]
    columns = max(60, min(100, shutil.get_terminal_size((80, 24)).columns))
    return [
        f"data    {first.rows} examples of at most {first.sequence_length} tokens · "
        f"{first.targets:,} targets · evaluated {first.scoring_path}",
        *text_table(["", "PPL", "ratio", "accuracy", "MB"], quality, columns),
        f"speed   prompts of {first.sequence_length} tokens, {first.generation_path} · "
        "first token in ms, peak in GB",
        *text_table(["", "batch", "prompt/s", "decode/s", "ratio", "ms", "GB"], speed, columns),
    ]


def _quality(one: "BatchReport") -> list[str]:
    from ..evaluation.compare import BASE
    from ..report.facts import format_number

    ratio = ""
    size = ""
    if one.name != BASE:
        ratio = format_number(one.ppl_ratio, one.ppl_ratio_se, 3)
        size = f"{one.pack_mb:.2f}"
    return [one.name, format_number(one.ppl, one.ppl_se, 2), ratio, f"{one.accuracy:.1%}", size]


def _speed(one: "BatchReport") -> list[str]:
    from ..evaluation.compare import BASE

    return [
        one.name,
        str(one.batch_size),
        f"{one.prompt_tps:,.0f}",
        f"{one.decode_tps:,.0f}",
        "" if one.name == BASE else f"{one.tps_ratio:.2f}",
        f"{one.first_token_ms:,.0f}",
        f"{one.peak_gb:.2f}",
    ]
