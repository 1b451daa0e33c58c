"""All public names of the SDK. `quire_client` exports them."""

from quire_client.aio import AsyncClient, AsyncGenerateStream, AsyncSession
from quire_client.connection.channel import Tls
from quire_client.errors import (
    AlreadyExists,
    Cancelled,
    ConnectionFailed,
    DeadlineExceeded,
    FieldViolation,
    GenerationFailed,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    NotConfigured,
    Overloaded,
    PermissionDenied,
    QuireError,
    RequestNotFound,
    StreamCorrupted,
    StreamEndedEarly,
    Unauthenticated,
    UnexpectedOutput,
    Unimplemented,
)
from quire_client.inputs import Audio, Image, Question
from quire_client.requests.chat import ChatOptions
from quire_client.requests.generate import GenerateOptions, PromptEmbeddings
from quire_client.retry import RetryPolicy
from quire_client.sync import Client, GenerateStream, Session
from quire_client.types import (
    AbortResult,
    Answer,
    DecideResult,
    Delta,
    EmbedResult,
    FinishReason,
    GenerateResult,
    Message,
    ModelInfo,
    PartialSample,
    PausedSample,
    Sample,
    SchedulerStatus,
    ScoreResult,
    SessionInfo,
    SessionSample,
    Status,
    TensorChecksum,
    TokenizeResult,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
    Usage,
    WeightsStatus,
    WeightVersion,
    WeightVersionSpan,
    WorkerStatus,
)

__all__ = [
    "AbortResult", "AlreadyExists", "Answer", "AsyncClient", "AsyncGenerateStream", "AsyncSession", "Audio",
    "Cancelled", "ChatOptions", "Client", "ConnectionFailed", "DeadlineExceeded", "DecideResult", "Delta",
    "EmbedResult", "FieldViolation", "FinishReason", "GenerateOptions", "GenerateResult", "GenerateStream",
    "GenerationFailed", "Image", "InternalError", "InvalidRequest", "Message", "ModelInfo", "ModelNotFound",
    "NotConfigured", "Overloaded", "PartialSample", "PausedSample", "PermissionDenied", "PromptEmbeddings", "Question",
    "QuireError", "RequestNotFound", "RetryPolicy", "Sample", "SchedulerStatus", "ScoreResult", "Session",
    "SessionInfo", "SessionSample", "Status", "StreamCorrupted", "StreamEndedEarly", "TensorChecksum", "Tls",
    "TokenLogprob", "TokenizeResult", "ToolCall", "ToolCallDelta", "TopLogprob", "Unauthenticated", "UnexpectedOutput",
    "Unimplemented", "Usage", "WeightVersion", "WeightVersionSpan", "WeightsStatus", "WorkerStatus",
]  # fmt: skip
