"""The way from `train_pack` to the loss is short, and its module depends on few others."""

import ast
import traceback
from pathlib import Path

import mlx_packs
from mlx_packs.objectives.causal_lm import CausalLM
from mlx_packs.training import run

PACKAGE = Path(mlx_packs.__file__).parent
MOST_FRAMES = 12
MOST_IMPORTS = 25


def test_the_loss_is_few_calls_away(train, monkeypatch):
    stacks = []
    loss = CausalLM.loss

    def recorded(*args):
        stacks.append(traceback.extract_stack())
        return loss(*args)

    monkeypatch.setattr(CausalLM, "loss", recorded)
    train(iters=1, val_batches=0, test_batches=1)

    names = [frame.name for frame in stacks[0] if Path(frame.filename).is_relative_to(PACKAGE)]
    names = names[names.index("train_pack") :]
    assert len(names) + 1 <= MOST_FRAMES, names  # and the loss


def test_the_module_of_a_run_imports_few_others():
    imported = set()
    for node in ast.walk(ast.parse(Path(run.__file__).read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            places = [node.module] if node.module else []
            if node.level == 2 and node.module in (None, "ops"):  # modules of a package
                places = [f"{node.module}.{alias.name}" for alias in node.names]
            imported.update((node.level, place) for place in places)
    assert len(imported) <= MOST_IMPORTS, sorted(imported)
