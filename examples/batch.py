"""A file of requests in OpenAI's batch format, answered by `quire batch`. Run it again after Ctrl-C: it continues."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

source = Path(__file__).with_name("input.jsonl")
output = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="batch-")) / "output.jsonl"
subprocess.run(["quire", "batch", source, "-o", output], check=True)

answers = {line["custom_id"]: line["response"]["body"] for line in map(json.loads, output.open())}
for request in map(json.loads, source.open()):
    question = request["body"]["messages"][0]["content"]
    print(question, answers[request["custom_id"]]["choices"][0]["message"]["content"], sep="\n  ")
