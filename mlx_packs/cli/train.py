"""`packs train` as a command; what it does is `training.train_pack`."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from ..bases.loading import TINY, check_files, load_base_tokenizer, resolve_checkpoint, text_config
from ..config.external import translate
from ..config.schema import (
    DataConfig,
    LoRAConfig,
    Recipe,
    TrainConfig,
    check_method,
    read_yaml,
    resolve,
    said,
)
from ..data.encoding import Example, encode
from ..display import NORMAL, QUIET, VERBOSE, Display, clock
from ..errors import PackError
from ..gates import failures, shown
from ..memory.encoder import BATCH_SIZE
from ..packs.manifest import moved_metrics, phase_lines, shown_result
from ..training.phases import check_said, resolve_phases
from ..training.run import tiny_recipe, train_pack
from ..training.run_folder import CONFIG, check_resumable, run_folder
from ..training.setup import encoding_options
from . import options

_RUN_ARGUMENTS = (
    "overwrite resume resume_adapter_file report_to project_name trust_remote_code"
).split()

_RUN = ("model", "out", "adapter_path", *_RUN_ARGUMENTS)
_YAML_ONLY = ("optimizer_config", "phases", "hf_dataset")


def _config_options(command):
    """Every field of the configs that a flag can say; mappings are for YAML."""
    tiny = tiny_recipe()
    for cls in (TrainConfig, LoRAConfig, DataConfig):
        for f in reversed(dataclasses.fields(cls)):
            if f.name not in _YAML_ONLY:
                own = f"tiny: {tiny[f.name]}" if tiny.get(f.name, f.default) != f.default else None
                defaults = [text for text in (options.default_of(f), own) if text]
                command = options.of_field(f, "; ".join(defaults))(command)
    return command


@click.command()
@click.option("--model", metavar="M", help="Base: a folder, a hub id, or 'tiny'. [tiny]")
@options.configs
@click.option("--out", "--adapter-path", metavar="DIR", help="Folder of the pack. [packs/<data>]")
@_config_options
@click.option("--mask-prompt", is_flag=True, default=None, help="mlx-lm: --loss-on completion.")
@click.option("--fine-tune-type", metavar="{lora,full}", help="mlx-lm: --method.")
@click.option("--train", is_flag=True, default=None, help="mlx-lm; training is what this does.")
@click.option("--test", is_flag=True, default=None, help="mlx-lm; held-out rows are always scored.")
@click.option("--resume", is_flag=True, default=None, help="Continue the run of --out as it began.")
@click.option("--resume-adapter-file", metavar="FILE", help="Start from these adapters.")
@click.option("--overwrite", is_flag=True, default=None, help="Replace the pack and run of --out.")
@click.option("--report-to", metavar="NAMES", help="wandb, swanlab or both (comma).")
@click.option("--project-name", metavar="NAME", help="Project for --report-to.")
@options.trust_remote_code(default=None)
@options.backend
@click.option("--force", is_flag=True, help="Train even if the plan says that it cannot fit.")
@click.option("--show-mask", is_flag=True, help="Show what is learned of some rows, and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
@click.option("-v", "--verbose", is_flag=True, help="Explain decisions.")
@click.option("-q", "--quiet", is_flag=True, help="Print the result line only.")
def command(configs, force, show_mask, as_json, verbose, quiet, **flags):
    """Train a pack; without arguments, a tiny one.

    That is the tiny Qwen3 and the data that the package carries, in a minute or two.

    Rows: train.jsonl, valid.jsonl, test.jsonl with {"messages": [{"role", "content"}]}, {"prompt",
    "completion"} or {"text"}; of an encoder (--task embedding) {"sentence1", "sentence2", "score"}
    or {"anchor", "positive"} and perhaps "negative". Every flag and YAML key of mlx_lm.lora is
    understood. Defaults in brackets are for real bases, after "tiny:" for the tiny one.
    """
    flags = {k: v for k, v in flags.items() if v is not None}
    values = read_configs(configs, flags)
    recipe = recipe_of(flags, values)
    check_said(recipe.train, said(values, flags))
    run = recipe.run
    display = Display(QUIET if quiet else VERBOSE if verbose else NORMAL)
    if show_mask:
        if recipe.train.task == "embedding":
            raise PackError("--show-mask: is of tokens that are learned; pairs have none.")
        _show_mask(recipe, display, as_json)
        return
    result = train_pack(
        run.get("model", TINY),
        lora=recipe.lora,
        train=recipe.train,
        out=run.get("out"),
        columns=recipe.data,
        display=display,
        force=force,
        **{k: run[k] for k in _RUN_ARGUMENTS if k in run},
    )
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=2, ensure_ascii=False))
    else:
        _print_result(result.report, run.get("model", TINY), quiet)
    options.exit_by(failures(result.report["gates"]))


def read_configs(files: Sequence[str], flags: Mapping | None = None) -> dict:
    """What recipe files say; later ones override earlier ones.

    Raises: PackError naming the file of a fault, unless the others or ``flags`` mend it.
    """
    values: dict = {}
    fault = None
    for file in files:
        told = translate(read_yaml(file), file)
        try:
            resolve(told, file)
        except PackError as error:
            fault = fault or error
        values |= told
    if fault is not None:
        try:
            resolve(flags or {}, under=[values])
        except PackError:
            raise fault from None
    return values


def recipe_of(flags: dict, values: dict) -> Recipe:
    """Flags over the file's values over the recipe of the run to resume, or what suits the base."""
    # what is not of the recipe: a flag may need what the run to resume says
    above, below = ({k: v for k, v in layer.items() if k in _RUN} for layer in (flags, values))
    told = resolve(above, under=[below]).run
    resumed = told.get("resume") and "out" in told
    if resumed:
        run = run_folder(Path(told["out"]).expanduser())
        lowest = dict(check_resumable(run)["recipe"])
        lowest.pop("resume_adapter_file", None)  # a name and a hash: the run has begun
        resolve(lowest, str(run / CONFIG))
        values = {k: v for k, v in values.items() if k != "resume_adapter_file"}
    else:
        lowest = tiny_recipe() if told.get("model", TINY) == TINY else {}
        if resolve(flags, under=[values]).train.task == "embedding":
            lowest = {"batch_size": BATCH_SIZE}
    recipe = resolve(flags, under=[lowest, values])
    if recipe.train.method == "full":  # what the tiny base is told of adapters is left behind
        ours = recipe if resumed else resolve(flags, under=[values])
        check_method(ours.lora, recipe.train, said(values, flags))
        lora = LoRAConfig(num_layers=recipe.lora.num_layers)
        recipe = dataclasses.replace(recipe, lora=lora)
    return recipe


