"""instructor: objects by JSON schema and by tools, whole and streamed, and a cut answer. Usage: ... URL MODEL"""

import sys
from typing import Literal

import instructor
from instructor.core.exceptions import IncompleteOutputException
from openai import OpenAI
from pydantic import BaseModel

url, model = sys.argv[1:]


class Entry(BaseModel):
    """An entry of a directory."""

    name: Literal["a.txt", "b"]
    is_directory: bool


MESSAGES = [{"role": "user", "content": "Name an entry."}]
with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as plain:
    client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
    options = {"model": model, "messages": MESSAGES, "temperature": 0, "max_retries": 0, "response_model": Entry}
    entry = client.chat.completions.create(**options)
    assert entry.name in ("a.txt", "b"), entry
    parts = list(client.chat.completions.create_partial(**options))
    assert parts[-1].model_dump() == entry.model_dump()
    for mode in (instructor.Mode.TOOLS_STRICT, instructor.Mode.RESPONSES_TOOLS):
        called = instructor.from_openai(plain, mode=mode).chat.completions.create(**options)
        assert called.name in ("a.txt", "b"), called
    try:
        client.chat.completions.create(max_tokens=2, **options)
    except IncompleteOutputException:
        pass
    else:
        raise AssertionError("an answer that was cut is not recognised")
