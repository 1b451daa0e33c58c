"""What the gateways of a deployment share in Redis, or one gateway has in memory: prefixes, records, counted limits."""

from __future__ import annotations

import argparse
from contextlib import AsyncExitStack

from gateway_svc.callers.flags import identifies_callers
from gateway_svc.limits.buckets import LocalBuckets, RedisBuckets
from gateway_svc.limits.key_limits import KeyLimits
from gateway_svc.limits.settings import LimitsError, LimitsFile
from gateway_svc.records.cipher import make_cipher
from gateway_svc.records.memory_fields import MemoryFields
from gateway_svc.records.recorder import OutputRecorder
from gateway_svc.records.redis_fields import RedisFields
from gateway_svc.records.store import RecordStore
from prefix_index.reader import RedisPrefixReader
from svc_common.config import SettingError
from svc_common.redis.server import RedisServer, redis_server


class SharedState:
    """The reader of the prefix index, None without --redis, the recorder, None without records, and owners' limits.

    Raises SettingError.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        redis = redis_server(args)
        self.reader = None if redis is None else RedisPrefixReader(redis, namespace=args.redis_namespace)
        self.recorder = _make_recorder(args, redis)
        self.limits = _make_limits(args, redis)

    def start(self, closing: AsyncExitStack) -> None:
        """Connect, and close with `closing`."""
        for part in (self.reader, self.recorder, self.limits):
            if part is not None:
                closing.push_async_callback(part.close)
                part.start()


def _make_recorder(args: argparse.Namespace, redis: RedisServer | None) -> OutputRecorder | None:
    cipher = make_cipher(args.record_key_file)
    limits = {"ttl_s": args.record_ttl_s, "max_bytes": args.max_record_bytes}
    if redis is not None:
        return OutputRecorder(RecordStore(RedisFields(redis, namespace=args.redis_namespace, **limits), cipher=cipher))
    if not args.record_memory:
        return None
    if args.processes > 1:
        raise SettingError(
            f"--record-memory needs --processes 1 or --redis: {args.processes} processes share no memory"
        )
    return OutputRecorder(RecordStore(MemoryFields(args.record_memory, **limits), cipher=cipher))


def _make_limits(args: argparse.Namespace, redis: RedisServer | None) -> KeyLimits:
    if args.key_limits is None:
        return KeyLimits()
    if not identifies_callers(args):
        raise LimitsError("--key-limits needs --api-keys or --jwt-issuer: limits apply to owners of requests")
    file = LimitsFile(args.key_limits)
    buckets = LocalBuckets() if redis is None else RedisBuckets(redis, namespace=args.redis_namespace)
    return KeyLimits(file, buckets)
