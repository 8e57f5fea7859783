"""Chat templates that ``--chat-template`` knows by name, and the text of one in a file."""

from pathlib import Path

from ..errors import PackError
from ..reading import read_text

# The prompt and then the completion, as TRL trains on both without a template. A tokenizer that
# begins texts with BOS begins these with it (`bases.tokenizer`).
PLAIN = """\
{%- for message in messages %}
{%- if loop.index > 2 or message.role != ('user' if loop.first else 'assistant') %}
{{- raise_exception('plain text is one prompt and one completion. Name a template of roles by \
--chat-template') }}
{%- endif %}
{{- message.content }}
{%- endfor %}
"""
_CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
_LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{{- message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
# Gemma has no system role: the text is put before the first question.
_GEMMA = """\
{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- for message in messages %}
{%- if message.role == 'system' and loop.first %}
{%- set ns.system = message.content | trim + '\\n\\n' %}
{%- elif message.role in ('user', 'assistant') %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\\n' }}
{{- ns.system + message.content | trim + '<end_of_turn>\\n' }}
{%- set ns.system = '' %}
{%- else %}
{{- raise_exception('gemma has no role ' + message.role) }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""
CHAT_TEMPLATES = {"plain": PLAIN, "chatml": _CHATML, "llama3": _LLAMA3, "gemma": _GEMMA}
# What each marks turns with: tokens that the tokenizer of a base must have.
MARKS = {
    _CHATML: ("<|im_start|>", "<|im_end|>"),
    _LLAMA3: ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    _GEMMA: ("<start_of_turn>", "<end_of_turn>"),
}


def template_text(value: str) -> str:
    """Return the text of a template: of a known name, of a file, or the text itself."""
    if value in CHAT_TEMPLATES:
        return CHAT_TEMPLATES[value]
    if "{{" in value or "{%" in value:
        return value

    try:
        text = read_text(Path(value).expanduser())
    except (OSError, PackError):
        fault = "is no file that can be read"
    else:
        if "{{" in text or "{%" in text:
            return text
        fault = "has no template in Jinja"
    names = ", ".join(CHAT_TEMPLATES)
    raise PackError(
        f"--chat-template {value:.60}: {fault}. Name a .jinja file, or one of {names}.",
        "invalid",
        "chat_template",
    )
