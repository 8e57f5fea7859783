"""The command that adds an extra, by where the package was installed from."""

import json
from importlib import metadata

import pytest

from mlx_packs import errors
from tests.helpers.documents import ROOT


def test_a_clone_is_installed_from_its_folder():
    assert errors.pip_install("serve") == f"pip install -e '{ROOT}[serve]'"


@pytest.mark.parametrize(
    ("recorded", "source"),
    [
        (None, ""),
        ({"url": "file:///w/mlx_packs-0.1.0-py3-none-any.whl", "archive_info": {}}, ".whl"),
        (
            {"url": "https://x.y/p", "vcs_info": {"vcs": "git", "commit_id": "1"}},
            "git+https://x.y/p",
        ),
    ],
)
def test_pip_records_where_else_it_is_from(recorded, source, tmp_path, monkeypatch):
    class Distribution:
        def read_text(self, name):
            return recorded and json.dumps(recorded)

    monkeypatch.setattr(errors, "__file__", str(tmp_path / "mlx_packs" / "errors.py"))
    monkeypatch.setattr(metadata, "distribution", lambda name: Distribution())
    command = errors.pip_install("serve")
    assert command.startswith("pip install 'mlx-packs[serve]") and command.endswith(f"{source}'")
    assert (" @ " in command) == bool(recorded)


def test_a_copied_folder_names_the_package(tmp_path, monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(errors, "__file__", str(tmp_path / "mlx_packs" / "errors.py"))
    monkeypatch.setattr(metadata, "distribution", missing)
    assert errors.pip_install("plot") == "pip install 'mlx-packs[plot]'"
