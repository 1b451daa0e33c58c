"""An MCP server on stdin and stdout with one tool, `forecast`, for agents under test."""

from __future__ import annotations

import json
import sys
from typing import Any

TOOL = {
    "name": "forecast",
    "description": "Tells the weather of a city.",
    "inputSchema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def result_of(method: str, params: dict[str, Any]) -> dict[str, Any]:
    if method == "initialize":
        info = {"name": "weather", "version": "1"}
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        return {"content": [{"type": "text", "text": f"sunny in {params['arguments']['city']}"}]}
    return {}


for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        found = result_of(message["method"], message.get("params", {}))
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": found}), flush=True)
