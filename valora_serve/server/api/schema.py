"""Requests and responses of OpenAI's API with VaLoRA's additions, and what endpoints share.

Unknown fields are refused, so that a typo is noticed, but for those of messages and their parts, to
which frameworks keep adding their own (`cache_control`, `detail`, `reasoning_content`).
"""

import json
from dataclasses import MISSING, fields
from typing import Annotated, Any, Generic, Literal, TypeVar, get_type_hints

from pydantic import (
    AfterValidator,
    AliasChoices,
    AliasPath,
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    FiniteFloat,
    JsonValue,
    Tag,
    ValidationInfo,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from valora_data.contract.results import Detection
from valora_serve.server.media.fetch import MediaUrl
from valora_serve.types import MAX_MIXED, MAX_WEIGHT

T = TypeVar("T")


def _finite(value: JsonValue) -> JsonValue:
    json.dumps(value, allow_nan=False)  # no answer can hold NaN or infinity
    return value


JsonObject = Annotated[dict[str, JsonValue], AfterValidator(_finite)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Text = str  # whose halves of characters (lone surrogates) are refused as no JSON
_Stop = Annotated[str, Field(min_length=1, max_length=1000)]
_Limit = Annotated[int | None, Field(ge=1, le=10_000_000)]
_Token = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
_Bias = dict[_Token, Annotated[FiniteFloat, Field(ge=-100, le=100)]]
_Penalty = Annotated[FiniteFloat | None, Field(ge=-2, le=2)]
Deadline = Annotated[
    FiniteFloat | None,
    Field(ge=0.001, le=86400, description="deadline in seconds from the request's arrival"),
]
Score = Annotated[
    FiniteFloat | None, Field(ge=0, le=1, description="least confidence of a detected box")
]
CacheSalt = Annotated[
    Annotated[str, Field(min_length=1, max_length=1024)] | None,
    Field(description="cached prompts and images are shared only with requests of the same salt"),
]
# Validation of a list stops at the first invalid item, so that the error is short.
_Texts = Annotated[list[Text], Field(max_length=1_000, fail_fast=True)]
_Tokens = Annotated[list[Token], Field(max_length=1_000_000, fail_fast=True)]
_TextsOrTokens = (
    Text | _Texts | _Tokens | Annotated[list[_Tokens], Field(max_length=1_000, fail_fast=True)]
)

IGNORED = (
    "max_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "reasoning", "reasoning_effort", "context_management", "metadata",
    "safety_identifier", "service_tier", "store", "truncation", "user", "verbosity",
)  # fmt: skip
"""Fields of OpenAI's that change no answer of this server."""
_STORE = "false keeps the request out of the server's sample"
_STATELESS = "as this server keeps no conversations: send the whole conversation as input"
REFUSED = {
    "audio": "not served, as answers are text: leave it out",
    "background": "not served: wait for the answer, or set stream",
    "conversation": f"not served, {_STATELESS}",
    "function_call": "OpenAI's old form of tool_choice: send tool_choice",
    "functions": "OpenAI's old form of tools: send tools",
    "moderation": "not served: leave it out",
    "prompt": "not served, as this server keeps no prompts: send it as input",
    "previous_response_id": f"not served, {_STATELESS}",
    "web_search_options": "not served, as this server searches nothing: leave it out",
}
"""Fields of OpenAI's that ask for what is not served."""


class Body(BaseModel, extra="forbid"):
    """Body of a request, or a part of one."""


def optional(said: str, **limits: Any) -> Any:
    """A field that is None by default, with what is said of it in the document of the API."""
    return Field(default=None, description=said, **limits)


def fields_of(kind: type, *without: str) -> dict[str, Any]:
    """Fields for `create_model` that are those of a dataclass."""
    hints = get_type_hints(kind)
    return {
        item.name: (hints[item.name], ... if item.default is MISSING else item.default)
        for item in fields(kind)
        if item.name not in without
    }


def _refuse(value: JsonValue, field: ValidationInfo) -> JsonValue:
    if value not in (None, [], False, "none", "auto"):
        raise PydanticCustomError("refused", REFUSED[str(field.field_name)])
    return value


_FIELDS: dict[str, Any] = {
    name: (JsonValue, optional(said))
    for name, said in (dict.fromkeys(IGNORED, "ignored") | {"store": _STORE}).items()
} | {
    name: (Annotated[JsonValue, AfterValidator(_refuse)], optional(said))
    for name, said in REFUSED.items()
}
_Others: Any = create_model("_Others", __base__=Body, **_FIELDS)

# Requests


class Url(BaseModel):
    """URL of an image or video: data:, http(s): of an allowed host, or file: in media_folder."""

    url: str


def _url(item: Any) -> Any:
    if isinstance(item, dict) and not isinstance(item := item.get("url"), str):
        raise PydanticCustomError("url", 'Input should be a URL, or an object with it as "url"')
    return item


_Media = Annotated[MediaUrl, BeforeValidator(_url, json_schema_input_type=Url | str)]


class TextPart(BaseModel):
    """Text in a message."""

    type: Literal["text", "input_text", "output_text", "refusal"]
    text: Text = Field(validation_alias=AliasChoices("text", "refusal"))


class ImagePart(BaseModel):
    """An image in a message."""

    type: Literal["image_url", "input_image"]
    image_url: _Media


class VideoPart(BaseModel):
    """A video in a message; evenly spaced frames are sampled from it."""

    type: Literal["video_url"]
    video_url: _Media


class FramesPart(BaseModel):
    """A video in a message, as its frames in order."""

    type: Literal["frames"]
    frames: list[_Media] = Field(fail_fast=True, min_length=1, max_length=10_000)


ContentPart = Annotated[TextPart | ImagePart | VideoPart | FramesPart, Field(discriminator="type")]
_Parts = Annotated[list[ContentPart], Field(max_length=10_000, fail_fast=True)]


class FunctionCall(BaseModel):
    """A call of a function, as the assistant wrote it."""

    name: Text
    arguments: Text


class ToolCall(BaseModel):
    """An earlier call of a tool."""

    type: Literal["function"] = "function"
    function: FunctionCall


class Message(BaseModel):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | _Parts | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=1_000, fail_fast=True)] | None = None
    refusal: Text | None = None
    function_call: FunctionCall | None = None


_Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=10_000)]


class Function(Body):
    """A function that the model can call."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: Text | None = None
    parameters: JsonObject | None = optional("JSON schema of its arguments; none by default")
    strict: bool | None = optional("whether arguments hold nothing that parameters do not name")
    cache_control: JsonValue = optional("ignored")


class Tool(BaseModel):
    """A function as a tool."""

    type: Literal["function"]
    function: Function

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, tool: Any) -> Any:
        """The form of ``/v1/responses``, whose tools hold the fields of the function."""
        if isinstance(tool, dict) and tool.get("type") == "function" and "name" in tool:
            ignored = {"type", "defer_loading", "allowed_callers", "output_schema", "async"}
            return {"type": "function", "function": {k: tool[k] for k in tool.keys() - ignored}}
        return tool


def _within(field: str, name: str) -> Any:
    """A field that OpenAI's chat has within another one, and its Responses API has not."""
    return Field(validation_alias=AliasChoices(AliasPath(field, name), name))


class NamedTool(BaseModel):
    """A function by its name, which stands in `function` in chat: `{"name": …}`."""

    type: Literal["function"]
    name: str = _within("function", "name")


class AllowedTools(BaseModel):
    """What an answer may, or must, call; in chat mode and tools stand in `allowed_tools`."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = _within("allowed_tools", "mode")
    tools: list[NamedTool] = _within("allowed_tools", "tools")


class StreamOptions(BaseModel):
    """Options of a streamed response."""

    include_usage: bool | None = False


class JsonSchema(Body):
    """A JSON schema that the answer follows."""

    name: str | None = None
    description: str | None = None
    schema_: JsonObject | bool | None = Field(default=None, alias="schema")
    strict: bool | None = optional("objects take no further keys; the schema holds in any case")


class ResponseFormat(Body):
    """Format of the answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None


class WeightedAdapter(Body):
    """An adapter with the factor of what it adds to the base model."""

    name: Text
    weight: FiniteFloat = Field(default=1, ge=-MAX_WEIGHT, le=MAX_WEIGHT)


class Valora(Body):
    """VaLoRA's own options of a request."""

    head: bool = Field(default=True, description="answer with the model's head if it has one")
    min_score: Score = None
    deadline: Deadline = None
    adapters: list[WeightedAdapter] | None = Field(
        default=None,
        max_length=MAX_MIXED,
        description="adapters with weights, applied together; model then names the base model or "
        "the first of them",
    )


class _Asked(Body):
    model: str | None = optional("a domain, an adapter or the base model, which is the default")
    cache_salt: CacheSalt = None
    valora: Valora = Valora()


class _Generated(_Asked):
    stream: bool | None = False
    temperature: FiniteFloat | None = Field(default=None, ge=0, le=2)
    top_p: FiniteFloat | None = Field(default=None, gt=0, le=1)


