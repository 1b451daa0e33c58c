"""The noise specification: golden values, the kernel against the numpy reference, filters, distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from request_fields.fields import SAMPLER_FIELDS, SamplingParams
from tests.unit.engine.driver import seeded
from worker_svc.engine.backend import SamplingColumns
from worker_svc.engine.cpu.backend import make_backend
from worker_svc.engine.rows.open_rows import sampling_columns
from worker_svc.engine.sampling.noise import gumbel_noise, keep_threshold, philox_words, sample_token

# Test vectors of Philox4x32-10 by its authors (Random123, kat_vectors).
PHILOX_VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

# (seed, output position, sample index), then the float32 bits of the noise of vocabulary ids 0..5 and 151935.
NOISE_VECTORS = [
    ((0, 0, 0), "3F2CC258 BF40EB19 BE9249CC 3D946D21 BFA36588 3F4CAB23 4014C22D"),
    ((7, 0, 0), "BF907F05 BEA7762E 40070A2A 401A6DD3 3F262E24 BEEC2F48 3F402F51"),
    ((7, 1, 0), "3FCCE62A 3FEF267B BF989D8E 3EB8E5D4 3FA72F53 3FFB18B6 3FF60C5E"),
    ((7, 0, 1), "3EC2FFAD 3FD5A405 3F7C92EA 3FAEC62B BF47E928 BF23C7F9 3F195B48"),
    ((0x0123456789ABCDEF, 4095, 3), "3FFF81B1 BF1D4784 403DD588 3F876C82 3F638499 3D28626F 3FA39970"),
    ((2**64 - 1, 2**32 - 1, 2**32 - 1), "BF324D67 403698F8 BED32E59 3EF94298 3F17A066 BDA8315F 3E178EEC"),
]

# (sampling, tokens at output positions 0..7 of sample 0) for the logits of `golden_logits`.
TOKEN_VECTORS: list[tuple[dict[str, float], list[int]]] = [
    ({"seed": 7, "temperature": 1.0}, [762, 241, 155, 432, 542, 728, 453, 84]),
    ({"seed": 7, "temperature": 0.5}, [762, 241, 110, 432, 720, 55, 453, 84]),
    ({"seed": 8, "temperature": 1.0, "top_k": 20}, [432, 953, 343, 55, 809, 144, 432, 144]),
    ({"seed": 9, "temperature": 1.3, "top_p": 0.8}, [375, 809, 600, 964, 731, 220, 893, 296]),
    ({"seed": 10, "temperature": 1.0, "min_p": 0.1}, [199, 537, 490, 919, 254, 898, 21, 118]),
    ({"seed": 12, "temperature": 1.0, "top_a": 0.5}, [110, 584, 77, 595, 940, 702, 804, 55]),
    (
        {"seed": 11, "temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
        [254, 377, 55, 330, 953, 398, 631, 453],
    ),
]


def golden_logits():
    """Logits that any language can build without rounding: multiples of 1/64 from a small generator of integers."""
    return ((np.arange(1000, dtype=np.uint64) * 2654435761 % 4294967296 >> 23).astype(np.float32) - 256) / 64


@pytest.fixture(scope="module")
def kernels():
    return make_backend("cpu", 1, "exact")


def columns(params, sample_indices, positions):
    made = sampling_columns(len(params))
    for i, row in enumerate(params):
        for name in SAMPLER_FIELDS:
            made[name][i] = getattr(row, name)
    made["sample_index"][:] = sample_indices
    return SamplingColumns(made, np.arange(len(params)), np.array(positions, np.uint32))


@pytest.mark.parametrize(("counter", "key", "expected"), PHILOX_VECTORS)
def test_philox_vectors(counter, key, expected):
    words = philox_words((np.array([counter[0]], np.uint32), *counter[1:]), key)
    assert tuple(int(word[0]) for word in words) == expected


@pytest.mark.parametrize(("key", "expected"), NOISE_VECTORS)
def test_noise_vectors(kernels, key, expected):
    bits = [int(word, 16) for word in expected.split()]
    ids = np.array([0, 1, 2, 3, 4, 5, 151935], np.uint32)
    seed, position, sample_index = key
    assert gumbel_noise(seed, position, sample_index, ids).view(np.uint32).tolist() == bits
    assert kernel_noise(kernels, key, ids).view(np.uint32).tolist() == bits


def kernel_noise(kernels, key, ids):
    seed, position, sample_index = key
    out = np.empty(len(ids), np.float32)
    kernels._kernels.quire_gumbel_noise(seed, position, sample_index, ids.ctypes.data, len(ids), out.ctypes.data)
    return out


def test_kernel_noise_has_the_same_bits(kernels):
    ids = np.arange(100_000, dtype=np.uint32)
    for key in ((1, 0, 0), (2**64 - 1, 4095, 7)):
        assert np.array_equal(kernel_noise(kernels, key, ids), gumbel_noise(*key, ids))


PARAMS = {
    "plain": {}, "top_k": {"top_k": 5}, "top_p": {"top_p": 0.7}, "min_p": {"min_p": 0.05}, "top_a": {"top_a": 0.2},
    "top_a and top_p": {"top_a": 0.05, "top_p": 0.9}, "all": {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "top_a": 0.02},
    "nearly off": {"top_k": 10**6, "top_p": 0.999999, "min_p": 1e-9, "top_a": 1e-9}, "one left": {"top_p": 1e-6},
}  # fmt: skip


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("vocab", [7, 211, 4096])
def test_kernel_samples_the_token_of_the_reference(kernels, name, scale, vocab):
    rng = np.random.default_rng(vocab)
    count = 40
    logits = (rng.standard_normal((count, vocab)) * scale).astype(np.float32)
    logits[::3] = logits[::3].round(1)  # ties
    params = [seeded(int(rng.integers(2**63)), float(t), **PARAMS[name]) for t in rng.uniform(0.3, 2.0, count)]
    sample_indices, positions = rng.integers(0, 5, count), rng.integers(0, 5000, count)
    tokens, is_bad = kernels.sample(torch.from_numpy(logits), columns(params, sample_indices, positions))
    expected = [
        sample_token(row, p, int(i), int(at))
        for row, p, i, at in zip(logits, params, sample_indices, positions, strict=True)
    ]
    assert tokens.tolist() == expected
    assert not is_bad.any()


def test_pruning_never_drops_the_best_token(kernels):
    """Against the argmax over every id, without any pruning."""
    rng = np.random.default_rng(0)
    ids = np.arange(2000, dtype=np.uint32)
    for trial in range(50):
        logits = (rng.standard_normal(2000) * rng.choice([0.1, 2, 8])).astype(np.float32)
        tokens, _ = kernels.sample(torch.from_numpy(logits[None]), columns([seeded(trial)], [1], [trial]))
        assert tokens[0] == (logits + gumbel_noise(trial, trial, 1, ids)).argmax()


def test_greedy_takes_the_lowest_of_equals(kernels):
    logits = torch.zeros(2, 100)
    logits[0, [40, 17, 99]] = 1.0
    for temperature in (0.0, 9e-6):
        tokens, _ = kernels.sample(logits, columns([seeded(0, temperature)] * 2, [0, 0], [0, 0]))
        assert tokens.tolist() == [17, 0]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_logits_are_reported(backend, temperature):
    logits = torch.zeros(5, 70)
    logits[0, 69], logits[1, 3], logits[2] = float("nan"), float("inf"), -float("inf")
    logits[3, :] = -float("inf")
    logits[3, 65] = -3.0
    tokens, is_bad = make_backend(backend, 1, "exact").sample(
        logits, columns([seeded(1, temperature, top_p=0.9)] * 5, [0] * 5, [0] * 5)
    )
    assert is_bad.tolist() == [True, True, True, False, False]
    assert tokens[3] == 65


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 5),
        ({"top_k": 2}, 2),
        ({"top_p": 0.69}, 2),
        ({"top_p": 0.71}, 3),
        ({"min_p": 0.49}, 3),
        ({"min_p": 0.6, "top_k": 4}, 2),
        ({"top_a": 0.24}, 5),  # 0.24 * 0.4^2 is 0.0384
        ({"top_a": 0.26}, 4),
        ({"top_a": 1.0}, 3),
        ({"top_a": 1.0, "top_p": 0.75}, 2),  # top_a keeps three ids, two of which have probability 0.78
        ({"top_k": 2, "top_p": 0.5}, 1),  # top_k keeps two ids; the first has probability 0.57
    ],
)
def test_filters_keep_the_expected_ids(fields, expected):
    z = np.log(np.array([0.4, 0.3, 0.2, 0.06, 0.04], np.float32))
    assert int((z >= keep_threshold(z, seeded(0, **fields))).sum()) == expected


def test_top_a_takes_the_probabilities_of_the_ids_that_min_p_keeps():
    z = np.log(np.array([0.4, 0.17, 0.17, 0.13, 0.13], np.float32))
    kept = [int((z >= keep_threshold(z, seeded(0, top_a=1.0, min_p=min_p))).sum()) for min_p in (0.0, 0.4)]
    assert kept == [3, 1]  # 0.4^2 is 0.16; of the three ids that min_p keeps, the first has probability 0.54


@pytest.mark.parametrize(("sampling", "expected"), TOKEN_VECTORS)
def test_token_vectors(kernels, sampling, expected):
    params = SamplingParams(**({"top_k": 0, "top_p": 1.0, "min_p": 0.0} | sampling))
    logits = golden_logits()
    assert [sample_token(logits, params, 0, position) for position in range(8)] == expected
    repeated = torch.from_numpy(logits).repeat(8, 1)
    assert kernels.sample(repeated, columns([params] * 8, [0] * 8, range(8)))[0].tolist() == expected


def test_distribution_follows_the_probabilities(kernels):
    probabilities = np.array([0.5, 0.25, 0.15, 0.1])
    logits = torch.from_numpy(np.log(probabilities).astype(np.float32)).repeat(4000, 1)
    params = [SamplingParams(1.0, 0, 1.0, 0.0, 11)] * 4000
    tokens, _ = kernels.sample(logits, columns(params, [0] * 4000, range(4000)))
    found = np.bincount(tokens, minlength=4) / 4000
    assert np.abs(found - probabilities).max() < 0.03