def _print_embedding_result(report: dict, model: str, quiet: bool) -> None:
    held = report["held_out"]
    click.echo(
        f"done    held-out {moved_metrics(report)} on {held['rows']} {held['split']} rows"
        f"{shown(report['gates'])}"
    )
    if quiet:
        return
    click.echo(
        f"speed   {report['pairs_per_s']:,.0f} pairs/s · {clock(report['train_s'])} for "
        f"{report['steps']} updates · peak {report['peak_gb']:.2f} GB of arrays "
        f"({report['plan_peak_gb']:.2f} estimated), {report['process_peak_gb']:.2f} GB of process"
    )
    click.echo(
        f"pack    {report['pack']} ({report['pack_mb']:.1f} MB)    try: packs eval "
        f"{report['pack']} --model {model} --data …"
    )


def _print_result(report: dict, model: str, quiet: bool) -> None:
    if report.get("task") == "embedding":
        _print_embedding_result(report, model, quiet)
        return
    drop = 1 - report["ppl_after"] / report["ppl_before"]
    held = report["held_out"]
    click.echo(
        f"done    held-out PPL {shown_result(report, 'before')} → "
        f"{shown_result(report, 'after')} ({-drop:+.0%}) on "
        f"{held['rows']} {held['split']} rows{shown(report['gates'])}"
    )
    if quiet:
        return
    for line in phase_lines(report["phases"]):
        click.echo(f"phase   {line}")
    own = report["objective"]
    if "ppl_before" in own:
        click.echo(
            f"graph   the {own['graph']}'s own PPL {own['ppl_before']:,.2f} → "
            f"{own['ppl_after']:,.2f}; above is the whole base's"
        )
    planned = report["plan_peak_gb"]
    planned = "" if planned is None else f" ({planned:.2f} estimated)"
    click.echo(
        f"speed   {report['tokens_per_s']:,.0f} supervised tokens/s · {clock(report['train_s'])} "
        f"for {report['steps']} updates · peak {report['peak_gb']:.2f} GB of arrays{planned}, "
        f"{report['process_peak_gb']:.2f} GB of process"
    )
    sample = report["sample"]
    click.echo(f"sample  {_shortened(sample['prompt'])}")
    click.echo(f"before  {_shortened(sample['before'])}")
    click.echo(f"after   {_shortened(sample['after'])}")
    click.echo(
        f"pack    {report['pack']} ({report['pack_mb']:.1f} MB)    try: packs generate "
        f'--model {model} --pack {report["pack"]} --prompt "…"'
    )


