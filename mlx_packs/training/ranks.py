"""What the ranks of a run do apart: the first writes and prints, others keep what they need."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ..config.choices import TASKS
from ..config.data import DataConfig
from ..config.lora import LoRAConfig
from ..config.schema import TrainConfig
from ..distributed.group import Group, group, join
from ..distributed.join import joined_ranks, when_gone
from ..distributed.link import GONE
from ..errors import PackError, RunStopped
from ..tasks.task import task_class
from .run_folder import RunFolder, output_folders, run_folder


@contextmanager
def folders_of_rank(
    out: str | Path | None, columns: DataConfig, overwrite: bool, resume: bool
) -> Iterator[tuple[Path, Path]]:
    """Yield the folders of pack and run, on the first rank by `output_folders`.

    Others have folders that are removed at the end. A resumed run's is copied to them, so that
    machines need no disk in common.
    """
    with joined_ranks() as ranks:
        if ranks.is_first:
            with output_folders(out, columns, overwrite, resume) as (pack, run):
                when_gone(partial(_say_gone, pack, run))
                _send_run(ranks, run if resume else None)
                yield pack, run
            return

        with tempfile.TemporaryDirectory(prefix="mlx-packs-rank-") as folder:
            pack = Path(folder) / "pack"
            _receive_run(ranks, run_folder(pack))
            yield pack, run_folder(pack)


def _say_gone(pack: Path, run: Path, reason: str) -> None:
    checkpoint = RunFolder(run).latest_checkpoint()
    if checkpoint is None:
        PackError(f"{reason}. There is no checkpoint; start again.").show()
    else:
        RunStopped(reason, checkpoint, pack, "network", GONE).show()


def _send_run(ranks: Group, run: Path | None) -> None:
    """Send the files of a run folder to the other ranks, one after the other."""
    files = sorted(file for file in run.rglob("*") if file.is_file()) if run else []
    names = [str(file.relative_to(run)) for file in files if file.suffix not in (".png", ".html")]

    ranks.from_first(json.dumps(names).encode())
    for name in names:
        ranks.from_first((run / name).read_bytes())


def _receive_run(ranks: Group, run: Path) -> None:
    run.mkdir(parents=True)
    for name in json.loads(ranks.from_first(b"")):
        file = run / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(ranks.from_first(b""))


def check_same_on_all_ranks(facts: dict) -> None:
    """Raise a PackError that names a rank with other facts than the first, and what differs."""
    received = [json.loads(each) for each in group().gathered(json.dumps(facts).encode())]
    for rank, other in enumerate(received):
        differing = sorted(key for key in facts if other.get(key) != received[0].get(key))
        if differing:
            raise PackError(
                f"rank {rank} differs from rank 0 in its {', '.join(differing)}. Bring the same "
                "files to every machine.",
                "mismatch",
            )


@contextmanager
def ranks_of_run(lora: LoRAConfig, train: TrainConfig) -> Iterator[None]:
    """Let the ranks train a run: each its share of a batch, or the blocks of a stage."""
    ranks = group()
    check_ranks(train)
    task_class(train.tasks[-1], train).join_ranks(lora)

    try:
        yield
    finally:
        join(ranks)


def check_ranks(train: TrainConfig) -> None:
    """Check that a run can be trained by the ranks that there are."""
    size = group().size
    if train.pipeline:
        return
    if size > 1 and train.batch_size % size:
        raise PackError(
            f"--batch-size: must be a multiple of the {size} ranks, which share every batch, but "
            f"is {train.batch_size}.",
            "conflict",
            "batch_size",
        )
    generating = [task for task in train.tasks if TASKS[task].generates]
    if size > 1 and generating:
        text = f"--task {generating[0]}: trains only on one machine."
        raise PackError(text, "unsupported", "task")


def check_examples(counts: Mapping[str, int]) -> None:
    """Check that there are examples for every rank, given their numbers by split."""
    size = group().batch_shares
    for name, count in counts.items():
        if name.rpartition("/")[2] == "train" and count < size:
            raise PackError(
                f"--data: {count:,} {name} examples are fewer than the {size} ranks. Use fewer "
                "ranks, or more examples.",
                "data",
                "data",
            )
