"""Bodies and answers of /v2/embed, Cohere's form of embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.v1 import inference_pb2 as pb

from gateway_svc.http import fields
from gateway_svc.http.fields import ignored_names, set_parameters
from gateway_svc.http.json_text import encode, encoded_list
from gateway_svc.http.openai.bodies import body_of, pooled_inputs
from gateway_svc.http.pooling.bodies import as_base64, positive
from gateway_svc.http.values import invalid, list_of, one_of, shown, text, text_of

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
    given = list_of("texts", body.get("texts"), "strings")
    texts = [text_of(f"texts[{i}]", item) for i, item in enumerate(given)]
    cut = one_of("truncate", body.get("truncate") or "END", TRUNCATIONS)
    types = ["float"] if body.get("embedding_types") is None else body["embedding_types"]
    if not isinstance(types, list) or not types:
        raise invalid("embedding_types", f"is {shown(types)}; must be a list of {', '.join(ENCODINGS)}")
    kinds = [one_of(f"embedding_types[{i}]", kind, ENCODINGS) for i, kind in enumerate(types)]
    request = pb.EmbedRequest(
        model=text(body, "model"), inputs=pooled_inputs(texts, "texts"), truncate=TRUNCATIONS[cut]
    )
    set_parameters(fields.COHERE_EMBED, body, request)
    if body.get("output_dimension") is not None:
        request.dimensions = positive(body, "output_dimension")
    return CohereEmbeddings(
        request, text(body, "input_type"), list(dict.fromkeys(kinds)), ignored_names(fields.COHERE_EMBED, body)
    )


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
