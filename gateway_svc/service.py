"""The gateway process: start, health, drain."""

from __future__ import annotations

import argparse
import asyncio
import logging
import secrets
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack

from gateway_svc.answer.open_streams import OpenStreams
from gateway_svc.answer.receipts import ReceiptSigner
from gateway_svc.answer.request_traces import GenerationTraces
from gateway_svc.batches.batches import make_batches
from gateway_svc.callers.authenticator import identifies_callers, isolates_tenants, min_priority
from gateway_svc.flags import make_parser
from gateway_svc.limits.buckets import LimitsError, LimitsFile, LocalBuckets, RedisBuckets
from gateway_svc.limits.key_limits import KeyLimits
from gateway_svc.operators.operator_port import is_public_for_operators
from gateway_svc.pipeline.admission import CallAdmission
from gateway_svc.process.ports import Ports
from gateway_svc.process.schedulers import Schedulers
from gateway_svc.records.cipher import make_cipher
from gateway_svc.records.fields import MemoryFields, RecordLimits
from gateway_svc.records.recorder import OutputRecorder
from gateway_svc.records.redis_fields import RedisFields
from gateway_svc.records.store import RecordStore
from gateway_svc.request.prompts.readers import PromptReaders
from gateway_svc.request.sandbox.audio_decoder import AudioDecoder
from gateway_svc.request.sandbox.grammar_checker import GrammarChecker
from gateway_svc.request.sandbox.image_preparer import ImageLimits, ImagePreparer
from gateway_svc.request.sandbox.template_renderer import TemplateRenderer
from gateway_svc.request.threads import Threads
from gateway_svc.request.validation import LOGPROBS_MODES, RequestLimits
from gateway_svc.schedulers.routes import FileTable, ModelRoutes, RedisTable, RoutesError
from gateway_svc.servicer import InferenceServicer, make_servicer
from prefix_index.reader import RedisPrefixReader
from svc_common import config
from svc_common.observe.logs import setup_logging
from svc_common.observe.tracing import make_tracer
from svc_common.redis.server import RedisServer, redis_server
from svc_common.serve import BindError, run_service, settle_gc
from svc_common.tasks import cancel

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `quire-gateway`."""
    args = config.parse(make_parser(), sys.argv[1:] if argv is None else argv)
    gateway_id = f"gateway-{secrets.token_hex(4)}"
    setup_logging("gateway", args.log_format, args.log_level, instance=gateway_id)

    async def run() -> None:
        await GatewayProcess(args, gateway_id).run()

    try:
        run_service(run())
    except (config.SettingError, BindError) as error:
        sys.exit(f"quire-gateway: {error}")


class GatewayProcess:
    """Everything of one gateway process. Raises SettingError."""

    def __init__(self, args: argparse.Namespace, gateway_id: str) -> None:
        self._args = args
        self._gateway_id = gateway_id
        self._changed = asyncio.Event()
        self._state = SharedState(args)
        self._ports = Ports(args, gateway_id, self._state.limits)
        self._tracer = make_tracer(args, "gateway", gateway_id)
        self._schedulers = Schedulers(args, gateway_id, self._changed.set, self._state.routes)
        self._templates = TemplateRenderer()
        self._audio = AudioDecoder()
        self._images = ImagePreparer(ImageLimits(args.max_images, args.max_image_bytes, args.max_image_pixels))
        self._threads = Threads(args.max_tokenize_bytes)
        self._grammars = GrammarChecker()
        servicer = self._make_servicer()
        self._streams = servicer.generation.streams
        self._ports.serve(servicer, self._schedulers, self._threads.requests, self._state.reader, self._state.batches)

    def _make_servicer(self) -> InferenceServicer:
        args, directory = self._args, self._schedulers.directory
        signer = None if args.receipt_key_file is None else ReceiptSigner(args.receipt_key_file)
        return make_servicer(
            directory,
            self._schedulers.dispatcher,
            PromptReaders(self._threads, self._templates, self._images, self._audio),
            self._grammars,
            OpenStreams(args.max_streams, args.max_request_bytes),
            admission=CallAdmission(
                directory,
                requests=RequestLimits(
                    min_priority(args), args.max_logprobs, LOGPROBS_MODES[args.logprobs_mode], signer is not None
                ),
                keys=self._state.limits,
                isolates_tenants=isolates_tenants(args),
            ),
            reader=self._state.reader,
            chunk_interval_s=args.chunk_interval_ms / 1000,
            recorder=self._state.recorder,
            traces=None if self._tracer is None else GenerationTraces(self._tracer, args.trace_ratio),
            shows_workers=is_public_for_operators(args),
            signer=signer,
        )

    async def run(self) -> None:
        """Run until SIGTERM or SIGINT. Raises BindError. What starts first ends last."""
        async with AsyncExitStack() as closing:
            tasks = await self._start(closing)
            await self._ports.start(closing)
            closing.callback(self._streams.end_all)  # streams are still open here only after a second signal
            settle_gc()
            schedulers = ", ".join(dict.fromkeys(self._args.scheduler))
            log.info("%s listens on %s; schedulers: %s", self._gateway_id, self._ports, schedulers)
            self._changed.set()
            tasks.append(asyncio.create_task(self._keep_health()))
            await self._ports.server.run_until_stopped(self._drain)

    async def _start(self, closing: AsyncExitStack) -> list[asyncio.Task[None]]:
        """Start what requests need. Returns tasks that end before it."""
        if self._tracer is not None:
            closing.push_async_callback(self._tracer.close)
        await self._ports.start_admin(closing)
        for helper in (self._images, self._audio, self._templates, self._grammars):
            closing.push_async_callback(helper.close)
        closing.callback(self._threads.close)
        self._templates.start()
        self._state.start(closing)
        tasks = self._schedulers.start()

        async def cancel_tasks() -> None:
            await cancel(*tasks)

        closing.push_async_callback(cancel_tasks)
        closing.callback(self._schedulers.dispatcher.close)
        return tasks

    async def _keep_health(self) -> None:
        """Report SERVING while at least one model can take requests."""
        server = self._ports.server
        while True:
            await self._changed.wait()
            self._changed.clear()
            is_ready = self._schedulers.directory.is_ready and not server.stopping.is_set()
            if is_ready != server.is_serving:
                log.info("serving" if is_ready else "not serving: no model is ready")
                server.set_serving(is_ready)

    async def _drain(self) -> None:
        await self._ports.stop_batches()
        await self._streams.drain(self._args.drain_timeout_s)


class SharedState:
    """What the gateways of a deployment share in Redis, or one gateway has in memory: the reader of the prefix index,
    None without --redis, routes, the recorder, None without records, and owners' limits. Raises SettingError.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        redis = redis_server(args)
        self.reader = None if redis is None else RedisPrefixReader(redis, namespace=args.redis_namespace)
        self.routes = _make_routes(args, redis)
        self.limits = _make_limits(args, redis)
        self.recorder = _make_recorder(args, redis, self.limits)
        self.batches = make_batches(args, redis)

    def start(self, closing: AsyncExitStack) -> None:
        """Connect, and close with `closing`."""
        closing.push_async_callback(self.batches.close)
        for part in (self.reader, self.routes, self.recorder, self.limits):
            if part is not None:
                closing.push_async_callback(part.close)
                part.start()


