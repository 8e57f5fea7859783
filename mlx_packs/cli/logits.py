"""`packs logits`: cache what a teacher predicts, for `packs train --task distill`."""

from pathlib import Path

import click

from ..config.fields import fields_where
from ..config.schema import DataConfig
from ..display import Display, size
from . import options
from .options import option
from .output import print_report
from .recipe import read_recipes, recipe_of

# The settings of a run that its tokens and targets depend on, and how they are made.
_ENCODING = ("max_seq_length", "loss_on", "long_rows", "ce_last_k", "num_proc", "batch_size")
_SETTINGS = [name for name in (*fields_where(DataConfig), *_ENCODING) if name in options.SETTINGS]


@click.command(cls=options.SectionedCommand)
@options.recipes
@options.setting(
    "model", "tiny", help="Teacher: a folder, a GGUF file, a Hugging Face id or 'tiny'."
)
@options.packs("Pack of the teacher; PACK=0.5 applies half of its delta. Repeatable.")
@options.add(*(options.setting(name, options.shown_default(name, "distill")) for name in _SETTINGS))
@option(
    "--top-k",
    section="Model and data",
    default=64,
    type=click.IntRange(1),
    help="Number of most likely tokens to write for every target token.",
)
@option(
    "--temperature",
    section="Model and data",
    default=1.0,
    type=click.FloatRange(0, min_open=True),
    help="Number to divide logits by; the student's are divided by it too.",
)
@options.out("Folder to write the cache to.")
@options.overwrite
@options.execution
def logits(
    configs: tuple[str, ...],
    packs: tuple[str, ...],
    top_k: int,
    temperature: float,
    out: str,
    overwrite: bool,
    trust_remote_code: bool,
    **flags,
) -> None:
    """Cache the most likely next tokens of a teacher for packs train --task distill.

    Pass the data, columns and lengths of the run that reads the cache, or its recipe by -c. The
    size is printed before the first batch. After an interruption the same command continues.
    """
    from ..config.recipe import check_data_named
    from ..packs.base import load_base_for
    from ..tasks.teacher import Teacher, write_teacher_cache

    flags = {name: value for name, value in flags.items() if value is not None}
    recipe = recipe_of(flags | {"task": "distill"}, read_recipes(configs))
    check_data_named(recipe)
    pack = options.text_pack(packs)

    display = Display()
    with display.working("base", f"loading {recipe.model}"):
        base = load_base_for(pack, recipe.model, trust_remote_code)
    display.line("base", base.summary())

    teacher = Teacher(base, pack, top_k, temperature)
    report = write_teacher_cache(teacher, recipe, Path(out).expanduser(), overwrite, display)
    line = (
        f"wrote   {report['out']}: {report['written']} of {report['shards']} shards, "
        f"{size(report['bytes'])} in all    try: packs train --task distill --teacher-cache "
        f"{report['out']}"
    )
    print_report(report, [line])
