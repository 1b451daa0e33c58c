"""`quire adapter`, `quire route`, `quire session`: what gateways serve besides models."""

from __future__ import annotations

import argparse
from operator import itemgetter

from quire_client.types import SessionInfo

from quire_cli.connection import connect
from quire_cli.output import count, show, table

SHORT_DIGEST = 12


def load_adapter(args: argparse.Namespace) -> int:
    with connect(args) as client:
        adapter = client.load_adapter(args.name, args.path, model=args.model)
    words = f"{adapter.name} is loaded on {count(adapter.num_workers, 'worker')}, digest {adapter.digest}"
    return show(args, adapter, words)


def unload_adapter(args: argparse.Namespace) -> int:
    with connect(args) as client:
        client.unload_adapter(args.name, model=args.model)
    return show(args, {"unloaded": args.name}, f"{args.name} is unloaded")


def list_adapters(args: argparse.Namespace) -> int:
    with connect(args) as client:
        found = client.adapters(model=args.model)
    headers = ("adapter", "model", "workers", "resident", "digest", "path")
    rows = ((a.name, a.model, a.num_workers, a.num_resident, a.digest[:SHORT_DIGEST], a.path) for a in found)
    none = "no adapter is loaded; `quire adapter load NAME PATH` loads one"
    return show(args, {"adapters": found}, table(headers, rows) if found else none)


def set_route(args: argparse.Namespace) -> int:
    return _set_route(args, dict(args.targets) or {args.name: 1}, args.shadow)


def remove_route(args: argparse.Namespace) -> int:
    return _set_route(args, {}, "")


def _set_route(args: argparse.Namespace, targets: dict[str, int], shadow: str) -> int:
    with connect(args) as client:
        client.set_route(args.name, targets, shadow=shadow)
    words = f"stands for {' and '.join(targets)}" if targets else "is no route any more"
    return show(args, {"name": args.name, "targets": targets, "shadow": shadow}, f"{args.name} {words}")


def list_routes(args: argparse.Namespace) -> int:
    with connect(args) as client:
        found = client.routes()
    rows = ((route.name, *pair) for route in found for pair in route.targets.items())
    shadows = ((route.name, route.shadow, "shadow") for route in found if route.shadow)
    text = table(("name", "target", "weight"), sorted((*rows, *shadows), key=itemgetter(0)))
    return show(args, {"routes": found}, text)


def list_sessions(args: argparse.Namespace) -> int:
    with connect(args) as client:
        found = client.list_sessions()
    rows = ((one.session_id, f"{one.expires_in_s:.0f} s", _pin(one.pinned_for_s)) for one in found)
    none = "there are no sessions; `client.session()` of the SDK makes one (docs/sessions.md)"
    text = table(("session", "expires in", "pinned for"), rows) if found else none
    return show(args, {"sessions": [{"session_id": one.session_id, **_ends(one)} for one in found]}, text)


def show_session(args: argparse.Namespace) -> int:
    with connect(args) as client:
        info = client.session(args.id).info()
    outputs = ", ".join(f"{one.num_tokens} tokens{'' if one.is_finished else ' so far'}" for one in info.samples)
    lines = {
        "session": info.session_id,
        "model": f"{info.model} {info.adapter}".strip(),
        "prompt": f"{info.prompt_tokens} tokens",
        "output": outputs + (", running" if info.is_running else ""),
        "made from": info.base_id or "-",
        "expires in": f"{info.expires_in_s:.0f} s",
        "pinned for": _pin(info.pinned_for_s),
    }
    return show(args, info, "\n".join(f"{name:<11} {value}" for name, value in lines.items()))


def remove_sessions(args: argparse.Namespace) -> int:
    with connect(args) as client:
        for session_id in args.ids:
            client.session(session_id).delete()
    return show(args, {"deleted": args.ids}, f"deleted {', '.join(args.ids)}")


def _ends(one: SessionInfo) -> dict[str, float]:
    return {"expires_in_s": round(one.expires_in_s, 1), "pinned_for_s": round(one.pinned_for_s, 1)}


def _pin(pinned_for_s: float) -> str:
    return f"{pinned_for_s:.0f} s" if pinned_for_s else "-"
