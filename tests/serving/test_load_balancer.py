"""Two servers behind nginx, with the configuration of docs/serving.md; run by hand."""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.server_load import Load, Target, run_load
from mlx_packs.errors import PackError
from tests.helpers.documents import ROOT
from tests.helpers.serving import SECONDS

pytestmark = pytest.mark.nginx


def wait_for(port: int) -> Target:
    """A server, once it answers."""
    target, until = Target(f"http://127.0.0.1:{port}", seconds=SECONDS), time.monotonic() + SECONDS
    while True:
        try:
            target.models()
            return target
        except PackError:
            assert time.monotonic() < until
            time.sleep(0.2)


@pytest.fixture
def balanced(shelf, tmp_path):
    """The address of nginx before two servers, and their ports."""
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```nginx\n(.*?)```", text, re.DOTALL)
    config = tmp_path / "nginx.conf"

    folders = "".join(
        f"{name}_temp_path {tmp_path / name};\n"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config.write_text(
        f"daemon off; pid {tmp_path / 'pid'}; error_log {tmp_path / 'log'};\n"
        f"events {{}}\nhttp {{ access_log off;\n{folders}{block}}}\n"
    )

    servers = [
        subprocess.Popen(
            [sys.executable, "-m", "mlx_packs", "serve", "--packs", shelf, "--port", str(port)]
        )
        for port in (8081, 8082)
    ]
    servers.append(subprocess.Popen([shutil.which("nginx") or "nginx", "-c", config]))

    try:
        targets = [wait_for(port) for port in (8081, 8082)]
        yield wait_for(8080), targets
    finally:
        for server in servers[::-1]:
            server.terminate()
            server.wait(SECONDS)


def generated(target: Target) -> float:
    """Tokens that a server has generated."""
    connection = target.connect()
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return float(re.findall(r'mlx_packs_tokens\{kind="generated"\} (\S+)', text)[0])


def test_both_servers_answer_and_nothing_is_lost(balanced):
    nginx, targets = balanced
    load = Load(("base", "notes", "law", "med"), 16, 64, 8, 16)
    result = run_load(nginx, load)
    assert result["errors"] == {} and result["requests"] == 64
    shares = [generated(target) for target in targets]
    assert min(shares) > 0.2 * sum(shares), shares
    alone = run_load(targets[0], load)
    print(json.dumps([result, alone]), Path(sys.executable).name)