def _shortened(text: str, width: int = 160) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"


def _tokenizer(model: str, trust_remote_code: bool) -> tuple[object, int]:
    """The tokenizer of a base and the size of its vocabulary; loads no weights."""
    from mlx_lm.utils import load_config

    path = resolve_checkpoint(model)
    check_files(path)
    config = load_config(path)
    tokenizer = load_base_tokenizer(path, config, trust_remote_code)
    return tokenizer, int(text_config(config)["vocab_size"])


def _masked_rows(recipe: Recipe, rows: int) -> tuple[list[dict], str]:
    """Some training rows in spans of text that are learned or not, and what the loss is on."""
    run, train = recipe.run, recipe.train
    tokenizer, vocab_size = _tokenizer(run.get("model", TINY), run.get("trust_remote_code", False))
    masked, losses = [], {}
    for phase in resolve_phases(train, recipe.data):
        shown = phase.load_rows().rows["train"][:rows]
        examples = encode(
            shown,
            tokenizer,
            phase.sources[0],
            vocab_size=vocab_size,
            **encoding_options(train, "train", shown, phase.sources[0]),
        )
        masked += [_masked(example, tokenizer) for example in examples.items]
        losses[examples.loss_on] = None
    return masked, ", ".join(losses)


def _masked(example: Example, tokenizer) -> dict:
    """A row in spans of text that are learned or not."""
    target, total = example.target, len(example.tokens)
    edges = [0, *(i for i in range(1, total) if target[i] != target[i - 1]), total]
    spans = [
        {
            "text": tokenizer.decode(example.tokens[start:end].tolist()),
            "learned": bool(target[start]),
        }
        for start, end in zip(edges, edges[1:], strict=False)
    ]
    return {"where": example.where, "learned": int(target.sum()), "total": total, "spans": spans}


def _show_mask(recipe: Recipe, display: Display, as_json: bool, rows: int = 5) -> None:
    """Print some training rows; what is learned is green, or between ⟦ and ⟧ without colour."""
    from rich.console import Console
    from rich.text import Text

    masked, loss_on = _masked_rows(recipe, rows)
    if as_json:
        click.echo(json.dumps(masked, indent=2, ensure_ascii=False))
        return
    console = Console(highlight=False, soft_wrap=True)
    colour = console.is_terminal and not console.no_color
    for row in masked:
        count = f"{row['where']}: {row['learned']} of {row['total']} tokens are learned"
        console.print(Text(count, "bold"))
        text = Text()
        for span in row["spans"]:
            if colour:
                text.append(span["text"], "green" if span["learned"] else "dim")
            else:
                text.append(f"⟦{span['text']}⟧" if span["learned"] else span["text"])
        console.print(text)
    display.line("mask", f"loss on {loss_on}; --loss-on all, completion or assistant")


def main() -> None:
    """`python -m mlx_packs.train` is `packs train`."""
    from .main import run_command

    run_command(command)
