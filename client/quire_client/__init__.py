"""The Quire SDK and command.

from quire_client import Client

with Client.connect("localhost:50051") as client:
    print(client.chat("What does os.path.join do?").text)
"""

from quire_client.aio import AsyncClient, AsyncGenerateStream
from quire_client.chat_requests import ChatOptions
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
    Unimplemented,
)
from quire_client.requests import GenerateOptions
from quire_client.retry import RetryPolicy
from quire_client.sync import Client, GenerateStream
from quire_client.tls import Tls
from quire_client.types import (
    AbortResult,
    Delta,
    FinishReason,
    GenerateResult,
    Message,
    ModelInfo,
    Sample,
    SchedulerStatus,
    Status,
    TokenizeResult,
    ToolCall,
    ToolCallDelta,
    Usage,
    WorkerStatus,
)

__all__ = [
    "AbortResult",
    "AlreadyExists",
    "AsyncClient",
    "AsyncGenerateStream",
    "Cancelled",
    "ChatOptions",
    "Client",
    "ConnectionFailed",
    "DeadlineExceeded",
    "Delta",
    "FieldViolation",
    "FinishReason",
    "GenerateOptions",
    "GenerateResult",
    "GenerateStream",
    "GenerationFailed",
    "InternalError",
    "InvalidRequest",
    "Message",
    "ModelInfo",
    "ModelNotFound",
    "NotConfigured",
    "Overloaded",
    "PermissionDenied",
    "QuireError",
    "RequestNotFound",
    "RetryPolicy",
    "Sample",
    "SchedulerStatus",
    "Status",
    "StreamCorrupted",
    "StreamEndedEarly",
    "Tls",
    "TokenizeResult",
    "ToolCall",
    "ToolCallDelta",
    "Unauthenticated",
    "Unimplemented",
    "Usage",
    "WorkerStatus",
]
