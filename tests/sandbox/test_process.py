"""Sandboxes: limits of time and memory, and what a process sees."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mlx_packs.sandbox import process
from mlx_packs.sandbox.process import LimitExceeded, Sandbox, deadline, usage_of
from tests.helpers.errors import raises

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def sandbox(monkeypatch):
    monkeypatch.setattr(process, "CPU_S", 0.2)
    monkeypatch.setattr(process, "MEMORY_BYTES", 64 << 20)
    sandbox = Sandbox("templates")
    yield sandbox
    sandbox.end()
    process._ALL.remove(sandbox)


def rendered(sandbox: Sandbox, template: str, **variables) -> list[str]:
    messages = [{"role": "user", "content": "Hi"}]
    call = template, messages, [(1, {})], variables, None
    [[result]], _ = sandbox.call("render", [call])
    return result


def test_a_call_returns_what_the_function_returns(sandbox):
    assert rendered(sandbox, "{{ messages[0].content }} {{ x }}", x=3) == ["text", "Hi 3"]
    assert rendered(sandbox, "{{ raise_exception('no') }}") == ["rejected", "no"]


def test_a_call_without_end_is_stopped_and_the_next_one_works(sandbox):
    with pytest.raises(LimitExceeded, match="seconds of CPU time"):
        rendered(sandbox, ENDLESS)
    assert rendered(sandbox, "a") == ["text", "a"]
    assert sandbox.generation == 2


@pytest.mark.parametrize(
    "template", ["{{ 'a' * 3000000000 }}", "{{ (1).to_bytes(3000000000, 'big') | length }}"]
)
def test_memory_is_bounded(sandbox, template):
    with pytest.raises(LimitExceeded, match="needs more than 64 MB of memory"):
        rendered(sandbox, template)
    assert rendered(sandbox, "a") == ["text", "a"]


def test_a_process_that_is_killed_is_replaced(sandbox):
    rendered(sandbox, "a")
    sandbox._process.kill()
    sandbox._process.wait()
    assert rendered(sandbox, "b") == ["text", "b"]


def test_a_deadline_ends_a_call_and_the_wait_for_others(sandbox, monkeypatch):
    monkeypatch.setattr(process, "CPU_S", 0.5)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(rendered, sandbox, ENDLESS)
        time.sleep(0.2)
        with deadline(time.monotonic() + 0.1), raises("timeout"):
            rendered(sandbox, "a")
    assert isinstance(other.exception(), LimitExceeded)

    with deadline(time.monotonic() + 0.1), raises("timeout"):
        rendered(sandbox, ENDLESS)


def test_threads_get_their_own_results(sandbox):
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda i: rendered(sandbox, "{{ i }}", i=i), range(8)))
    assert results == [["text", str(i)] for i in range(8)]


def test_a_process_sees_no_token_and_no_module_of_the_current_folder(
    sandbox, monkeypatch, tmp_path
):
    (tmp_path / "jinja2.py").write_text("raise SystemExit('taken')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert rendered(sandbox, "a") == ["text", "a"]
    if sys.platform == "linux":
        with open(f"/proc/{sandbox._process.pid}/environ") as file:
            assert "secret" not in file.read()


def test_a_process_ends_with_the_one_that_started_it():
    code = (
        "from mlx_packs.sandbox.process import TEMPLATES; TEMPLATES.start(); "
        "print(TEMPLATES._process.pid, flush=True); import os; os._exit(0)"
    )
    pid = int(subprocess.check_output([sys.executable, "-c", code], text=True))
    end = time.monotonic() + 20
    while usage_of(pid) is not None and time.monotonic() < end:
        time.sleep(0.05)
    assert usage_of(pid) is None or usage_of(pid)[1] == 0  # a zombie has no memory


def test_usage_by_ps_is_read_as_macos_writes_it():
    seconds, resident = process._usage_by_ps(os.getpid(), lambda *_, **__: " 1:02.50  2048\n")
    assert (seconds, resident) == (62.5, 2048 << 10)
    assert process._usage_by_ps(1, lambda *_, **__: "\n") is None
    assert usage_of(os.getpid())[1] > 1 << 20
