"""Flags of quire-gateway."""

from __future__ import annotations

import argparse

from gateway_svc.batches.batches import BATCH_FLAGS
from gateway_svc.callers.authenticator import CALLER_FLAGS
from gateway_svc.foreign.services import COMPAT_FLAG
from gateway_svc.operators.operator_port import ADMIN_FLAGS
from gateway_svc.process.schedulers import CHAT_FLAGS
from gateway_svc.request.public_prefixes import PUBLIC_PREFIX_FLAG
from gateway_svc.request.sandbox.image_preparer import ImageLimits
from gateway_svc.request.validation import DEFAULT_MAX_LOGPROBS
from request_fields.fields import MAX_LOGPROBS
from request_fields.sizes import MAX_INPUTS
from svc_common import config
from svc_common.channels import DEFAULT_MAX_BUNDLE
from svc_common.config import (
    OFF,
    Flag,
    FlagGroup,
    address,
    address_or_off,
    in_range,
    one_of,
    path,
    scheduler_address,
    size_bytes,
    text,
)
from svc_common.memory import MEMORY_FLAG
from svc_common.observe.tracing import TRACE_FLAGS_OF_GATEWAY
from svc_common.redis.server import redis_flags
from svc_common.security.trust import TRUST_FLAGS

DESCRIPTION = "The public gRPC and HTTP API of Quire, for any number of models."
EPILOG = """example:
  quire-gateway --listen 0.0.0.0:50051 --scheduler llama-scheduler:50052 --scheduler qwen-scheduler:50052

Schedulers with the same model are replicas: a request runs on one of them, and moves to another if it is lost.
The gateway needs no model files: it gets each model's properties and tokenizer from the model's scheduler.
"""

