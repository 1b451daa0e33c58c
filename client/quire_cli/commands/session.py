"""`quire session list`, `quire session show`, `quire session rm`."""

from __future__ import annotations

import argparse

from quire_client.types import SessionInfo

from quire_cli.connection import connect
from quire_cli.output import table, to_json


def list_all(args: argparse.Namespace) -> int:
    with connect(args) as client:
        found = client.list_sessions()
    if args.json:
        print(to_json({"sessions": [{"session_id": one.session_id, **_ends(one)} for one in found]}))
    elif found:
        rows = ((one.session_id, f"{one.expires_in_s:.0f} s", _pin(one.pinned_for_s)) for one in found)
        print(table(("session", "expires in", "pinned for"), rows))
    else:
        print("there are no sessions; `client.session()` of the SDK makes one (docs/sessions.md)")
    return 0


def show(args: argparse.Namespace) -> int:
    with connect(args) as client:
        info = client.session(args.id).info()
    if args.json:
        print(to_json(info))
        return 0
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
    for name, value in lines.items():
        print(f"{name:<11} {value}")
    return 0


def remove(args: argparse.Namespace) -> int:
    with connect(args) as client:
        for session_id in args.ids:
            client.session(session_id).delete()
    print(to_json({"deleted": args.ids}) if args.json else f"deleted {', '.join(args.ids)}")
    return 0


def _ends(one: SessionInfo) -> dict[str, float]:
    return {"expires_in_s": round(one.expires_in_s, 1), "pinned_for_s": round(one.pinned_for_s, 1)}


def _pin(pinned_for_s: float) -> str:
    return f"{pinned_for_s:.0f} s" if pinned_for_s else "-"