def _make_routes(args: argparse.Namespace, redis: RedisServer | None) -> ModelRoutes:
    table = None if redis is None else RedisTable(redis, args.redis_namespace)
    try:
        return ModelRoutes(table if args.routes is None else FileTable(args.routes))
    except (RoutesError, OSError) as error:
        raise RoutesError(f"--routes {args.routes}: {error}") from None


def _make_recorder(args: argparse.Namespace, redis: RedisServer | None, key_limits: KeyLimits) -> OutputRecorder | None:
    bounds = {"ttl_s": args.record_ttl_s, "max_bytes": args.max_record_bytes}
    if redis is None and not args.record_memory:
        return None
    memory = args.record_memory
    fields = RedisFields(redis, namespace=args.redis_namespace, **bounds) if redis else MemoryFields(memory, **bounds)

    def limits(owner: str) -> RecordLimits:
        own = key_limits.of(owner)
        return RecordLimits(own.record_bytes, own.max_records)

    return OutputRecorder(RecordStore(fields, cipher=make_cipher(args.record_key_file), limits=limits))


def _make_limits(args: argparse.Namespace, redis: RedisServer | None) -> KeyLimits:
    if args.key_limits is None:
        return KeyLimits()
    if not identifies_callers(args):
        raise LimitsError("--key-limits needs --api-keys or --jwt-issuer: limits apply to owners of requests")
    file = LimitsFile(args.key_limits)
    buckets = LocalBuckets() if redis is None else RedisBuckets(redis, namespace=args.redis_namespace)
    return KeyLimits(file, buckets)


if __name__ == "__main__":
    main()