FLAGS = (
    Flag("--listen", address, "address to listen on", default="0.0.0.0:50051"),
    Flag("--http-listen", address_or_off,
        "address of the OpenAI-compatible HTTP API (docs/http.md), with the same API keys, tokens and TLS files",
        default=OFF,
    ),
    Flag("--http-max-connections", in_range(int, 1, 1_000_000),
        "limit of open HTTP connections; further connections get status 503 and are closed", default=8192,
    ),
    Flag("--http-allow-origin", text,
        "origin whose web pages may call the HTTP API (CORS), such as https://chat.example.com, or * for all; "
        "repeat the flag for several (in the environment variable, separate them by commas). Unset: none",
        metavar="ORIGIN", is_list=True,
    ),
    Flag("--http-allow-host", text,
        "name under which clients without keys reach the HTTP API and the console: llm.example.com, *.example.com, or "
        "* for all; repeat the flag for several. IP addresses, localhost, names without a dot and names of Kubernetes "
        "services (.svc) need no permission; another name could belong to a web page that misuses its reader's browser",
        metavar="NAME", is_list=True,
    ),
    COMPAT_FLAG,
    Flag("--scheduler", scheduler_address,
        "address of a scheduler; repeat the flag for replicas and for other models (in the environment "
        "variable, separate addresses by commas); dns:///NAME:PORT: all addresses of NAME, looked up again "
        "every few seconds", is_list=True, is_required=True,
    ),
    Flag("--chunk-interval-ms", in_range(float, 0.0, 1000.0),
        "least time between two chunks of a stream. Tokens that arrive in between are sent in one chunk, which "
        "saves CPU here and in clients. 0: tokens are sent as they arrive, several in one chunk only when the "
        "gateway is busy", default=0.0,
    ),
    CHAT_FLAGS,
    Flag("--max-streams", in_range(int, 1, 1_000_000),
        "limit of open Generate streams; further ones are refused with RESOURCE_EXHAUSTED", default=4096,
    ),
    Flag("--max-request-bytes", size_bytes,
        "limit on the total size of open requests; further ones are refused with RESOURCE_EXHAUSTED", default="512M",
    ),
    FlagGroup("images of requests (docs/images.md); they need the extra quire-server[images]", (
        Flag("--max-images", in_range(int, 0, MAX_INPUTS),
            "limit of images in one request", default=ImageLimits.max_images,
        ),
        Flag("--max-image-bytes", size_bytes,
            "limit on the size of one encoded image; a request has at most 16 MiB", default="10M",
        ),
        Flag("--max-image-pixels", in_range(int, 1, 1 << 28),
            "limit of width x height of one image, which is checked before the image is decoded",
            default=ImageLimits.max_pixels,
        ),
    )),
    Flag("--max-tokenize-bytes", size_bytes,
        "limit on the total size of tokenizer calls in progress; further ones are refused with "
        "RESOURCE_EXHAUSTED. These calls do not count in --max-streams and --max-request-bytes", default="16M",
    ),
    MEMORY_FLAG,
    Flag("--max-bundle-bytes", size_bytes,
        "limit on the size of a model's bundle (tokenizer and chat templates); a model with a larger one is not "
        "served", default=DEFAULT_MAX_BUNDLE,
    ),
    redis_flags(
        "the gateway prefers replicas that have the prompt's prefix cached, keeps records of resumable requests, and "
        "counts the limits of owners for all gateways together",
    ),
    Flag("--routes", path,
        "file with the routes of model names (docs/upgrade.md), which are otherwise in Redis; read again when it "
        "changes, and written by `quire route`",
    ),
    FlagGroup("records of resumable requests and stored answers, in Redis (docs/resume.md)", (
        Flag("--record-memory", size_bytes,
            "without --redis: keep records in this much memory of the gateway, for a single gateway process; those "
            "written longest ago make room. 0: keep none", default=0,
        ),
        Flag("--record-ttl-s", in_range(float, 1.0, 30 * 86_400.0),
            "a record is deleted this long after its last write", default=3600.0,
        ),
        Flag("--max-record-bytes", size_bytes,
            "limit on the size of one record. A larger request is refused if it needs a record; output above the "
            "limit is not stored and is computed again when it is needed", default="4M",
        ),
        Flag("--record-key-file", path,
            "encrypt records with AES-256-GCM: a key of 32 bytes in base64 per line. The first key encrypts, all "
            "keys decrypt. Unset: records are not encrypted",
        ),
    )),
    BATCH_FLAGS,
    Flag("--max-connections", in_range(int, 1, 1_000_000),
        "limit of open gRPC connections; further connections are closed", default=8192,
    ),
    Flag("--max-connection-age-s", in_range(float, 0.0, 86_400.0),
        "age at which a connection is closed, plus or minus 10 percent, so that clients also connect to new "
        "gateways. Open streams finish on the old connection. 0: never", default=0.0,
    ),
    CALLER_FLAGS,
    PUBLIC_PREFIX_FLAG,
    Flag("--audit-log", text,
        "append a JSON line per request, with its caller, tokens and result, but no text (docs/keys.md). The "
        "file is opened again after a rotation, and several gateways of a machine may share it. -: stdout. "
        "Unset: none", metavar="FILE",
    ),
    Flag("--max-logprobs", in_range(int, 0, MAX_LOGPROBS),
        "highest output.logprobs and output.prompt_logprobs that a request may have",
        default=DEFAULT_MAX_LOGPROBS, metavar="K",
    ),
    Flag("--logprobs-mode", one_of("raw", "processed"),
        "sampling.logprobs_mode of requests that do not set it: the distribution whose log probabilities they get",
        default="raw",
    ),
    Flag("--receipt-key-file", path,
        "Ed25519 private key (PEM) that signs receipts; read again when it changes (docs/receipts.md). Unset: requests "
        "with `receipt` are refused",
    ),
    FlagGroup("TLS for --listen; files are read again when they change", (
        Flag("--tls-cert-file", path, "certificate chain (PEM); unset: plaintext"),
        Flag("--tls-key-file", path, "private key of the certificate (PEM, without a password)"),
        Flag("--tls-client-ca-file", path,
            "CA certificates (PEM); clients need a certificate signed by one of them. Unset: clients need none",
        ),
    )),
    ADMIN_FLAGS,
    TRUST_FLAGS,
    TRACE_FLAGS_OF_GATEWAY,
    Flag("--scheduler-patience-s", in_range(float, 0.0, 3600.0),
        "how long a request, new or open, waits for a scheduler of its model before it ends with UNAVAILABLE",
        default=30.0,
    ),
    Flag("--drain-timeout-s", in_range(float, 0.0, 3600.0),
        "time for open generations to finish after SIGTERM; then they end with UNAVAILABLE, and clients resume "
        "them through another gateway", default=30.0,
    ),
)  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    """All flags of the gateway."""
    return config.make_parser("gateway", DESCRIPTION, EPILOG, FLAGS)
