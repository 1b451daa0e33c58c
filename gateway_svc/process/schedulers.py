"""The gateway's side of the schedulers: one client each, the models that they serve, and where requests go."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable

from gateway_svc.process.chat_flags import chat_templates, parser_names
from gateway_svc.request.models import BundleCache
from gateway_svc.schedulers.directory import ModelDirectory, SchedulerClients
from gateway_svc.schedulers.dispatcher import Dispatcher
from gateway_svc.schedulers.scheduler_client import SchedulerClient
from svc_common.scheduler_names import SchedulerNames
from svc_common.security.trust import make_trust


class Schedulers:
    """Owns the clients of all schedulers. Raises SettingError."""

    def __init__(self, args: argparse.Namespace, gateway_id: str, on_change: Callable[[], None]) -> None:
        bundles, parsers = BundleCache(chat_templates(args)), parser_names(args)
        open_channel = make_trust(args, "gateway").channels_to("scheduler")
        self._clients = SchedulerClients(
            lambda address: SchedulerClient(
                address,
                gateway_id=gateway_id,
                bundles=bundles,
                parsers=parsers,
                deltas_interval_s=args.chunk_interval_ms / 1000,
                open_channel=open_channel,
                max_bundle_bytes=args.max_bundle_bytes,
            )
        )
        self.dispatcher = Dispatcher(self._clients.all, patience_s=args.scheduler_patience_s, on_change=on_change)
        self._clients.events = self.dispatcher
        self.directory = ModelDirectory(self._clients.all)
        self._names = SchedulerNames(args.scheduler, self._clients.update)

    def start(self) -> list[asyncio.Task[None]]:
        """Look up the schedulers and connect to them. The caller cancels the tasks."""
        self._names.start()
        return [asyncio.create_task(run) for run in (self._clients.run(), self._names.run())]
