"""Answers of one pack by three programs: ours, llama.cpp and PEFT, on the same prompts.

The pack is exported to a GGUF adapter for llama.cpp, which adds it to the very GGUF that was trained
on, and to PEFT, which adds it to the same weights in float32. All of them get the same tokens and
answer greedily.

    python -m benchmarks.real.agreement PROGRAM FOLDER [LLAMA_SERVER GGUF]
"""

import contextlib
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mlx_packs import DataConfig, export_pack, load_base
from mlx_packs.data.formats import TOKEN_FORMATS, format_of
from mlx_packs.evaluation.answers import questions_of
from mlx_packs.evaluation.rows import evaluation_rows
from mlx_packs.inference.generate import complete_batch

from .jobs import Job

OURS, PEFT, LLAMA_CPP = "mlx_packs", "PEFT", "llama.cpp"
_START_S = 120
_ANSWER_TOKENS = 16


def prompts(job: Job) -> list[dict[str, Any]]:
    """Return the tokens of each held-out prompt, and the expected answer."""
    base = load_base(job.model)
    columns = DataConfig(data=str(job.data))
    rows = evaluation_rows(columns, "test")
    row_format = format_of(rows[0], columns, TOKEN_FORMATS)
    questions = questions_of(rows, row_format, columns, base, "exact", job.max_seq_length)
    return [{"tokens": q.tokens, "expected": q.wanted} for q in questions]


def ours(job: Job, asked: Sequence[dict[str, Any]]) -> list[str]:
    """Return our answers."""
    base = load_base(job.model)
    with base.applied(Path(job.folder) / "pack", "dense"):
        tokens = [question["tokens"] for question in asked]
        return complete_batch(base, tokens, _ANSWER_TOKENS)


def peft(job: Job, asked: Sequence[dict[str, Any]]) -> list[str]:
    """Return the answers of transformers with the adapter in PEFT."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    adapter = _exported(job, "peft")
    tokenizer = AutoTokenizer.from_pretrained(job.dense)
    model = AutoModelForCausalLM.from_pretrained(job.dense, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, str(adapter)).eval()

    answers = []
    for question in asked:
        prompt = torch.tensor([question["tokens"]])
        with torch.no_grad():
            result = model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=_ANSWER_TOKENS,
                do_sample=False,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.eos_token_id,
            )
        new = result[0, prompt.shape[1] :]
        answers.append(tokenizer.decode(new, skip_special_tokens=True))
    return answers


def llama_cpp(job: Job, asked: Sequence[dict[str, Any]], server: str, gguf: str) -> list[str]:
    """Return the answers of llama.cpp's server with the GGUF adapter."""
    folder = _exported(job, "gguf")
    (adapter,) = folder.glob("*.gguf")
    answers = []
    with _running(server, gguf, adapter, Path(job.folder) / "llama-server.log") as url:
        for question in asked:
            body = {
                "prompt": question["tokens"],
                "n_predict": _ANSWER_TOKENS,
                "temperature": 0,
                "top_k": 1,
                "cache_prompt": False,
            }
            request = urllib.request.Request(
                f"{url}/completion",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=_START_S) as response:
                answers.append(json.load(response)["content"])
    return answers


def _exported(job: Job, destination: str) -> Path:
    out = Path(job.folder) / f"exported-{destination}"
    if not out.exists():
        export_pack(Path(job.folder) / "pack", destination, out)
    return out


@contextlib.contextmanager
def _running(server: str, gguf: str, adapter: Path, log: Path) -> Iterator[str]:
    """Run llama.cpp's server on a free port; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [server, "-m", gguf, "--lora", str(adapter), "--port", str(port), "-c", "2048"]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(process, url, log)
        yield url
    finally:
        process.terminate()
        process.wait()


def _wait_until_ready(process: subprocess.Popen, url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"llama-server ended with exit code {process.returncode}: see {log}")
        with contextlib.suppress(urllib.error.URLError):
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        time.sleep(0.5)
    raise RuntimeError(f"llama-server did not answer within {_START_S} s: see {log}")


PROGRAMS = {OURS: ours, PEFT: peft, LLAMA_CPP: llama_cpp}


def compare(answers: dict[str, list[str]], expected: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return how often each program gives our answer, and how often it gives the expected one."""
    cleaned = {name: [answer.strip() for answer in each] for name, each in answers.items()}
    reference = cleaned[OURS]

    def share(some: Sequence[str], other: Sequence[str]) -> float:
        return sum(a == b for a, b in zip(some, other, strict=True)) / len(expected)

    wanted = [answer.strip() for answer in expected]
    return {
        name: {"agreement": share(each, reference), "exact": share(each, wanted)}
        for name, each in cleaned.items()
    }


def main(arguments: list[str]) -> int:
    program, folder, *rest = arguments
    job = Job.read(folder)
    asked = prompts(job)
    answers = PROGRAMS[program](job, asked, *rest)
    print(json.dumps({"answers": answers, "expected": [each["expected"] for each in asked]}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
