"""Errors about a field of a request: its path, its value, the limit, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from gateway_svc.request.models import ServedModel
from request_fields.fields import FieldError
from request_fields.sizes import LengthError
from svc_common.errors import ContextLengthError, InvalidRequestError

CHAT = "prompt.chat"


class FieldErrors:
    """Converts a FieldError of its block to the error that the client gets. A class, because a request enters several
    blocks and a generator costs more.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, LengthError):
            raise ContextLengthError(str(error), field=error.field, limit=error.limit) from None
        if isinstance(error, FieldError):
            raise InvalidRequestError(str(error), field=error.field) from None


def invalid(field: str, words: str) -> InvalidRequestError:
    """The error for an invalid field."""
    return InvalidRequestError(f"{field} {words}", field=field)


def check_token_ids(field: str, ids: Sequence[int], model: ServedModel) -> None:
    """Check that all ids are below vocab_size."""
    vocab_size = model.info.vocab_size
    if len(ids) == 0 or max(ids) < vocab_size:
        return
    position = next(i for i, id_ in enumerate(ids) if id_ >= vocab_size)
    raise invalid(field, f"holds token id {ids[position]} at position {position}; vocab_size is {vocab_size}")
