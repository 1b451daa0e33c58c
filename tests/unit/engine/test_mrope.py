"""Positions on three axes against transformers, for whole sequences and slices of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from step_protocol.messages import ImageSpan
from tests.unit.engine.vision_models import IMAGE, TOWERS, load_vision_reference, make_vision_model
from worker_svc.engine.rows.positions import MropePositions

# Pieces of a prompt: numbers of text tokens, sizes of images in tokens.
PROMPTS = {
    "text": [7],
    "image": [4, (3, 5), 6],
    "image first": [(2, 2), 3],
    "image last": [5, (1, 7)],
    "two images": [3, (4, 2), 1, (2, 9), 12],
    "three images": [1, (1, 1), 2, (6, 6), 30, (8, 3), 1],
}


def layout(pieces):
    """Token ids of a prompt, the spans of its images and their grids in patches."""
    ids, spans, grids = [], [], []
    for piece in pieces:
        if isinstance(piece, int):
            ids += [5] * piece
            continue
        spans.append(ImageSpan(len(ids), *piece))
        grids.append([1, 2 * piece[0], 2 * piece[1]])
        ids += [IMAGE] * spans[-1].length
    return torch.tensor([ids]), spans, torch.tensor(grids)


@pytest.fixture(scope="module", params=TOWERS)
def reference(request, tmp_path_factory):
    return load_vision_reference(make_vision_model(tmp_path_factory.mktemp("model"), request.param))


@pytest.mark.parametrize("pieces", PROMPTS.values(), ids=PROMPTS)
def test_positions_and_delta_equal_those_of_transformers(reference, pieces):
    ids, spans, grids = layout(pieces)
    expected, delta = reference.model.get_rope_index(
        ids, mm_token_type_ids=(ids == IMAGE).int(), image_grid_thw=grids if spans else None
    )
    positions = MropePositions(spans)
    whole = positions.of(np.arange(ids.shape[1]))
    assert np.array_equal(whole, expected[:, 0].numpy())
    assert positions.delta == int(delta)
    for first in range(ids.shape[1]):
        for end in range(first + 1, min(first + 9, ids.shape[1] + 1)):
            assert np.array_equal(positions.of(np.arange(first, end)), whole[:, first:end])
    after = positions.of(np.array([ids.shape[1], ids.shape[1] + 100]))
    assert np.array_equal(after, np.tile(np.array([0, 100]) + ids.shape[1] + int(delta), (3, 1)))
