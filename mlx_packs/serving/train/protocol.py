"""Requests of the Tinker protocol in JSON, as its SDK writes them.

A field that would change a result and is not implemented is rejected, never ignored; what only
concerns a hosted service (projects, tags, ...) is accepted.
"""

from typing import Any, Literal

from pydantic import Field, model_validator

from ..fields import Object

MAX_SAMPLES = 256
_MOST_TTL = 10 * 365 * 24 * 3600  # seconds


class ClientConfigBody(Object):
    sdk_version: str


class CreateSessionBody(Object):
    tags: list[str] = Field(default_factory=list)
    user_metadata: dict[str, Any] = Field(default_factory=dict)
    sdk_version: str = ""
    project_id: str = ""
    display_name: str = ""
    type: Literal["create_session"] = "create_session"


class SessionBody(Object):
    session_id: str
    type: Literal["session_heartbeat"] = "session_heartbeat"


class LoraConfigBody(Object):
    rank: int = Field(32, ge=1)
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfigBody(Object):
    type: Literal["adamw"] = "adamw"


class CreateModelBody(Object):
    session_id: str
    model_seq_id: int = Field(ge=0)
    base_model: str
    user_metadata: dict[str, Any] = Field(default_factory=dict)
    lora_config: LoraConfigBody = Field(default_factory=LoraConfigBody)
    optimizer_config: OptimizerConfigBody = Field(default_factory=OptimizerConfigBody)
    type: Literal["create_model"] = "create_model"


class ModelBody(Object):
    model_id: str
    type: Literal["get_info", "unload_model"] | None = None


class AdamBody(Object):
    """Settings of one update: `torch.optim.AdamW`, with the gradient's norm clipped before it."""

    learning_rate: float = Field(0.0001, ge=0, allow_inf_nan=False)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, ge=0, allow_inf_nan=False)
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    grad_clip_norm: float = Field(0.0, allow_inf_nan=False)


class OptimStepBody(Object):
    model_id: str
    adam_params: AdamBody
    seq_id: int | None = None
    type: Literal["optim_step"] = "optim_step"


class SaveWeightsBody(Object):
    model_id: str
    path: str | None = None
    seq_id: int | None = None
    ttl_seconds: int | None = Field(None, ge=1, le=_MOST_TTL)
    overwrite: bool = False
    user_metadata: dict[str, str] = Field(default_factory=dict)
    type: Literal["save_weights"] = "save_weights"


class SaveForSamplerBody(Object):
    model_id: str
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    seq_id: int | None = None
    ttl_seconds: int | None = Field(None, ge=1, le=_MOST_TTL)
    user_metadata: dict[str, str] = Field(default_factory=dict)
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class LoadWeightsBody(Object):
    """Loads into a model that exists (``model_id``), or makes one (``session_id``)."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = Field(None, ge=0)
    base_model: str | None = None
    user_metadata: dict[str, Any] = Field(default_factory=dict)
    optimizer_config: OptimizerConfigBody | None = None
    type: Literal["load_weights"] = "load_weights"

    @model_validator(mode="after")
    def _names_one_model(self) -> "LoadWeightsBody":
        makes_one = self.session_id is not None and self.model_seq_id is not None
        if makes_one == (self.model_id is not None):
            raise ValueError("needs either model_id or session_id with model_seq_id")
        return self


class SamplingSessionBody(Object):
    session_id: str
    sampling_session_seq_id: int = 0
    base_model: str | None = None
    model_path: str | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class _Chunk(Object):
    tokens: list[int]
    type: Literal["encoded_text"] = "encoded_text"


class PromptBody(Object):
    chunks: list[_Chunk]

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.tokens]


class SamplingParamsBody(Object):
    """How tokens are chosen; ``stop`` [] lets a text end with its length alone."""

    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_k: int = Field(-1, ge=-1)
    top_p: float = Field(1.0, gt=0, le=1)


class SampleBody(Object):
    prompt: PromptBody
    sampling_params: SamplingParamsBody
    sampling_session_id: str
    num_samples: int = Field(1, ge=1, le=MAX_SAMPLES)
    seq_id: int | None = None
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = Field(0, ge=0, le=100)
    topk_sample_logprobs: int = Field(0, ge=0, le=100)
    prompt_logprobs_last_n: int | None = Field(None, ge=1)
    prompt_alt_tokens_k: Literal[0] = 0
    record_stability_info: Literal[False] = False
    type: Literal["sample"] = "sample"


class RetrieveBody(Object):
    request_id: str
    allow_metadata_only: bool = False


class CancelBody(Object):
    request_id: str


class WeightsInfoBody(Object):
    tinker_path: str
