"""Flags of quire-gateway."""

from __future__ import annotations

import argparse
from pathlib import Path

from gateway_svc.callers.flags import add_caller_flags
from gateway_svc.operators.operator_port import add_admin_flags
from gateway_svc.process.chat_flags import add_chat_flags
from gateway_svc.request.sandbox.image_preparer import ImageLimits
from gateway_svc.request.validation import DEFAULT_MAX_LOGPROBS
from request_fields.fields import MAX_LOGPROBS
from request_fields.inputs import MAX_INPUTS
from svc_common import config
from svc_common.channels import DEFAULT_MAX_BUNDLE
from svc_common.redis_server import add_flags as add_redis_flags
from svc_common.tracing import add_flags as add_trace_flags
from svc_common.tracing import add_ratio_flag
from svc_common.trust import add_flags

EPILOG = """example:
  quire-gateway --listen 0.0.0.0:50051 --scheduler llama-scheduler:50052 --scheduler qwen-scheduler:50052

Schedulers with the same model are replicas: a request runs on one of them, and moves to another if it is lost.
The gateway needs no model files: it gets each model's properties and tokenizer from the model's scheduler.
"""


def make_parser() -> argparse.ArgumentParser:
    """The flags of the gateway."""
    parser = config.make_parser("gateway", "The public gRPC and HTTP API of Quire, for any number of models.", EPILOG)
    parser.add_argument(
        "--listen", type=config.address, default="0.0.0.0:50051", metavar="HOST:PORT", help="address to listen on"
    )
    parser.add_argument(
        "--http-listen",
        type=config.address_or_off,
        default=config.OFF,
        metavar="HOST:PORT",
        help="address of the OpenAI-compatible HTTP API (docs/http.md), with the same API keys, tokens and TLS files",
    )
    parser.add_argument(
        "--http-max-connections",
        type=config.in_range(int, 1, 1_000_000),
        default=8192,
        help="limit of open HTTP connections; further connections get status 503 and are closed",
    )
    parser.add_argument(
        "--http-allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="origin whose web pages may call the HTTP API (CORS), such as https://chat.example.com, or * for all; "
        "repeat the flag for several (in the environment variable, separate them by commas). Unset: none",
    )
    parser.add_argument(
        "--scheduler",
        type=config.scheduler_address,
        action="append",
        required=True,
        metavar="HOST:PORT",
        help="address of a scheduler; repeat the flag for replicas and for other models (in the environment variable, "
        "separate addresses by commas); dns:///NAME:PORT: all addresses of NAME, looked up again every few seconds",
    )
    parser.add_argument(
        "--processes",
        type=config.in_range(int, 1, 256),
        default=1,
        metavar="N",
        help="number of gateway processes that share the port. The kernel spreads connections over them; limits apply "
        "to each process; the gateway is ready when all processes are. The second process adds 1 to the ports of "
        "--metrics-listen and --health-listen, and so on",
    )
    parser.add_argument(
        "--chunk-interval-ms",
        type=config.in_range(float, 0.0, 1000.0),
        default=0.0,
        metavar="MS",
        help="least time between two chunks of a stream. Tokens that arrive in between are sent in one chunk, which "
        "saves CPU here and in clients. 0: tokens are sent as they arrive, several in one chunk only when the gateway "
        "is busy",
    )
    add_chat_flags(parser)
    parser.add_argument(
        "--max-streams",
        type=config.in_range(int, 1, 1_000_000),
        default=4096,
        help="limit of open Generate streams; further ones are refused with RESOURCE_EXHAUSTED",
    )
    parser.add_argument(
        "--max-request-bytes",
        type=config.size_bytes,
        default="512M",
        metavar="SIZE",
        help="limit on the total size of open requests; further ones are refused with RESOURCE_EXHAUSTED",
    )
    images = parser.add_argument_group("images of requests (docs/images.md); they need the extra quire-server[images]")
    images.add_argument(
        "--max-images",
        type=config.in_range(int, 0, MAX_INPUTS),
        default=ImageLimits.max_images,
        help="limit of images in one request",
    )
    images.add_argument(
        "--max-image-bytes",
        type=config.size_bytes,
        default="10M",
        metavar="SIZE",
        help="limit on the size of one encoded image; a request has at most 16 MiB",
    )
    images.add_argument(
        "--max-image-pixels",
        type=config.in_range(int, 1, 1 << 28),
        default=ImageLimits.max_pixels,
        help="limit of width x height of one image, which is checked before the image is decoded",
    )
    parser.add_argument(
        "--max-tokenize-bytes",
        type=config.size_bytes,
        default="16M",
        metavar="SIZE",
        help="limit on the total size of tokenizer calls in progress; further ones are refused with "
        "RESOURCE_EXHAUSTED. These calls do not count in --max-streams and --max-request-bytes",
    )
    parser.add_argument(
        "--max-memory-bytes",
        type=config.size_bytes,
        metavar="SIZE",
        help="memory of a gateway process above which new requests are refused with RESOURCE_EXHAUSTED while others "
        "are open. Unset: 85 percent of the container's limit, divided by --processes; outside of a container no limit",
    )
    parser.add_argument(
        "--max-bundle-bytes",
        type=config.size_bytes,
        default=DEFAULT_MAX_BUNDLE,
        metavar="SIZE",
        help="limit on the size of a model's bundle (tokenizer and chat templates); a model with a larger one is not "
        "served",
    )
    add_redis_flags(
        parser,
        "the gateway prefers replicas that have the prompt's prefix cached, keeps records of resumable requests, and "
        "counts the limits of owners for all gateways together",
    )
    records = parser.add_argument_group("records of resumable requests and stored answers, in Redis (docs/resume.md)")
    records.add_argument(
        "--record-ttl-s",
        type=config.in_range(float, 1.0, 30 * 86_400.0),
        default=3600.0,
        help="a record is deleted this long after its last write",
    )
    records.add_argument(
        "--max-record-bytes",
        type=config.size_bytes,
        default="4M",
        metavar="SIZE",
        help="limit on the size of one record. A larger request is refused if it needs a record; output above the "
        "limit is not stored and is computed again when it is needed",
    )
    records.add_argument(
        "--record-key-file",
        type=Path,
        metavar="FILE",
        help="encrypt records with AES-256-GCM: a key of 32 bytes in base64 per line. The first key encrypts, all keys "
        "decrypt. Unset: records are not encrypted",
    )
    parser.add_argument(
        "--max-connections",
        type=config.in_range(int, 1, 1_000_000),
        default=8192,
        help="limit of open gRPC connections; further connections are closed",
    )
    parser.add_argument(
        "--max-connection-age-s",
        type=config.in_range(float, 0.0, 86_400.0),
        default=0.0,
        help="age at which a connection is closed, plus or minus 10 percent, so that clients also connect to new "
        "gateways. Open streams finish on the old connection. 0: never",
    )
    add_caller_flags(parser)
    parser.add_argument(
        "--audit-log",
        metavar="FILE",
        help="append a JSON line per request, with its caller, tokens and result, but no text (docs/keys.md). The file "
        "is opened again after a rotation, and several gateways of a machine may share it. -: stdout. Unset: none",
    )
    parser.add_argument(
        "--max-logprobs",
        type=config.in_range(int, 0, MAX_LOGPROBS),
        default=DEFAULT_MAX_LOGPROBS,
        metavar="K",
        help="highest output.logprobs and output.prompt_logprobs that a request may have",
    )
    tls = parser.add_argument_group("TLS for --listen; files are read again when they change")
    tls.add_argument("--tls-cert-file", type=Path, metavar="FILE", help="certificate chain (PEM); unset: plaintext")
    tls.add_argument(
        "--tls-key-file", type=Path, metavar="FILE", help="private key of the certificate (PEM, without a password)"
    )
    tls.add_argument(
        "--tls-client-ca-file",
        type=Path,
        metavar="FILE",
        help="CA certificates (PEM); clients need a certificate signed by one of them. Unset: clients need none",
    )
    add_admin_flags(parser)
    add_flags(parser)
    add_ratio_flag(add_trace_flags(parser))
    parser.add_argument(
        "--scheduler-patience-s",
        type=config.in_range(float, 0.0, 3600.0),
        default=30.0,
        help="how long an open generation waits for a scheduler before it ends with UNAVAILABLE",
    )
    parser.add_argument(
        "--drain-timeout-s",
        type=config.in_range(float, 0.0, 3600.0),
        default=30.0,
        help="time for open generations to finish after SIGTERM; then they end with UNAVAILABLE, and clients resume "
        "them through another gateway",
    )
    return parser
