"""lm-eval: scores and texts over HTTP equal those of its own transformers backend. Usage: ... URL MODEL FOLDER"""

import math
import sys

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI

url, model, folder = sys.argv[1:]
TOLERANCE = 1e-3  # error of a sum of log probabilities in float32
PAIRS = [
    ("What does os.path.join do?", " Join two or more pathname components."),
    ("What does os.path.join do?", " Return the binary representation of an integer."),
    ("import", " os"),
    ("The quick brown fox", " jumps over the lazy dog"),
    ("def f(x):\n", "    return x"),
]
TEXTS = ["Return a list of the names of the entries in the directory.", "x = 1"]


def requests(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=one, idx=i) for i, one in enumerate(arguments)]


expected = HFLM(pretrained=folder, device="cpu", dtype="float32", batch_size=1)
for backend in ("huggingface", "remote"):
    served = LocalCompletionsAPI(
        model=model,
        base_url=f"{url}/v1/completions",
        tokenizer_backend=backend,
        tokenizer=folder if backend == "huggingface" else None,
        batch_size=3,
        max_length=1024,
    )
    pairs = requests("loglikelihood", PAIRS)
    for ours, theirs in zip(served.loglikelihood(pairs), expected.loglikelihood(pairs), strict=True):
        assert math.isclose(ours[0], theirs[0], abs_tol=TOLERANCE), (backend, ours, theirs)
        assert ours[1] == theirs[1], (backend, ours, theirs)
    texts = requests("loglikelihood_rolling", [(text,) for text in TEXTS])
    ours, theirs = served.loglikelihood_rolling(texts), expected.loglikelihood_rolling(texts)
    assert all(math.isclose(a, b, abs_tol=TOLERANCE) for a, b in zip(ours, theirs, strict=True)), (ours, theirs)
    until = requests("generate_until", [(context, {"until": ["."], "max_gen_toks": 30}) for context, _ in PAIRS])
    assert served.generate_until(until) == expected.generate_until(until)
