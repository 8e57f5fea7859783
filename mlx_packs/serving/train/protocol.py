"""Requests of the Tinker protocol in JSON, as its SDK writes them.

A field that would change a result and is not implemented is rejected, never ignored; what only
concerns a hosted service (projects, tags, ...) is accepted.
"""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from ..fields import Integer, JsonObject, Metadata, Name, Number, Object, Seed
from ..protocol import MAX_STOPS, Stops, Tokens

MAX_SAMPLES = 256
_MOST = 10_000  # chunks of a prompt, tags of a session
_MOST_NUMBER = 1e30  # float32 has no more than 3.4e38
_Positive = Annotated[float, Field(ge=0, le=_MOST_NUMBER)]
_Optimizer = Annotated[dict[Literal["type"], Literal["adamw"]], Field(max_length=1)]
_StopTokens = Annotated[list[Integer], Field(max_length=MAX_STOPS)]


class _Request(Object):
    """A request; its ``type`` repeats its path."""

    type: Name = ""


class CreateSessionBody(_Request):
    tags: list[Name] = Field(default_factory=list, max_length=_MOST)
    user_metadata: JsonObject = Field(default_factory=dict)
    sdk_version: Name = ""
    project_id: Name = ""
    display_name: Name = ""


class SessionBody(_Request):
    session_id: Name


class LoraConfigBody(Object):
    rank: int = Field(32, ge=1, le=4096)
    seed: int | None = Field(None, ge=0, lt=2**32)
    train_unembed: bool = True
    train_mlp: Literal[True] = True
    train_attn: Literal[True] = True


class CreateModelBody(_Request):
    session_id: Name
    model_seq_id: Number
    base_model: Name
    user_metadata: JsonObject = Field(default_factory=dict)
    lora_config: LoraConfigBody = Field(default_factory=LoraConfigBody)
    optimizer_config: _Optimizer | None = None


class ModelBody(_Request):
    model_id: Name


class AdamBody(Object):
    """Settings of one update: `torch.optim.AdamW`, with the gradient's norm clipped before it."""

    learning_rate: _Positive = 0.0001
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: _Positive = 1e-12
    weight_decay: _Positive = 0.0
    grad_clip_norm: float = Field(0.0, ge=-_MOST_NUMBER, le=_MOST_NUMBER)


class OptimStepBody(ModelBody):
    adam_params: AdamBody
    seq_id: Integer | None = None


class SaveWeightsBody(ModelBody):
    path: Name | None = None
    seq_id: Integer | None = None
    overwrite: bool = False
    user_metadata: Metadata = Field(default_factory=dict)


class SaveForSamplerBody(ModelBody):
    path: Name | None = None
    seq_id: Integer | None = None
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot"] = "snapshot"
    user_metadata: Metadata = Field(default_factory=dict)


class LoadWeightsBody(_Request):
    """Makes a model of a saved one."""

    model_id: Name | None = None
    path: Name
    optimizer: bool
    session_id: Name
    model_seq_id: Number
    base_model: Name | None = None
    user_metadata: JsonObject = Field(default_factory=dict)
    optimizer_config: _Optimizer | None = None

    @field_validator("model_id")
    @classmethod
    def _check_new(cls, value: str | None) -> str | None:
        if value is not None:
            raise ValueError(
                "load_state is not supported here. Use create_training_client_from_state"
            )
        return value


class SamplingSessionBody(_Request):
    session_id: Name
    sampling_session_seq_id: Integer = 0
    base_model: Name | None = None
    model_path: Name | None = None


class _Chunk(Object):
    tokens: Tokens
    type: Literal["encoded_text"] = "encoded_text"


class PromptBody(Object):
    chunks: list[_Chunk] = Field(max_length=_MOST)

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.tokens]


class SamplingParamsBody(Object):
    """How tokens are chosen; ``stop`` [] lets a text end with its length alone."""

    max_tokens: Number | None = Field(None, ge=1)
    seed: Seed | None = None
    stop: Name | Stops | _StopTokens | None = None
    temperature: float = Field(1.0, ge=0, le=100)
    top_k: Integer = Field(-1, ge=-1)
    top_p: float = Field(1.0, gt=0, le=1)


class SampleBody(_Request):
    prompt: PromptBody
    sampling_params: SamplingParamsBody
    sampling_session_id: Name
    num_samples: int = Field(1, ge=1, le=MAX_SAMPLES)
    seq_id: Integer | None = None
    prompt_logprobs: bool = False
    topk_prompt_logprobs: Literal[0] = 0
    topk_sample_logprobs: Literal[0] = 0
    prompt_alt_tokens_k: Literal[0] = 0
    record_stability_info: Literal[False] = False


class ResultBody(Object):
    """Asks for the result of a request, or cancels it."""

    request_id: Name
    allow_metadata_only: bool = False
