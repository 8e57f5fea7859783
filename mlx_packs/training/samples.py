"""``samples.jsonl`` of a run folder: answers to the same prompts as the model is trained."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..bases.tokenizer import tokenizer_errors
from ..display import Display
from ..errors import PackError
from ..files import append_line, atomic_write
from ..objectives.reference import PhaseReference
from ..packs.base import Base
from ..runtime import mx, set_random_state
from ..tasks.sample_prompt import SamplePrompt
from .run_folder import SAMPLES, RunFolder

if TYPE_CHECKING:
    from .prepare import PreparedRun

_TOKENS = (40, 256)  # of an answer: at least, and at most for one that is expected to be longer
_SPARE_TOKENS = 8  # that an answer may have more than the expected one


class Samples:
    """Answers the prompts of ``--sample-every`` greedily; the run continues as without them.

    A file that cannot be written is a note and ends no run.
    """

    def __init__(
        self, folder: Path, base: Base, prompts: Sequence[SamplePrompt], display: Display
    ) -> None:
        self._file = folder / SAMPLES
        self._base = base
        self._display = display
        self._prompts = [(prompt, answer_limit(prompt, base)) for prompt in prompts]

    @classmethod
    def of(cls, prepared: "PreparedRun") -> "Samples | None":
        """Return the samples of a run; None if it takes none."""
        run = prepared.run
        prompts = prepared.task.followed
        if run.train.sample_every is None:
            return None
        if prompts and prepared.base.blocks_on_disk is None:
            return cls(run.folder, prepared.base, prompts, run.display)

        why = "each token would read all of the base from the disk"
        if not prompts:  # of a task that an installed package adds
            why = "this task has no prompts for them"
        run.display.line("note", f"--sample-every: no samples are taken, since {why}")
        return None

    def begin(self, batches: int, origin: PhaseReference) -> None:
        """Remove what is later than a checkpoint, and answer as ``origin`` for batch 0."""
        lines = RunFolder(self._file.parent).samples(math.inf)
        earlier = [line for line in lines if line["batch"] <= batches]
        with self._noting_faults():
            atomic_write(self._file, [json.dumps(line) + "\n" for line in earlier])
        if any(line["batch"] == 0 for line in earlier):
            return
        with self._display.working("samples", "answering the prompts"), origin.active():
            self.take(0)

    def take(self, batch: int) -> None:
        """Add the answers after a batch."""
        random = mx.random.state[0]
        lines = []
        for prompt, limit in self._prompts:
            texts = {"prompt": prompt.text, "expected": prompt.wanted}
            answer = prompt.answer(self._base, limit).strip()
            lines.append(json.dumps({"batch": batch, **texts, "answer": answer}))
        set_random_state(random)
        with self._noting_faults():
            append_line(self._file, "\n".join(lines))

    @contextmanager
    def _noting_faults(self) -> Iterator[None]:
        try:
            yield
        except PackError as error:
            self._display.line("note", error.message)


def answer_limit(prompt: SamplePrompt, base: Base) -> int:
    """Return the most tokens of an answer, by those of the expected one."""
    least, most = _TOKENS
    with tokenizer_errors(base.tokenizer):
        expected = len(base.tokenizer.encode(prompt.wanted or ""))
    return min(most, max(least, expected + _SPARE_TOKENS))
