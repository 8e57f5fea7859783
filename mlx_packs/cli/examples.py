"""The examples at the end of each command's help; each runs as printed where its files are."""

# By command: a sentence, and the line to type.
_TEXT = """
train
  Fine-tune the bundled model on the bundled data:
    packs train
  Fine-tune a 4-bit model on the examples in ./data:
    packs train --model mlx-community/Qwen3-4B-Instruct-2507-4bit --data data --out packs/tickets
  Continue that run after an interruption:
    packs train --out packs/tickets --resume

init
  Answer a few questions, and get a recipe:
    packs init
  Write one for a Mac with 16 GB:
    packs init --model mlx-community/Qwen3-4B-Instruct-2507-4bit --data data --memory 16GB

sweep
  Train and compare the trials of a recipe with a section sweep:
    packs sweep -c sweep.yaml
  Draw the values at random, whatever the file says:
    packs sweep -c sweep.yaml --search random

learn
  Train on the answers that were rated on a server, and serve the result if it wins:
    packs learn learned
  List the versions and what they gained:
    packs learn learned --list
  Put version 1 back:
    packs learn learned --use 1

data
  Count the examples of a folder and their tokens:
    packs data data
  Check a table whose columns have other names:
    packs data faq.csv --prompt-feature question --completion-feature answer
  Write its training, validation and test examples to a folder:
    packs data faq.csv --prompt-feature question --completion-feature answer --out data

plan
  Estimate the memory of a run on a Mac with 16 GB:
    packs plan --model mlx-community/Qwen3-4B-Instruct-2507-4bit --memory 16GB
  List settings with which a run fits into 10 GB, whatever else the machine does:
    packs plan --model mlx-community/Qwen3-8B-4bit --budget 10GB
  Compare two models:
    packs plan --model mlx-community/Qwen3-4B-Instruct-2507-4bit --model mlx-community/Qwen3-8B-4bit

bench
  Time training steps of the bundled model, alongside mlx-lm's:
    packs bench
  Time a larger model in at most 20 minutes:
    packs bench --model mlx-community/Qwen3-4B-Instruct-2507-4bit --minutes 20
  Time one shape of a batch, 4 examples of 512 tokens:
    packs bench --shapes 4x512

doctor
  Check this machine and its kernels:
    packs doctor
  Write the result to a file, for a bug report:
    packs doctor --report doctor.json

inspect
  Show the contents of a pack:
    packs inspect packs/tickets
  List each adapter too:
    packs inspect packs/tickets --verbose
  Check that it fits a base model, attach, run and detach it:
    packs inspect packs/tickets --on models/qwen3-4b

list
  List the packs below this folder:
    packs list
  List packs that were downloaded from the Hub:
    packs list --hub-cache
  List the base models on this disk:
    packs list --bases

diff
  Compare two packs:
    packs diff packs/tickets packs/law

report
  Write the report page of a run that still trains:
    packs report packs/tickets-run
  Write the page of a pack:
    packs report packs/tickets

eval
  Measure the perplexity of held-out examples, with the pack and without:
    packs eval packs/tickets --data data
  Count exact answers of the bundled pack:
    packs eval packs/tiny --metric exact --limit 50
  Evaluate a weighted sum of two packs:
    packs eval packs/tickets=0.7 packs/law=0.3 --data data

eval-batch
  Compare two packs on the same examples:
    packs eval-batch packs/tickets packs/law --data data
  Compare a weighted sum with a part of it:
    packs eval-batch packs/tickets packs/tickets=0.5 --data data

eval-tasks
  Run two tasks of lm-evaluation-harness with a pack:
    packs eval-tasks packs/tickets --tasks arc_easy,hellaswag --limit 100
  Add two packs up, half of the second one:
    packs eval-tasks packs/tickets packs/law=0.5 --tasks arc_easy

classify
  Label the texts of a table, and write a table with their labels:
    packs classify packs/intents --data texts.csv --out labelled.csv
  Print the three most likely labels of one text:
    echo My card was charged twice. | packs classify packs/intents --top 3

generate
  Generate with a pack:
    packs generate packs/tickets --prompt "My card was charged twice for order 1042."
  Generate without a pack:
    packs generate --model tiny --prompt "What is a list?"
  Add up two packs, and sample:
    packs generate packs/tickets packs/law=0.3 --temp 0.7 --prompt "Hello"

chat
  Chat with a pack:
    packs chat packs/tickets
  Start with a system message:
    packs chat packs/tickets --system "Answer in one sentence."

push
  Upload a pack:
    packs push packs/tickets me/tickets --license apache-2.0
  Upload it as a private repository:
    packs push packs/tickets me/tickets --license apache-2.0 --private

pull
  Download a pack:
    packs pull me/tickets --out packs/theirs
  Download one version of it:
    packs pull me/tickets@v1 --out packs/theirs

merge
  Merge a pack into its base model:
    packs merge packs/tickets --model mlx-community/Qwen3-4B-Instruct-2507-4bit --out models/tickets
  Merge it and quantize the result to 4 bits again:
    packs merge packs/tickets --out models/tickets-4bit --requantize affine4

combine
  Make one pack of two:
    packs combine packs/tickets=0.7 packs/law=0.3 --out packs/both
  Reduce the result to rank 16 by TIES:
    packs combine packs/tickets=1 packs/law=1 --method ties --rank 16 --out packs/both

quantize
  Quantize a checkpoint to 4 bits:
    packs quantize --model Qwen/Qwen3-4B --mode affine --out models/qwen3-4b-4bit
  Quantize it to NF4, with the output layer left dense:
    packs quantize --model Qwen/Qwen3-4B --keep lm_head --out models/qwen3-4b-nf4

export
  Write a pack as PEFT reads it:
    packs export packs/tickets --to peft --out peft/tickets
  Write it for llama.cpp:
    packs export packs/tickets --to gguf --out gguf/tickets
  Write it for Ollama, on a model that it has:
    packs export packs/tickets --to ollama --from qwen3:4b --out ollama/tickets

import
  Make a pack of an adapter of PEFT:
    packs import their-adapter --model mlx-community/Qwen3-4B-Instruct-2507-4bit --out packs/theirs

serve
  Serve one pack and the base model:
    packs serve packs/tickets
  Serve every pack below a folder, as they come and go:
    packs serve --packs packs
  Serve other machines too, with a key:
    MLX_PACKS_API_KEY=secret packs serve tickets=packs/tickets --host 0.0.0.0

studio
  Follow the runs of this folder in the browser:
    packs studio
  Show the runs of another folder on a machine without a browser:
    packs studio --home ~/runs --no-browser
"""


def _examples(text: str) -> dict[str, tuple[tuple[str, str], ...]]:
    examples = {}
    for block in text.strip().split("\n\n"):
        command, *lines = (line.strip() for line in block.splitlines())
        examples[command] = tuple(zip(lines[::2], lines[1::2], strict=True))
    return examples


EXAMPLES = _examples(_TEXT)


def epilog(command: str) -> str:
    r"""Return the examples of a listed command as click prints them; \\b keeps the lines."""
    if command not in EXAMPLES:
        return ""
    lines = ["\b", "Examples:"]
    for sentence, line in EXAMPLES[command]:
        lines += [f"  {sentence}", f"    {line}"]
    return "\n".join(lines) + "\n"
