"""Conversations, how tokens are chosen, and text from Python."""

import io
import sys
from types import SimpleNamespace

import pytest

import mlx_packs as mp
from mlx_packs.config.sampling import Sampling
from mlx_packs.inference import chat, generate
from mlx_packs.inference.chat import ChatSession
from mlx_packs.inference.generate import chat_prompt, complete
from mlx_packs.runtime import mx
from tests.helpers.errors import check, raises
from tests.helpers.packs import random_pack

SHORT = Sampling(max_tokens=4)


@pytest.fixture
def packs(shared_tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate("ab"):
        random_pack(shared_tiny, seed, 4, ()).save(name)


@pytest.mark.slow
@pytest.mark.parametrize("penalty", [{}, {"repetition_penalty": 1.5}], ids=str)
def test_a_conversation_is_what_its_messages_are_alone(small_tiny, monkeypatch, penalty):
    """Keys and values of earlier turns are used again, and change nothing; a penalty sees them."""
    computed = []

    def counted(base, prompt, *rest):
        computed.append(len(prompt))
        return generate.responses(base, prompt, *rest)

    monkeypatch.setattr(chat, "responses", counted)
    conversation = ChatSession(small_tiny, "Be short.", Sampling(max_tokens=6, **penalty))
    for text in ("Who was it?", "And then, what was it that they did to him?", "Why?"):
        asked = [*conversation.messages, {"role": "user", "content": text}]
        prompt = chat_prompt(small_tiny, asked)
        answer = "".join(conversation.reply(text))
        assert answer == complete(small_tiny, prompt, 6, **penalty)
        assert conversation.messages == [*asked, {"role": "assistant", "content": answer}]
    assert penalty or computed[0] > computed[2] and len(prompt) > 2 * computed[2]
    conversation.clear()
    assert conversation.messages == [{"role": "system", "content": "Be short."}]


@pytest.mark.parametrize(
    ("text", "content"),
    [("A colour.</think>red", "red"), ("A colour.", "")],
    ids=["ends", "goes on"],
)
def test_thoughts_that_the_prompt_opens_are_no_content(small_tiny, monkeypatch, text, content):
    template = small_tiny.tokenizer.chat_template
    monkeypatch.setattr(small_tiny.tokenizer._tokenizer, "chat_template", template + "<think>\n")
    pieces = [SimpleNamespace(token=7, text=text)]
    monkeypatch.setattr(chat, "responses", lambda *_: iter(pieces))
    conversation = ChatSession(small_tiny, sampling=SHORT)
    assert "".join(conversation.reply("?")) == f"<think>\n{text}"
    answer = conversation.messages[-1]
    assert (answer["content"], answer["reasoning_content"]) == (content, "A colour.")


def test_an_answer_that_is_not_taken_to_its_end_counts_as_far(small_tiny):
    conversation = ChatSession(small_tiny, sampling=SHORT)
    pieces = conversation.reply("Who was it?")
    first = next(pieces)
    pieces.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": first}
    asked = [*conversation.messages, {"role": "user", "content": "Go on."}]
    expected = complete(small_tiny, chat_prompt(small_tiny, asked), 4)
    assert "".join(conversation.reply("Go on.")) == expected


def test_chat_answers_lines_and_obeys_commands(packs, shared_tiny, run, monkeypatch):
    lines = ["Who?", "/pack a", "Who?", "/clear", "Who?", "/pack nope", "/what", "/history"]
    lines += ["/base", "/clear", "Who?", "/help", "/quit", "never"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    code, out, err = run("chat", "--max-tokens", 4)
    plain = mp.generate("tiny", "Who?", max_tokens=4)
    adapted = mp.generate(shared_tiny, "Who?", "a", max_tokens=4)
    assert code == 0 and plain != adapted
    shown = out.split("\n")
    assert shown[0] == plain and shown[1] == "(a)" and shown[3] == "(a new conversation)"
    assert shown[4] == adapted and shown[5:7] == ["user: Who?", f"assistant: {adapted}"]
    assert shown[7:10] == ["(the base alone)", "(a new conversation)", plain]
    assert "never" not in out and err.count("\n") == 2
    assert "nope: no such pack folder" in err and "/what: is not a command" in err


def test_text_from_python(shared_tiny, packs):
    text = shared_tiny.generate("Who was it?", max_tokens=3)
    assert text == shared_tiny.generate([{"role": "user", "content": "Who was it?"}], max_tokens=3)
    with shared_tiny.applied("a"):
        adapted = shared_tiny.generate("Who was it?", max_tokens=3)
    assert adapted == mp.generate(shared_tiny, "Who was it?", "a", max_tokens=3) != text
    assert shared_tiny.active is None
    assert mp.generate(None, "Who was it?", {"a": 1.0}, max_tokens=3) == adapted
    assert shared_tiny.generate("def f(", raw=True, max_tokens=3) != ""
    with raises("conflict", "raw"):
        shared_tiny.generate([{"role": "user", "content": "x"}], raw=True)
    with raises("unknown", "max_token", "max_tokens"):
        shared_tiny.generate("x", max_token=3)


def test_tokens_are_chosen_as_asked(small_tiny):
    """Of one token that is left, the likeliest; penalized ones do not come again at once."""
    greedy = small_tiny.generate("Who was it?", max_tokens=4)
    for one in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.999}):
        assert small_tiny.generate("Who was it?", max_tokens=4, temperature=3.0, **one) == greedy

    drawn = {
        small_tiny.generate("Who was it?", max_tokens=4, temperature=3.0, top_k=10**9, seed=seed)
        for seed in (1, 1, 2)
    }
    assert len(drawn) == 2 and greedy not in drawn

    loop = [5] * 8
    assert complete(small_tiny, loop, 8) != complete(small_tiny, loop, 8, repetition_penalty=1.5)

    logits = small_tiny.model(mx.array([loop]))[0, -1]
    likeliest = int(mx.argmax(logits))
    penalized = complete(small_tiny, [*loop, likeliest], 1, repetition_penalty=1e6)
    assert penalized != small_tiny.tokenizer.decode([likeliest])


@pytest.mark.parametrize(
    ("flags", "code", "flag"),
    [
        (("--top-p", 0.5), "conflict", "top_p"),
        (("--temp", 1, "--top-p", 0), "invalid", "top_p"),
        (("--temp", "warm"), "invalid", "temperature"),
        (("--max-tokens", 0), "invalid", "max_tokens"),
        (("--repetition-penalty", 0), "invalid", "repetition_penalty"),
    ],
)
def test_sampling_that_cannot_be_is_one_line(run, flags, code, flag):
    for command in (("generate", "--prompt", "x"), ("chat",)):
        assert run(*command, *flags)[0] == 2
        check(run.error, code, flag)
