"""Flags of files and batches."""

from __future__ import annotations

import argparse

from gateway_svc.batches.batches import Batches, BatchLimits
from gateway_svc.batches.folder_shelf import FolderShelf
from gateway_svc.batches.redis_shelf import RedisShelf
from gateway_svc.batches.store import BatchStore
from gateway_svc.records.cipher import make_cipher
from svc_common.config import OFF, Flag, FlagGroup, in_range, path, size_bytes
from svc_common.redis.server import RedisServer

BATCH_FLAGS = FlagGroup("files and batches of --http-listen, in Redis or in a folder (docs/batches.md)", (
    Flag("--batch-dir", path,
        "without --redis: folder of the files and batches, which the gateways of one machine may share. Unset: none",
        metavar="DIR",
    ),
    Flag("--batch-concurrency", in_range(int, 0, 100_000),
        "lines of batches that this gateway has open at the same time. 0: other gateways answer them", default=64,
    ),
    Flag("--batch-max-lines", in_range(int, 1, 1_000_000), "limit of the requests in one batch", default=50_000),
    Flag("--batch-max-bytes", size_bytes,
        "limit on the size of all files of one owner; with its results, an owner may exceed it", default="1G",
    ),
    Flag("--batch-max-files", in_range(int, 1, 100_000), "limit of the files, and of the batches, of one owner",
        default=1000,
    ),
    Flag("--batch-ttl-s", in_range(float, 60.0, 365 * 86_400.0),
        "a file is deleted this long after its upload, and a batch with its results this long after its "
        "completion_window, which is at most as long", default=7 * 86_400.0,
    ),
))  # fmt: skip


def make_batches(args: argparse.Namespace, redis: RedisServer | None) -> Batches:
    """Files and batches of this deployment. Raises SettingError."""
    limits = BatchLimits(args.batch_max_lines, args.batch_max_bytes, args.batch_max_files, args.batch_ttl_s)
    if args.http_listen == OFF or (redis is None and args.batch_dir is None):
        return Batches(None, limits)
    shelf = RedisShelf(redis, namespace=args.redis_namespace) if redis else FolderShelf(args.batch_dir)
    return Batches(BatchStore(shelf, make_cipher(args.record_key_file)), limits)
