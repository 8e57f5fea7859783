"""A substitute for `packs train`: each start takes the next act of acts.json, and logs its arguments."""

import json
import os
import signal
import sys
import time
from pathlib import Path

acts = json.loads(Path("acts.json").read_text())
act = acts.pop(0)
Path("acts.json").write_text(json.dumps(acts))
with Path("starts.jsonl").open("a") as log:
    log.write(json.dumps(sys.argv[2:]) + "\n")
asked = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: asked.append(number))
if act.get("clears"):
    for folder in Path("p-run").glob("step-*"):
        folder.rmdir()
for batch in act.get("checkpoints", ()):
    Path(f"p-run/step-{batch:06}").mkdir(parents=True)
if "asks_parent" in act:
    os.kill(os.getppid(), act["asks_parent"])
    end = time.monotonic() + 20
    while not asked and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.1)  # a second signal would come now
    print("asked", asked, file=sys.stderr, flush=True)
if act.get("terminal"):
    columns = os.get_terminal_size(2).columns if os.isatty(2) else 0
    print("terminal", columns, file=sys.stderr, flush=True)
print(act.get("messages", ""), file=sys.stderr, flush=True)
print(act.get("result", ""), end="", flush=True)
time.sleep(act.get("seconds", 0))
if "signal" in act:
    os.kill(os.getpid(), act["signal"])
sys.exit(act.get("code", 0))
