"""A file of requests in OpenAI's batch format, answered by `quire batch`. Run it again after Ctrl-C: it continues."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

QUESTIONS = ["What does len do?", "What does zip do?", "What does json.dumps do?", "Who are you?"]

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="batch-"))
source, output = folder / "input.jsonl", folder / "output.jsonl"
with source.open("w") as file:
    for i, question in enumerate(QUESTIONS):
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0}
        line = {"custom_id": f"question-{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        file.write(json.dumps(line) + "\n")

subprocess.run(["quire", "batch", source, "-o", output], check=True)

answers = {line["custom_id"]: line["response"]["body"] for line in map(json.loads, output.open())}
for i, question in enumerate(QUESTIONS):
    print(question, answers[f"question-{i}"]["choices"][0]["message"]["content"], sep="\n  ")
