"""The errors of one step's rows."""

from __future__ import annotations

from step_protocol.messages import RowError, RowErrorCode


class RowErrors:
    """The first failure of each row in one step."""

    def __init__(self) -> None:
        self._errors: dict[int, RowError] = {}

    def add(self, row: int, message: str, code: RowErrorCode = RowErrorCode.BAD_INPUT) -> None:
        self._errors.setdefault(row, RowError(row, message, code))

    def add_all(self, errors: list[RowError]) -> None:
        for error in errors:
            self._errors.setdefault(error.row, error)

    def __contains__(self, row: int) -> bool:
        return row in self._errors

    def __len__(self) -> int:
        return len(self._errors)

    def to_list(self) -> list[RowError]:
        return list(self._errors.values())
