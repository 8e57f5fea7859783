"""The architectures that sweeps go over: those of docs/families.md that the installed mlx-lm has."""

import re
from importlib import metadata

import pytest

from mlx_packs.bases.families import UNTRAINABLE
from mlx_packs.bases.supported import MIXTURES_SINCE, version_of_mlx_lm
from tests.helpers.families import DOCS, architectures
from tests.helpers.variants import nightly_except

ROWS = re.findall(r"^\| ([\w.-]+) \| (\w[^|]*) \|", DOCS.read_text(), re.M)[1:]
DOCUMENTED = dict(ROWS)
IS_DOCUMENTED = f"mlx-lm {metadata.version('mlx-lm')}:" in DOCS.read_text()
OLD = version_of_mlx_lm() < MIXTURES_SINCE
# With another mlx-lm than that of the table, those that both know.
FAMILIES = [f for f in architectures() if f in DOCUMENTED and f not in UNTRAINABLE]
if OLD:  # mixtures are rejected, phi3small writes beyond its logits, falcon_h1 is half connected
    FAMILIES = [f for f in FAMILIES if "MoE" not in DOCUMENTED[f]]
    FAMILIES = [f for f in FAMILIES if f not in ("phi3small", "falcon_h1")]
# One of each kind: grouped blocks, fused projections, mixtures, recurrent and hybrid blocks, latent
# attention, parallel blocks, soft capping. The default suite runs some, and the slow tests the rest.
# Other families are nightly, but for the gradients of a step.
QUICK = ("qwen3", "gpt2", "gemma2", "qwen3_moe", "mamba2")
REPRESENTATIVE = (*QUICK, "llama", "phi3", "cohere", "deepseek_v3", "qwen3_next")

GROUPED = ("llama", "qwen2", "qwen3")  # whose attention and SwiGLU are ours


def sweep(families: list[str]) -> list:
    """Parameters of a sweep over families."""
    return [
        pytest.param(family) if family in QUICK else case
        for family, case in zip(families, nightly_except(families, *REPRESENTATIVE), strict=True)
    ]


def recomputed_sweep(families: list[str]) -> list:
    """Families with the policies of activation checkpointing that change what they compute."""
    grouped = [family for family in families if family in GROUPED]
    blocks = [pytest.param(*each.values, "block", marks=each.marks) for each in sweep(families)]
    return [*((family, "selective") for family in grouped), *blocks]
