"""LiteLLM with its provider for vLLM: whole and streamed answers, usage, mapped errors. Usage: ... URL MODEL"""

import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # do not download prices
import litellm

url, model = sys.argv[1:]
own = {"model": f"hosted_vllm/{model}", "api_base": f"{url}/v1", "api_key": "none", "num_retries": 0}
own["messages"] = [{"role": "user", "content": "What does os.path.join do?"}]

answer = litellm.completion(**own, temperature=0)
assert answer.choices[0].finish_reason == "stop", answer
chunks = list(litellm.completion(**own, temperature=0, stream=True, stream_options={"include_usage": True}))
assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == answer.choices[0].message.content
assert [c.usage.completion_tokens for c in chunks if getattr(c, "usage", None)] == [answer.usage.completion_tokens]
limited = litellm.completion(**own, temperature=0, extra_body={"min_tokens": 3, "ignore_eos": True}, max_tokens=5)
assert (limited.usage.completion_tokens, limited.choices[0].finish_reason) == (5, "length")
for options, kind in (
    ({"max_tokens": 1_000_000}, litellm.ContextWindowExceededError),
    ({"temperature": 9}, litellm.BadRequestError),
    ({"model": "hosted_vllm/other"}, litellm.NotFoundError),
):
    try:
        litellm.completion(**{**own, **options})
    except kind:
        continue
    raise AssertionError(f"{options} does not raise {kind.__name__}")
text = litellm.text_completion(
    model=f"hosted_vllm/{model}", api_base=f"{url}/v1", api_key="none", prompt="What does", max_tokens=4
)
assert text.choices[0].text
