"""Fixtures: the embedded base, small models of several families, small data sets.

In `.ci/run` (MLX_PACKS_NO_SKIP=1) a skipped test is a failure.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mlx_packs.cli.main.main import packs, run_command

from mlx_packs.bases.families import MIXTURES_SINCE, version_of_mlx_lm
from mlx_packs.bases.loading import Base, load_base
from mlx_packs.ops import _backend
from mlx_packs.runtime import mx

os.environ["MLX_PACKS_CACHE"] = "off"  # nothing is left in the home of who runs the tests

# Mixtures cannot be trained there; test_families.py holds that they are refused.
collect_ignore = ["test_experts.py"] if version_of_mlx_lm() < MIXTURES_SINCE else []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.skipped and os.environ.get("MLX_PACKS_NO_SKIP") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"unexpected skip: {report.longrepr}"
    return report


@pytest.fixture
def tiny() -> Base:
    """The embedded base, freshly loaded."""
    return load_base("tiny")


@pytest.fixture
def run(monkeypatch, capsys):
    """Run `packs ARGS` as a program; its exit code, stdout and stderr."""

    def go(*args) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["packs", *map(str, args)])
        with pytest.raises(SystemExit) as exit:
            run_command(packs)
        out, err = capsys.readouterr()
        return int(exit.value.code or 0), out, err

    return go


@pytest.fixture
def nothing_ahead() -> Iterator[None]:
    """MLX allocates nothing ahead of what it computes, whatever else the machine does."""
    limit = mx.set_memory_limit(0)
    yield
    mx.set_memory_limit(limit)


@contextmanager
def gpu_rules(patch) -> Iterator[None]:
    """Refuse what MLX refuses where the default device is a GPU: float64 outside the CPU's stream.

    Only casts are watched; that is how float64 arrays come to be here.
    """
    on_cpu = []
    stream, astype = mx.stream, mx.array.astype

    @contextmanager
    def watched(device):
        with stream(device):
            on_cpu.append(device)
            try:
                yield
            finally:
                on_cpu.pop()

    def cast(self, dtype, *args, **kwargs):
        if not on_cpu and mx.float64 in (self.dtype, dtype):
            raise ValueError("float64 is not supported on the GPU")
        return astype(self, dtype, *args, **kwargs)

    patch.setattr(mx, "stream", watched)
    patch.setattr(mx.array, "astype", cast)
    yield


@contextmanager
def emulation(language: str, orders=("forward", "reverse", "shuffled"), compile_only=False):
    """Make a backend available whose kernels run in the emulator; gives the list of those built."""
    import metal_emulator

    if reason := metal_emulator.why_not():
        pytest.skip(reason)
    make = {"metal": metal_emulator.metal_kernel, "cuda": metal_emulator.cuda_kernel}[language]
    built = []

    def maker(**definition):
        built.append(make(**definition, checks=metal_emulator.Checks(orders=orders)))
        built[-1].compile_only = compile_only
        return built[-1]

    with pytest.MonkeyPatch.context() as patch, gpu_rules(patch):
        patch.setitem(_backend.MAKERS, language, maker)
        patch.setattr(_backend, "detect", lambda: language)
        _forget_kernels()
        yield built
    _forget_kernels()


def _forget_kernels() -> None:
    _backend.forget()
    _backend._built.cache_clear()


@pytest.fixture(params=["metal", "cuda"])
def emulated(request) -> Iterator[str]:
    """A backend by name, forced, whose kernels run in the emulator; each must have been run."""
    with emulation(request.param) as built, _backend.backend(request.param):
        yield request.param
        assert not _backend.record()["fallbacks"]
        for kernel in built:
            assert sum(r.half_operations + r.bfloat_operations for r in kernel.reports) == 0


@pytest.fixture(autouse=True)
def _seeded():
    mx.random.seed(7)


def model_of(family: str, **changes):
    """A small random model of a family of mlx-lm, and its config."""
    import importlib

    config = {
        "model_type": family,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "vocab_size": 128,
        "max_position_embeddings": 128,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    if family == "gpt2":
        config = {
            "model_type": "gpt2",
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 128,
            "n_ctx": 128,
            "layer_norm_epsilon": 1e-5,
            "vocab_size": 128,
            "num_attention_heads": 4,
        }
    config |= changes
    if family == "qwen2":
        config.pop("head_dim", None)
    module = importlib.import_module(f"mlx_lm.models.{family}")
    mx.random.seed(3)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.freeze()
    model.eval()
    mx.eval(model.parameters())
    return model, config


def base_of(family: str, **changes) -> Base:
    """A Base around a small random model, without tokenizer."""
    model, config = model_of(family, **changes)
    return Base(family, Path("nowhere"), model, None, config, "0" * 64)


def write_rows(folder: Path, **splits: list) -> Path:
    """A data folder with the given rows for each split."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(text)
    return folder


def chat(*turns: str) -> dict:
    """A chat row: user and assistant by turns."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate(turns)]}
