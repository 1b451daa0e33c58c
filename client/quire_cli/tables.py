"""Text tables, for the commands and for the report of `quire bench`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A text table; numbers are aligned to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(headers), *cells]) for i in range(len(headers))]
    lines = [list(headers), *cells]
    return "\n".join("  ".join(_aligned(c, w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _aligned(cell: str, width: int) -> str:
    is_number = cell.replace(",", "").replace(".", "").rstrip("%").isdigit()
    return cell.rjust(width) if is_number else cell.ljust(width)
