"""What editors and type checkers see of the package: pyright on users' code, completion by jedi."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.documents import GUIDES, read

pytestmark = pytest.mark.interop

ROOT = Path(__file__).parents[1]


def pyright(*paths: Path) -> str:
    """The lines of pyright (basic) on files and folders; empty if there is no error."""
    result = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, *map(str, paths)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    summary = result.stdout.strip().splitlines()[-1]
    return "" if summary.startswith("0 errors") else result.stdout


def test_examples_and_the_python_of_the_documents_pass_pyright(tmp_path):
    for document in GUIDES:
        blocks = [text for _, text in read(document).blocks("python")]
        file = tmp_path / f"{document.replace('/', '_').removesuffix('.md')}.py"
        file.write_text("\n".join(blocks))  # later blocks use names of earlier ones
    (tmp_path / "first_settings.py").write_text(
        "import mlx_packs as mp\nmp.DataConfig([{'text': 'a'}])\nmp.LoRAConfig(8, 16.0)\n"
        "mp.TrainConfig(task='dpo', epochs=1.5, batch_size=4, beta=0.2, learning_rate=1e-4)\n"
    )
    assert not pyright(ROOT / "examples", tmp_path)


def test_pyright_sees_what_is_wrong(tmp_path):
    (tmp_path / "wrong.py").write_text(
        "import mlx_packs as mp\nmp.train_pack(iters=3)\nmp.no_such_name\nmp.TrainConfig('dpo')\n"
    )
    lines = pyright(tmp_path)
    assert '"iters"' in lines and '"no_such_name"' in lines and "positional" in lines


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("import mlx_packs as mp\nmp.train_p", "train_pack"),
        ("import mlx_packs as mp\nmp.TrainConfig(learn", "learning_rate="),
        ("import mlx_packs as mp\nbase = mp.load_base('tiny')\nbase.appl", "applied"),
    ],
)
def test_jedi_completes_the_public_interface(code, name, tmp_path, monkeypatch):
    import jedi

    # A process that reads the cache while another writes it gets half of a file.
    monkeypatch.setattr(jedi.settings, "cache_directory", str(tmp_path))
    script = jedi.Script(code, project=jedi.Project(ROOT))
    lines = code.splitlines()
    assert name in [c.name_with_symbols for c in script.complete(len(lines), len(lines[-1]))]
