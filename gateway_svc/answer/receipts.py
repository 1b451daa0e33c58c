"""Receipts of samples: what their answers depend on, with digests, signed by the gateway's key (docs/receipts.md)."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.answer.open_streams import FAILED, REASONS
from gateway_svc.request.plan import GenerationPlan
from request_fields.receipts import ReceiptAnswer, ReceiptError, private_key, receipt_text
from svc_common.config import SettingError
from svc_common.security.tls import Reread

MODEL_FACTS = (
    "model", "revision", "weights_digest", "numerics", "build", "dtype", "quantization", "kv_cache_dtype", "block_size",
    "max_model_len",
)  # fmt: skip


class ReceiptKeyError(SettingError):
    """--receipt-key-file cannot be used."""


class ReceiptSigner:
    """Signs with the key that a file has now. While a changed file is invalid, the previous key stays in use."""

    def __init__(self, key_file: Path) -> None:
        self._key = Reread(partial(_read_key, key_file), "receipt key", time.monotonic)

    def sign(self, payload: dict[str, Any], answer: ReceiptAnswer) -> str:
        return receipt_text(
            {**payload, "time": datetime.now(UTC).isoformat(timespec="milliseconds")}, answer, self._key()
        )


def _read_key(key_file: Path) -> Any:
    try:
        return private_key(key_file.read_bytes())
    except (OSError, ReceiptError) as error:
        raise ReceiptKeyError(f"--receipt-key-file {key_file}: {error}") from None


class SampleProof:
    """Collects what the receipt of one sample covers. The stream adds all output tokens, and the digests of those that
    were computed for it: a continuation has none for the output that it begins with.
    """

    def __init__(self, signer: ReceiptSigner, plan: GenerationPlan, index: int) -> None:
        self.token_ids = array("I")
        self.digests = array("Q")
        self._signer = signer
        self._plan = plan
        self._index = index
        # Output of a record was computed by this deployment; other output of a continuation is the client's word.
        self._num_claimed = len(plan.resume.outputs[index]) if plan.resume.replay is None else 0

    def receipt(self, finished: pb.Finished) -> str:
        """The receipt of a finished sample; empty if it has failed, or if no output was computed for it."""
        if len(self.token_ids) <= self._num_claimed or finished.reason in FAILED:
            return ""
        return self._signer.sign(
            {
                **_facts(self._plan),
                **_weights(finished),
                "sample": self._index,
                "finish_reason": REASONS[finished.reason],
                "num_prompt_tokens": len(self._plan.prompt.ids),
                "num_output_tokens": len(self.token_ids),
                "num_claimed_tokens": self._num_claimed,
                "first_digest": len(self.token_ids) - len(self.digests),
                "processor_seconds": finished.usage.processor_seconds,
            },
            ReceiptAnswer(self._plan.prompt.ids, self.token_ids, self.digests),
        )


def _facts(plan: GenerationPlan) -> dict[str, Any]:
    """Facts that all samples of a request share."""
    info, sampling = plan.model.info, plan.sampling
    return {
        **{name: getattr(info, name) for name in MODEL_FACTS},
        "determinism": types.Determinism.Name(info.determinism).removeprefix("DETERMINISM_").lower(),
        "adapter": plan.model.adapter_digest.hex(),
        "request_id": plan.request_id,
        "seed": sampling.params.seed,
        "sampling": _fields(sampling.params),
        "stop": _fields(sampling.stop),
        "bad_words_ids": [list(ids) for ids in sampling.bad_words_ids],
    }


def _weights(finished: pb.Finished) -> dict[str, Any]:
    """The weights that computed the sample, if they are not those of the checkpoint. The last ones come first."""
    spans = finished.weight_versions
    if not spans:
        return {}
    last = spans[-1].weights
    return {"revision": last.revision, "weights_digest": last.weights_digest, "weight_versions": span_values(spans)}


def span_values(spans: Iterable[types.WeightVersionSpan]) -> list[dict[str, Any]]:
    """Spans of weights as JSON values, in receipts and answers."""
    return [
        {
            "version": span.weights.version,
            "revision": span.weights.revision,
            "weights_digest": span.weights.weights_digest,
            "start": span.start,
            "end": span.end,
            "keeps_kv": span.keeps_kv,
        }
        for span in spans
    ]


def _fields(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True)
    return found
