"""Bodies and answers of /v2/embed, Cohere's form of embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.v1 import inference_pb2 as pb

from gateway_svc.http import fields
from gateway_svc.http.fields import ignored_names, invalid, shown
from gateway_svc.http.json_text import encode, encoded_list
from gateway_svc.http.openai.bodies import body_of, model_name, pooled_inputs
from gateway_svc.http.pooling.bodies import as_base64, positive, scheduling_of

INPUT_TYPES: Mapping[str, Sequence[str]] = {  # names of a model's prompts for each type, the first one that it has
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}
TRUNCATIONS = {"NONE": False, "END": True}


@dataclass(frozen=True, slots=True)
class CohereEmbeddings:
    """A body of /v2/embed. The request has no prompt_name yet: the model's prompts decide."""

    request: pb.EmbedRequest
    input_type: str
    types: Sequence[str]
    ignored: list[str]

    @property
    def texts(self) -> list[str]:
        return [prompt.text for prompt in self.request.inputs]

    def prompt_name(self, prompts: Mapping[str, str]) -> str:
        """The prompt for the type of input; "" if the model has none for it."""
        names = INPUT_TYPES.get(self.input_type, (self.input_type,))
        return next((name for name in names if name in prompts), "")


def cohere_embeddings_of(data: bytes) -> CohereEmbeddings:
    """Parse a body of /v2/embed. Raises InvalidRequestError."""
    body = body_of(data)
    texts = body.get("texts")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise invalid("texts", f"is {shown(texts)}; must be a list of strings")
    cut = body.get("truncate") or "END"
    if not isinstance(cut, str) or cut not in TRUNCATIONS:
        raise invalid("truncate", f"is {shown(cut)}; must be one of {', '.join(TRUNCATIONS)}")
    types = ["float"] if body.get("embedding_types") is None else body["embedding_types"]
    if (
        not isinstance(types, list)
        or not types
        or not all(isinstance(kind, str) and kind in ENCODINGS for kind in types)
    ):
        raise invalid("embedding_types", f"must be a list of {', '.join(ENCODINGS)}")
    input_type = body.get("input_type") or ""
    if not isinstance(input_type, str):
        raise invalid("input_type", f"is {shown(input_type)}; must be a string")
    request = pb.EmbedRequest(
        model=model_name(body),
        inputs=pooled_inputs(texts, "texts"),
        truncate=TRUNCATIONS[cut],
        scheduling=scheduling_of(body),
    )
    if body.get("output_dimension") is not None:
        request.dimensions = positive(body, "output_dimension")
    for image in ("images", "inputs"):
        if body.get(image):
            raise invalid(image, "is not served by this version; send texts")
    return CohereEmbeddings(request, input_type, list(dict.fromkeys(types)), ignored_names(fields.COHERE_EMBED, body))


def encoded_cohere(reply: pb.EmbedResponse, asked: CohereEmbeddings) -> bytes:
    """The answer in Cohere's shape: the embeddings by type."""
    used = sum(item.prompt_tokens for item in reply.embeddings)
    embeddings = {kind: [ENCODINGS[kind](item.values) for item in reply.embeddings] for kind in asked.types}
    meta = {"api_version": {"version": "2"}, "billed_units": {"input_tokens": used}}
    head = {"id": reply.request_id, "response_type": "embeddings_by_type", "texts": asked.texts, "meta": meta}
    return encode({**head, "embeddings": embeddings})


def _bits(values: Sequence[float]) -> list[int]:
    """One bit per value, 1 if it is positive, the first one in the highest bit of a byte."""
    bits = "".join("1" if value > 0 else "0" for value in values)
    return [int(bits[start : start + 8].ljust(8, "0"), 2) for start in range(0, len(bits), 8)]


ENCODINGS: Mapping[str, Callable[[Sequence[float]], Any]] = {
    "float": encoded_list,
    "base64": as_base64,
    "ubinary": _bits,
    "binary": lambda values: [byte - 128 for byte in _bits(values)],
}
