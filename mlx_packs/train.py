"""`packs train` as a command; what it does is `training.train_pack`."""

import dataclasses
import json
import sys

import click

from . import data as rows_of
from .config import DataConfig, LoRAConfig, Recipe, TrainConfig, read_yaml, resolve
from .display import NORMAL, QUIET, VERBOSE, Display, clock
from .loading import TINY, Base, load_base
from .training import tiny_recipe, train_pack

_RUN_ARGUMENTS = (
    "overwrite resume resume_adapter_file report_to project_name trust_remote_code"
).split()


def _config_option(f: dataclasses.Field):
    """A click option from a field of a config; its value is typed by `config.build`."""
    name = "--" + f.name.replace("_", "-")
    sentence = f.metadata["help"]
    if f.default not in (None, (), False, dataclasses.MISSING):
        sentence += f" [{f.default}]"
    if f.metadata["choices"]:
        return click.option(
            name, metavar="{" + ",".join(f.metadata["choices"]) + "}", help=sentence
        )
    if isinstance(f.default, bool):
        return click.option(f"{name}/--no-{name[2:]}", default=None, help=sentence)
    return click.option(name, metavar=f.name.split("_")[-1].upper(), help=sentence)


def _config_options(command):
    """Every field of the configs that a flag can say; mappings are for YAML."""
    for cls in (TrainConfig, LoRAConfig, DataConfig):
        for f in reversed(dataclasses.fields(cls)):
            if f.name not in ("optimizer_config", "rank_pattern", "alpha_pattern", "hf_dataset"):
                command = _config_option(f)(command)
    return command


@click.command()
@click.option("--model", metavar="M", help="Base: a folder, a hub id, or 'tiny'. [tiny]")
@click.option("-c", "--config", metavar="FILE", help="YAML with any of these options.")
@click.option("--out", "--adapter-path", metavar="DIR", help="Folder of the pack. [packs/<data>]")
@_config_options
@click.option("--mask-prompt", is_flag=True, default=None, help="mlx-lm: --loss-on completion.")
@click.option("--fine-tune-type", metavar="{lora}", help="mlx-lm; only lora is trained here.")
@click.option("--train", is_flag=True, default=None, help="mlx-lm; training is what this does.")
@click.option("--test", is_flag=True, default=None, help="mlx-lm; held-out rows are always scored.")
@click.option("--resume", is_flag=True, default=None, help="Continue the run of --out.")
@click.option("--resume-adapter-file", metavar="FILE", help="Start from these adapters.")
@click.option("--overwrite", is_flag=True, default=None, help="Replace the pack and run of --out.")
@click.option("--report-to", metavar="NAMES", help="wandb, swanlab or both (comma).")
@click.option("--project-name", metavar="NAME", help="Project for --report-to.")
@click.option("--trust-remote-code", is_flag=True, default=None, help="Run code of the checkpoint.")
@click.option("--show-mask", is_flag=True, help="Show what of some rows is learned, and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
@click.option("-v", "--verbose", is_flag=True, help="Explain decisions.")
@click.option("-q", "--quiet", is_flag=True, help="Print the result line only.")
def command(config, show_mask, as_json, verbose, quiet, **flags):
    """Train a pack; without arguments, the tiny Qwen3 on the embedded data.

    Rows: train.jsonl, valid.jsonl, test.jsonl with {"messages": [{"role", "content"}]}, {"prompt",
    "completion"} or {"text"}. Every flag and YAML key of mlx_lm.lora is understood. Defaults in
    brackets are for real bases; the tiny one brings a recipe of its own.
    """
    flags = {k: v for k, v in flags.items() if v is not None}
    values = read_yaml(config) if config else {}
    resolve(values, str(config))  # so that a fault names the file that it stands in
    tiny = (flags.get("model") or values.get("model") or TINY) == TINY
    recipe = resolve(flags, under=[tiny_recipe() if tiny else {}, values])
    run = recipe.run
    display = Display(QUIET if quiet else VERBOSE if verbose else NORMAL)
    if show_mask:
        _show_mask(load_base(run.get("model", TINY)), recipe, display)
        return
    result = train_pack(
        run.get("model", TINY),
        lora=recipe.lora,
        train=recipe.train,
        out=run.get("out"),
        columns=recipe.data,
        display=display,
        **{k: run[k] for k in _RUN_ARGUMENTS if k in run},
    )
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=2, ensure_ascii=False))
    else:
        _print_result(result.report, run.get("model", TINY), quiet)
    failed = [name for name, gate in result.report["gates"].items() if not gate["passed"]]
    for name in failed:
        gate = result.report["gates"][name]
        flag = "--" + name.replace("_", "-")
        click.echo(f"packs: gate {flag} failed: {gate['value']:.3f} > {gate['limit']}", err=True)
    if failed:
        sys.exit(1)


def _print_result(report: dict, model: str, quiet: bool) -> None:
    drop = 1 - report["ppl_after"] / report["ppl_before"]
    gates = "".join(
        f" · {name} {g['value']:.2f} of {g['limit']} {'ok' if g['passed'] else 'FAILED'}"
        for name, g in report["gates"].items()
    )
    held = report["held_out"]
    click.echo(
        f"done    held-out PPL {report['ppl_before']:.2f} ± {report['ppl_before_se']:.2f} → "
        f"{report['ppl_after']:.2f} ± {report['ppl_after_se']:.2f} ({-drop:+.0%}) on "
        f"{held['rows']} {held['split']} rows{gates}"
    )
    if quiet:
        return
    click.echo(
        f"speed   {report['tokens_per_s']:,.0f} supervised tokens/s · {clock(report['train_s'])} "
        f"for {report['steps']} updates · peak {report['peak_gb']:.2f} GB of arrays, "
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


def _show_mask(base: Base, recipe: Recipe, display: Display, rows: int = 5) -> None:
    """Print some training rows; what is learned is green, or between ⟦ and ⟧ without colour."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    splits = rows_of.load_rows(recipe.data)
    train = recipe.train
    examples = rows_of.encode(
        splits.rows["train"][:rows], base.tokenizer, recipe.data,
        loss_on=train.loss_on, max_seq_length=train.max_seq_length,
        vocab_size=base.vocab_size, ce_last_k=train.ce_last_k,
    )  # fmt: skip
    colour = console.is_terminal and not console.no_color
    for example in examples.items:
        learned, total = int(example.target.sum()), len(example.tokens)
        console.print(Text(f"{example.where}: {learned} of {total} tokens are learned", "bold"))
        edges = [0, *(i for i in range(1, total) if example.target[i] != example.target[i - 1])]
        text = Text()
        for start, end in zip(edges, [*edges[1:], total], strict=True):
            part = base.tokenizer.decode(example.tokens[start:end].tolist())
            if colour:
                text.append(part, "green" if example.target[start] else "dim")
            else:
                text.append(f"⟦{part}⟧" if example.target[start] else part)
        console.print(text)
    display.line("mask", f"loss on {examples.loss_on}; --loss-on all, completion or assistant")


def main() -> None:
    """`python -m mlx_packs.train` is `packs train`."""
    from .cli import run_command

    run_command(command)


if __name__ == "__main__":
    main()