class _Sampled(_Generated):
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=1, ge=1, le=128)
    top_k: int | None = Field(default=None, ge=-1, le=1_000_000)
    min_p: FiniteFloat | None = Field(default=None, ge=0, le=1)
    max_completion_tokens: _Limit = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16, fail_fast=True)] | None = None
    min_tokens: int | None = Field(default=None, ge=0, le=10_000_000)
    ignore_eos: bool | None = False
    response_format: ResponseFormat | None = None
    presence_penalty: _Penalty = None
    frequency_penalty: _Penalty = None
    repetition_penalty: FiniteFloat | None = Field(
        default=None,
        ge=0.01,
        le=100,
        description="divisor of the positive logits of tokens of prompt and answer, and factor of "
        "the negative ones; 1 for none",
    )
    logit_bias: _Bias | None = optional(
        "values from -100 to 100 by token id, added to the logits after the penalties",
        max_length=300,
    )


class _Called(Body):
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: (
        Literal["auto", "none", "required"]
        | Annotated[NamedTool | AllowedTools, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: bool | None = optional(
        "whether an answer may hold several calls; true by default"
    )
    top_logprobs: int | None = Field(default=None, ge=0, le=20)


class ChatRequest(_Sampled, _Called, _Others):  # type: ignore[misc]
    """Body of ``/v1/chat/completions``."""

    messages: _Messages
    max_tokens: _Limit = None
    logprobs: bool | None = False
    modalities: list[Literal["text"]] | None = None


class CompletionRequest(_Sampled):
    """Body of ``/v1/completions``."""

    prompt: _TextsOrTokens
    max_tokens: int | None = Field(
        default=16, ge=0, le=10_000_000, description="0 goes with echo: only the prompt is scored"
    )
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool | None = Field(
        default=False, description="whether the prompt, with its logprobs, precedes the answer"
    )
    best_of: int | None = optional("must equal n", ge=1, le=128)
    suffix: None = None
    user: str | None = optional("ignored")


class EmbeddingRequest(_Asked):
    """Body of ``/v1/embeddings``."""

    input: _TextsOrTokens | None = None
    messages: _Messages | None = optional("a conversation with images to embed, instead of input")
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = optional("only the width of the model", ge=1)
    user: str | None = optional("ignored")


class ResponseInputCall(FunctionCall):
    """An earlier call of a function."""

    type: Literal["function_call"]


class ResponseInputResult(BaseModel):
    """What a called function returned."""

    type: Literal["function_call_output"]
    output: Text | _Parts


_ResponseItem = Annotated[
    Annotated[Message, Tag("message")]
    | Annotated[ResponseInputCall, Tag("function_call")]
    | Annotated[ResponseInputResult, Tag("function_call_output")]
    | Annotated[dict[str, JsonValue], Tag("reasoning")],  # ignored
    Discriminator(lambda item: (isinstance(item, dict) and item.get("type")) or "message"),
]


_Included = Literal[
    "code_interpreter_call.outputs", "computer_call_output.output.image_url",
    "file_search_call.results", "message.input_image.image_url", "message.output_text.logprobs",
    "reasoning.encrypted_content", "web_search_call.action.sources", "web_search_call.results",
]  # fmt: skip


class ResponseTextFormat(JsonSchema):
    """Format of the answer of ``/v1/responses``."""

    type: Literal["text", "json_object", "json_schema"] = "text"


class ResponseText(Body):
    """Text options of ``/v1/responses``."""

    format: ResponseTextFormat | None = None
    verbosity: str | None = optional("ignored")


class ResponsesRequest(_Generated, _Called, _Others):  # type: ignore[misc]
    """Body of ``/v1/responses``."""

    input: (
        Text
        | Annotated[list[_ResponseItem], Field(min_length=1, max_length=10_000, fail_fast=True)]
    )
    instructions: Text | None = None
    max_output_tokens: _Limit = None
    text: ResponseText | None = None
    stream_options: JsonValue = optional("ignored")
    include: Annotated[list[_Included], Field(max_length=100)] | None = optional(
        "only message.output_text.logprobs is not ignored"
    )
    metadata: dict[str, str] | None = optional("returned as it is")


_Urls = Annotated[list[MediaUrl], Field(max_length=10_000, fail_fast=True)]


class VisionRequest(Body):
    """JSON body of ``/v1/vision/{domain}``."""

    images: _Urls = Field(default=[], description="URLs of images; each gets its own result")
    video: MediaUrl | None = optional("URL of a video")
    frames: _Urls = Field(default=[], description="URLs of the frames of a video, in order")
    prompt: Text | None = optional("prompt; the domain's own by default")
    min_score: Score = None
    max_tokens: _Limit = None
    deadline: Deadline = None
    cache_salt: CacheSalt = None
    store: bool | None = optional(_STORE)


class LookRequest(VisionRequest):
    """JSON body of ``/v1/vision``."""

    domains: Literal["*"] | Annotated[list[Text], Field(min_length=1, max_length=1000)] = Field(
        description="names of domains, or of bundles for all of theirs; `*` for every domain that "
        "reads what is sent"
    )


# Responses


class Listed(BaseModel, Generic[T]):
    """Several of something, as OpenAI's API lists it."""

    object: Literal["list"] = "list"
    data: list[T]


class ErrorBody(BaseModel):
    """An error: one sentence, and a code for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(BaseModel):
    """Response of every error."""

    error: ErrorBody


class TokenDetails(BaseModel):
    """Prompt tokens that were cached, and those of images."""

    cached_tokens: int = 0
    image_tokens: int = 0


class UsageAnswer(BaseModel):
    """Token counts of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: TokenDetails | None = None


class ImageAnswer(BaseModel):
    """The boxes of one image, and the size in pixels that they refer to."""

    width: int
    height: int
    detections: list[Detection]


_WARNINGS: Any = Field(
    default=[], description="what of the request was ignored or was not measured"
)


class ValoraAnswer(BaseModel, extra="allow"):
    """Which model answered and how, and the answer of its head; other kinds have other fields."""

    model: str
    adapter: str | None = None
    bundle: str | None = None
    kind: str | None = optional("kind of the head that answered")
    images: list[ImageAnswer] = []
    label: str | None = None
    confidence: float | None = None
    confidences: dict[str, float] = {}
    mode: str | None = optional("inference mode of the last step: unmerged, merged or mixture")
    queue_seconds: float | None = None
    seconds: float | None = None
    warnings: list[str] = _WARNINGS


class TopLogprob(BaseModel):
    """A token and its log probability."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob):
    """The sampled token and the most likely tokens at its position."""

    top_logprobs: list[TopLogprob] = []


class AnswerToolCall(ToolCall):
    """A call of a function, whose arguments are a JSON object as a string."""

    id: str


class AnswerMessage(BaseModel):
    """Message with the answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[AnswerToolCall] | None = None


class ChatChoice(BaseModel):
    """One answer of ``/v1/chat/completions``."""

    index: int
    message: AnswerMessage
    logprobs: dict[Literal["content", "refusal"], list[TokenLogprob] | None] | None = None
    finish_reason: str


class _Answer(BaseModel):
    id: str
    created: int
    model: str
    usage: UsageAnswer
    valora: ValoraAnswer | None = None


class ChatAnswer(_Answer):
    """Response of ``/v1/chat/completions``."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class CompletionLogprobs(BaseModel):
    """Log probabilities of an answer's tokens; the first token of an echoed prompt has none."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class CompletionChoice(BaseModel):
    """One answer of ``/v1/completions``."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class CompletionAnswer(_Answer):
    """Response of ``/v1/completions``."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class ResponseAnswer(BaseModel, extra="allow"):
    """Response of ``/v1/responses``; all of OpenAI's fields that apply here."""

    id: str
    object: Literal["response"] = "response"
    created_at: float
    status: Literal["in_progress", "completed", "incomplete"]
    model: str
    output: list[JsonValue]
    valora: ValoraAnswer | None = None


class Embedding(BaseModel):
    """One embedding: numbers, or base64 of little-endian float32; its Euclidean length is 1."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingAnswer(Listed[Embedding]):
    """Response of ``/v1/embeddings``: one embedding for each input, in order."""

    model: str
    usage: UsageAnswer


class VisionResult(BaseModel, extra="allow"):
    """The answer to one image or to the video; other kinds of heads have other fields."""

    width: int
    height: int
    detections: list[Detection] | None = None
    label: str | None = None
    confidence: float | None = None
    confidences: dict[str, float] | None = None
    text: str | None = None


class VisionAnswer(BaseModel):
    """Response of ``/v1/vision/{domain}``: one result per image, in order."""

    id: str
    object: Literal["vision.result"] = "vision.result"
    created: int
    domain: str
    task: str | None = None
    adapter: str | None = None
    bundle: str | None = None
    kind: str | None = None
    results: list[VisionResult]
    usage: UsageAnswer
    mode: str | None = None
    seconds: float
    warnings: list[str] = _WARNINGS


class LookAnswer(BaseModel):
    """Response of ``/v1/vision``: by domain its answer, or why there is none."""

    id: str
    object: Literal["vision.look"] = "vision.look"
    created: int
    domains: dict[str, VisionAnswer | ErrorAnswer]
    seconds: float


class Done(BaseModel):
    """Response to an unload."""

    status: Literal["ok"] = "ok"
    message: str
