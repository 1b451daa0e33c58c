"""Bodies of /v1/embeddings, /v1/score and /v1/rerank: values of the wrong type are refused by name."""

from __future__ import annotations

import json

import pytest

from gateway_svc.http import pooling
from gateway_svc.http.server import InvalidRequestError

EMBEDDINGS = {"model": "m", "input": "a"}
SCORE = {"model": "m", "text_1": "a", "text_2": ["b", "c"]}
RERANK = {"model": "m", "query": "a", "documents": ["b"]}


WRONG = [{}, [], ["last"], 7, True, "none such"]
FIELDS = [  # reader, body, field, values of WRONG that fit
    (pooling.embeddings_of, EMBEDDINGS, "pooling", []),
    (pooling.embeddings_of, EMBEDDINGS, "dimensions", [7]),
    (pooling.embeddings_of, EMBEDDINGS, "truncate_prompt_tokens", []),
    (pooling.embeddings_of, EMBEDDINGS, "truncate", [True]),
    (pooling.score_of, SCORE, "priority", [7]),
    (pooling.rerank_of, RERANK, "top_n", [7]),
    (pooling.rerank_of, RERANK, "documents", [["last"]]),
]
CASES = [(read, body, name, wrong) for read, body, name, fits in FIELDS for wrong in WRONG if wrong not in fits]


@pytest.mark.parametrize(("read", "body", "name", "wrong"), CASES)
def test_values_of_the_wrong_type_are_refused(read, body, name, wrong):
    with pytest.raises(InvalidRequestError, match=name):
        read(json.dumps(body | {name: wrong}).encode())


def test_null_is_the_default():
    body = EMBEDDINGS | dict.fromkeys(("pooling", "dimensions", "encoding_format", "truncate", "normalize"))
    found = pooling.embeddings_of(json.dumps(body).encode())
    assert not found.is_base64
    assert not found.request.HasField("dimensions")
