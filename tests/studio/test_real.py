"""Rows of banking77 on SmolLM2, three bad ones among them, by the requests of the pages."""

import json
import re

import pytest

from benchmarks.real import files, jobs
from mlx_packs.files import CACHE_VARIABLE
from mlx_packs.training.status import read_status
from tests.helpers.serving import until
from tests.studio.test_new_run import Client

pytestmark = pytest.mark.real

BAD = ["{", '{"prompt": "no completion"}', json.dumps({"prompt": "a", "completion": 3})]


def test_rows_of_a_bank_are_trained_on(home, studio, tmp_path_factory, monkeypatch):
    try:
        model, _ = files.smollm2(), files.data("banking77")
    except files.Missing as error:
        pytest.skip(str(error))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path_factory.getbasetemp() / "cache-of-real-models"))
    lines = [json.dumps(row) for row in jobs.read_rows("banking77", "train")[:50]]
    lines[6:6] = BAD
    client = Client(studio)
    data = client.upload("bank.jsonl", "\n".join(lines).encode())[1]["data"]

    values = {"model": str(model), "data": data, "iters": 6, "batch_size": 2, "max_seq_length": 128}
    page = client.page("/new", **values)
    shown = re.findall(r"<li><b>bank\.jsonl, line (\d+)</b>", page)
    assert sorted(shown) == ["7", "8", "9"] and "<mark>" in page
    assert "Leave out 3 bad rows" in page
    values["on_bad_row"] = "skip"
    page = client.page("/new", **values)
    print(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))

    status, headers, _ = client.post("/new", **values, name="bank")
    assert (status, headers["location"]) == (303, "/runs/bank")
    run = home / "packs" / "bank-run"
    until(lambda: read_status(run).state in ("finished", "failed"), 900)
    page = client.page("/runs/bank")
    texts = re.search(r"Perplexity.*?<td>(.*?)</td><td>(.*?)</td>", page).groups()
    before, after = (float(text.split()[0]) for text in texts)
    print(f"perplexity {before} before, {after} after {read_status(run).batch} batches")
    assert after < before and (home / "packs" / "bank" / "pack.json").is_file()
