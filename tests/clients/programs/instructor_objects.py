"""instructor: objects by JSON schema, whole and streamed, and an answer that is cut. Usage: ... URL MODEL"""

import sys
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel

url, model = sys.argv[1:]


class Entry(BaseModel):
    """An entry of a directory."""

    name: Literal["a.txt", "b"]
    is_directory: bool


MESSAGES = [{"role": "user", "content": "Name an entry."}]
with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as plain:
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
        client = instructor.from_openai(plain, mode=mode)
        options = {"model": model, "messages": MESSAGES, "temperature": 0, "max_retries": 0}
        schema = {"extra_body": {"structured_outputs": {"json": Entry.model_json_schema()}}}
        options |= schema if mode is instructor.Mode.JSON else {}
        entry = client.chat.completions.create(response_model=Entry, **options)
        assert entry.name in ("a.txt", "b"), entry
        parts = list(client.chat.completions.create_partial(response_model=Entry, **options))
        assert parts[-1].model_dump() == entry.model_dump()
        try:
            client.chat.completions.create(response_model=Entry, max_tokens=2, **options)
        except instructor.core.IncompleteOutputException:
            continue
        raise AssertionError("an answer that was cut is not recognised")
