"""Latent attention: equal to its formula, and the same bits for any chunks, batch mates, threads and block size."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.engine.driver import Driver
from tests.unit.engine.models import load_reference, make_model
from tests.unit.engine.test_engine_models import check_against, load, prompts
from worker_svc.engine.backend import ForwardBatch, KVLayout, LatentAttention, LatentShape, LatentTokens, Norm
from worker_svc.engine.checkpoint.model_folder import CheckpointError
from worker_svc.engine.checkpoint.tensors import Checkpoint
from worker_svc.engine.cpu.backend import make_backend
from worker_svc.engine.decoder.parse import parse_config
from worker_svc.engine.decoder.pool.kv_cache import KVCachePool
from worker_svc.engine.decoder.rotary import Rotary

LENGTH, LONG = 270, 1100  # the second one is more than threads read in one turn
SHAPES = {
    "DeepSeek V2 Lite": LatentShape(16, 512, 64, 128, 128, is_interleaved=True),
    "odd": LatentShape(5, 27, 10, 14, 18, is_interleaved=True),
    "halves": LatentShape(3, 40, 8, 6, 4, is_interleaved=False),
    "many heads": LatentShape(150, 20, 4, 2, 2, is_interleaved=True),
}


class Sequence:
    """The outputs of the linear layers before latent attention, for all positions."""

    def __init__(self, shape, length, dtype, seed=0, scale=1.0):
        generator = torch.Generator().manual_seed(seed)

        def random(*sizes):
            return (torch.randn(*sizes, generator=generator) * scale).to(dtype)

        self.q = random(length, shape.num_heads * shape.query_dim)
        self.absorbed = random(length, shape.num_heads, shape.rank)  # the heads' product with q
        self.latents = random(length, shape.rank + shape.rope_dim)


def norm_of(shape, dtype):
    weight = torch.rand(shape.rank, generator=torch.Generator().manual_seed(9)) + 0.5
    return Norm(weight.to(dtype), None, 1e-6)


def rotary_of(shape):
    return Rotary(1.0 / 1e4 ** (torch.arange(0, shape.rope_dim, 2).float() / shape.rope_dim)).table(LONG)


def attend(backend, shape, chunks, block_size=16):
    """Outputs of each chunk (sequence, first position, end), whose earlier positions are stored before, over scattered
    blocks. What no token has written is NaN."""
    dtype, per_row = chunks[0][0].q.dtype, -(-max(end for *_, end in chunks) // block_size)
    order = np.random.default_rng(1).permutation(per_row * len(chunks)).astype(np.int32)
    tables = order.reshape(len(chunks), per_row)
    pool = KVCachePool([KVLayout(1, shape.width, 0)], len(order), block_size, dtype)
    pool.latents(0).fill_(float("nan"))
    for row, (sequence, first, _) in enumerate(chunks):
        if first:
            run(backend, shape, pool, tables, [(row, sequence, 0, first)])
    return run(backend, shape, pool, tables, [(row, *chunk) for row, chunk in enumerate(chunks)])


def run(backend, shape, pool, tables, chunks):
    """One step."""
    positions = np.concatenate([np.arange(first, end) for *_, first, end in chunks])
    rows = np.repeat([row for row, *_ in chunks], [end - first for *_, first, end in chunks])
    slots = tables[rows, positions // pool.block_size].astype(np.int64) * pool.block_size + positions % pool.block_size
    batch = ForwardBatch(
        token_ids=positions,
        positions=positions.astype(np.int32),
        slots=slots,
        rows=np.array([row for row, *_ in chunks], np.int32),
        query_starts=np.cumsum([0, *(end - first for *_, first, end in chunks)]).astype(np.int32),
        context_lens=np.array([first for *_, first, _ in chunks], np.int32),
        tables=tables,
        head_tokens=np.zeros(0, np.int64),
    )
    q, absorbed, latents = (
        torch.cat([getattr(sequence, name)[first:end] for _, sequence, first, end in chunks])
        for name in ("q", "absorbed", "latents")
    )
    wide = torch.full((len(q), shape.num_heads, shape.width), float("nan"), dtype=q.dtype)
    cache, norm = pool.latents(0), norm_of(shape, q.dtype)
    part = LatentAttention(shape, None, None, norm, [], [])
    backend.latent_rope_store(LatentTokens(q, latents, rotary_of(shape)), part, batch, cache, wide)
    wide[..., : shape.rank] = absorbed
    out = backend.latent_attention(wide, cache, batch, shape, 0.125)
    return list(out.split(np.diff(batch.query_starts).tolist()))


def formula(shape, sequence):
    """The same in float64, for all positions."""
    rotary, norm = rotary_of(shape), norm_of(shape, sequence.q.dtype)
    cos, sin = rotary.cos[: len(sequence.q)].double(), rotary.sin[: len(sequence.q)].double()

    def rotate(x, cos, sin):
        a, b = (x[..., ::2], x[..., 1::2]) if shape.is_interleaved else x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    latents, rotated = sequence.latents.double().split([shape.rank, shape.rope_dim], 1)
    normed = latents / torch.sqrt(latents.square().mean(1, keepdim=True) + norm.eps) * norm.weight.double()
    q = sequence.q.double().unflatten(1, (shape.num_heads, -1))[..., shape.key_dim :]
    scores = torch.einsum("qhd,kd->hqk", sequence.absorbed.double(), normed)
    scores += torch.einsum("qhd,kd->hqk", rotate(q, cos[:, None], sin[:, None]), rotate(rotated, cos, sin))
    is_seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
    return torch.einsum("hqk,kd->qhd", (scores * 0.125).masked_fill(~is_seen, -torch.inf).softmax(-1), normed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_token_does_not_depend_on_its_batch(kernel_build, shape, dtype):
    backend, other_threads = make_backend("cpu", 1, "exact"), make_backend("cpu", 2, "exact")
    length = LENGTH if kernel_build == "native" or shape.num_heads < 10 else 135  # other builds are not optimized
    sequence, broken = Sequence(shape, length, dtype), Sequence(shape, 60, dtype, 1, float("nan"))
    (whole,) = attend(backend, shape, [(sequence, 0, length)])
    worst = (whole.double() - formula(shape, sequence)).abs().max()
    assert worst < (2e-5 if dtype is torch.float32 else 6e-2)
    cuts = [cut for cut in (0, 1, 7, 100, 128, 129, 256) if cut < length] + [length]
    for first, end in pairwise(cuts):
        (found,) = attend(backend, shape, [(sequence, first, end)])
        assert torch.equal(found, whole[first:end]), (first, end)
    last = (sequence, length - 1, length)
    for block_size in (1, 8, 64):
        assert torch.equal(attend(backend, shape, [last], block_size)[0], whole[-1:]), block_size
    crowd = [(broken, 0, 60), last, (broken, 59, 60), (sequence, 90, 131)]
    found = attend(other_threads, shape, crowd)
    assert torch.equal(found[1], whole[-1:])
    assert torch.equal(found[3], whole[90:131])


@pytest.mark.parametrize("threads", [1, 2])
def test_heads_that_read_in_turns_give_the_same_bits(threads):
    shape, backend = SHAPES["many heads"], make_backend("cpu", threads, "exact")
    sequence = Sequence(shape, LONG, torch.bfloat16)
    (several,) = attend(backend, shape, [(sequence, LONG - 5, LONG)])  # spans that go through all keys
    (last,) = attend(backend, shape, [(sequence, LONG - 1, LONG)])
    assert torch.equal(last, several[-1:])


@pytest.mark.parametrize("shape", [SHAPES["odd"], SHAPES["halves"]], ids=["odd", "halves"])
def test_the_reference_computes_the_formula(shape):
    sequence = Sequence(shape, 40, torch.float32)
    (whole,) = attend(make_backend("reference", 1, "exact"), shape, [(sequence, 0, 40)])
    assert (whole.double() - formula(shape, sequence)).abs().max() < 2e-5
    (end,) = attend(make_backend("reference", 1, "exact"), shape, [(sequence, 37, 40)], 4)
    assert torch.equal(end, whole[37:])


@pytest.mark.parametrize("backend", ["cpu", pytest.param("reference", marks=pytest.mark.deep)])
def test_chunks_and_batch_mates_change_no_logit(tmp_path, backend):
    """The whole decoder: prompts in chunks of any size and decoding have one arithmetic."""
    driver = Driver(
        load(make_model(tmp_path, "glm4_moe_lite", dtype=torch.bfloat16), backend=backend, dtype="bfloat16")
    )
    prompt, other = prompts([70, 33])
    driver.open(0, prompt)
    driver.prefill(0)
    driver.decode([0], 3)
    tokens = driver.rows[0].tokens
    driver.open(1, prompt)
    driver.open(2, other)
    driver.open(3, tokens[:-1])  # decoded tokens are a prompt now
    driver.step({1: 9, 2: 1})
    driver.step({1: 61, 2: 32, 3: 1})
    driver.step({3: len(tokens) - 2, 1: 1})
    driver.decode([2, 1], 2)
    for position in range(len(prompt), len(tokens)):
        assert torch.equal(driver.logits[1, position], driver.logits[0, position])
    assert torch.equal(driver.logits[3, len(tokens) - 1], driver.logits[0, len(tokens) - 1])


def test_a_block_holds_one_latent_per_token_and_layer(tmp_path):
    config = parse_config(Checkpoint(make_model(tmp_path, "deepseek_v3")).config)
    assert KVCachePool.bytes_per_block(config.kv_layouts(), 16, torch.float32) == 3 * 16 * 48 * 4  # 27 + 10, filled up


def test_layers_that_predict_further_tokens_are_not_read(tmp_path, rewrite_config):
    folder = make_model(tmp_path, "deepseek_v3")
    tensors = load_file(folder / "model.safetensors")
    extra = {name.replace("layers.2.", "layers.3."): x.clone() for name, x in tensors.items() if "layers.2." in name}
    save_file(tensors | extra | {"model.layers.3.eh_proj.weight": torch.zeros(60, 120)}, folder / "model.safetensors")
    reference = load_reference(folder)
    rewrite_config(folder, num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\."):
        load(folder)
    rewrite_config(folder, num_nextn_predict_layers=1)
    driver = Driver(load(folder))
    driver.open(0, prompts([20])[0])
    driver.prefill(0)
    check_against(reference, driver, [0])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_key_value_heads": 1}, "num_key_value_heads: 1 is not supported"),
        ({"rope_interleave": 2}, "rope_interleave: config.json must hold true or false"),
        ({"q_lora_rank": None, "attention_bias": True}, "attention_bias: true is not supported without q_lora_rank"),
        ({"kv_lora_rank": 0}, "kv_lora_rank"),
    ],
)
def test_what_is_not_computed_is_refused_by_field(tmp_path, fields, message):
    config = Checkpoint(make_model(tmp_path, "deepseek_v3")).config
    with pytest.raises(CheckpointError, match=message):
        parse_config(config | fields)
