"""Heads that propose drafts: their formula, computed with the layers of transformers, and the same answers as without
them. transformers itself leaves these layers out, so the formula stands here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from request_fields.fields import StopCondition
from tests.speculating import NoTimes, System
from tests.unit.engine.heads import make_eagle, make_mtp_model
from tests.unit.engine.models import load_reference, make_model
from tests.unit.engine.test_speculation import answers_of, make_runner
from worker_svc.engine.checkpoint.model_folder import CheckpointError
from worker_svc.engine.model_runner import ModelRunner

PROMPT = [17, 3, 99, 42, 7, 130, 64, 5, 11, 88, 23]


@pytest.fixture(scope="module")
def mtp_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mtp_model(tmp_path_factory.mktemp("mtp") / "model", agrees=True)


def make_speculating(folder: Path, speculate: str = "mtp", **settings: Any) -> ModelRunner:
    runner = make_runner(folder, speculate=speculate, **settings)
    runner._drafts._times = NoTimes()
    return runner


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


class MtpFormula:
    """x = eh_proj([enorm(embedding) | hnorm(state before)]); a decoder layer; shared_head.norm; the model's head."""

    def __init__(self, folder: Path) -> None:
        self.model = load_reference(folder)
        config = self.model.config
        own = f"model.layers.{config.num_hidden_layers}."
        (file,) = folder.glob("*.safetensors")
        tensors = {name.removeprefix(own): x for name, x in load_file(file).items() if name.startswith(own)}
        self.tensors, last = tensors, self.model.model.layers[-1]
        self.layer = type(last)(config, config.num_hidden_layers - 1).eval()
        loaded = {name: x for name, x in tensors.items() if name.startswith(("self_attn", "mlp", "input", "post"))}
        experts = self.layer.mlp.experts
        for name in ("gate_up_proj", "down_proj"):  # transformers keeps the experts of a layer together
            parts = name.removesuffix("_proj").split("_")
            joined = [
                torch.cat([loaded.pop(f"mlp.experts.{i}.{part}_proj.weight") for part in parts])
                for i in range(len(getattr(experts, name)))
            ]
            loaded[f"mlp.experts.{name}"] = torch.stack(joined)
        self.layer.load_state_dict(loaded)

    @torch.no_grad()
    def __call__(self, token_ids: list[int], own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits after the last token, and its state. `own`: states of this layer, before the last tokens."""
        ids, eps, decoder = torch.tensor([token_ids]), self.model.config.rms_norm_eps, self.model.model
        known = len(token_ids) - len(own)
        target = decoder(ids[:, : known - 1]).last_hidden_state[0]
        before = torch.cat((torch.zeros(1, target.shape[1]), target, own))
        parts = rms(decoder.embed_tokens(ids[0]), self._weight("enorm"), eps), rms(before, self._weight("hnorm"), eps)
        x = (torch.cat(parts, 1) @ self._weight("eh_proj").T)[None]
        positions, count = torch.arange(len(token_ids))[None], len(token_ids)
        mask = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]
        rotated = decoder.rotary_emb(x, positions)
        x = self.layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rotated)
        state = rms(x[0, -1], self._weight("shared_head.norm"), eps)
        return self.model.lm_head(state), state[None]

    def _weight(self, name: str) -> torch.Tensor:
        return self.tensors[f"{name}.weight"]


def recorded_drafts(runner: ModelRunner) -> list[tuple[int, int, torch.Tensor]]:
    """For each draft of the only row: how many tokens the row has, how many drafts are before it, and its logits."""
    found: list[tuple[int, int, torch.Tensor]] = []
    sampler = runner._drafts._proposer._sampler
    sample = sampler.sample

    def recording(logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> Any:
        if len(rows):
            known = int(runner._rows.num_tokens[rows[0]])
            found.append((known, int(positions[0]) - known, logits[0].clone()))
        return sample(logits, rows, positions)

    sampler.sample = recording
    return found


@pytest.mark.parametrize(
    "architecture", ["glm4_moe", "deepseek_v3", pytest.param("glm4_moe_lite", marks=pytest.mark.deep)]
)
@pytest.mark.parametrize("backend", ["cpu", pytest.param("reference", marks=pytest.mark.deep)])
def test_a_predicting_layer_computes_its_formula(tmp_path: Path, architecture: str, backend: str) -> None:
    """Prompts in chunks, drafts that follow drafts, and a second step, whose entries replace those of drafts."""
    folder = make_mtp_model(tmp_path / "model", architecture)
    check_formula(folder, "mtp", MtpFormula(folder), backend)


def check_formula(folder: Path, speculate: str, formula: Any, backend: str) -> None:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 4, "max_drafts": 3}
    runner = make_speculating(folder, speculate, backend=backend, **sizes)
    runner._drafts._shared_acceptance, runner._drafts._learn = 1.0, lambda row, is_right: None
    recorded = recorded_drafts(runner)
    system = System(runner, depth=1)
    system.add(PROMPT, StopCondition(6, ignore_eos=True), temperature=0.0)
    (answer,) = system.run().values()
    for known, nth, logits in recorded:
        if not nth:
            drafted, own = (PROMPT + answer.token_ids)[:known], torch.empty(0, formula.model.config.hidden_size)
        expected, state = formula(drafted, own)
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
        drafted, own = [*drafted, int(expected.argmax())], torch.cat((own, state))
    assert {nth for _, nth, _ in recorded} == {0, 1, 2}
    assert len({known for known, _, _ in recorded}) >= 3


class EagleFormula:
    """x = fc(states of three layers); attention of [norm(embedding) | norm(x)]; feed-forward part; norm; lm_head."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.model, self.tensors = load_reference(target), load_file(folder / "model.safetensors")
        self.config = json.loads((folder / "config.json").read_text())
        self.heads = self.config["num_attention_heads"]

    @torch.no_grad()
    def __call__(self, token_ids: list[int], own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`MtpFormula` with logits of the whole vocabulary."""
        known, eps = len(token_ids) - len(own), self.config["rms_norm_eps"]
        ids = torch.tensor([token_ids])
        outputs = self.model.model(ids[:, : known - 1], output_hidden_states=True).hidden_states
        layers = [layer + 1 for layer in self.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
        target = torch.cat([outputs[layer][0] for layer in layers], 1) @ self._weight("fc").T
        x = torch.cat((torch.zeros(1, target.shape[1]), target, own))
        embedded = rms(self.model.model.embed_tokens(ids[0]), self._weight("midlayer.input_layernorm"), eps)
        joined = torch.cat((embedded, rms(x, self._weight("midlayer.hidden_norm"), eps)), 1)
        x = x + self._attention(joined) @ self._weight("midlayer.self_attn.o_proj").T
        normed = rms(x, self._weight("midlayer.post_attention_layernorm"), eps)
        gate, up = (normed @ self._weight(f"midlayer.mlp.{name}_proj").T for name in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ self._weight("midlayer.mlp.down_proj").T
        logits = torch.full((self.config["vocab_size"],), -torch.inf)
        places = torch.arange(self.config["draft_vocab_size"]) + self.tensors["d2t"]
        logits[places] = self._weight("lm_head") @ rms(x[-1], self._weight("norm"), eps)
        return logits, x[-1:]

    def _attention(self, joined: torch.Tensor) -> torch.Tensor:
        count, dim = len(joined), self.config["hidden_size"] // self.heads
        q, k, v = (
            (joined @ self._weight(f"midlayer.self_attn.{name}_proj").T).view(count, self.heads, dim).transpose(0, 1)
            for name in "qkv"
        )
        angles = torch.arange(count)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
        cos, sin = (torch.cat((part, part), 1) for part in (angles.cos(), angles.sin()))
        q, k = (x * cos + torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), -1) * sin for x in (q, k))
        scores = q @ k.transpose(1, 2) * dim**-0.5 + torch.full((count, count), -torch.inf).triu(1)
        return (scores.softmax(-1) @ v).transpose(0, 1).reshape(count, -1)

    def _weight(self, name: str) -> torch.Tensor:
        return self.tensors[f"{name}.weight"]


@pytest.mark.parametrize("backend", ["cpu", pytest.param("reference", marks=pytest.mark.deep)])
def test_an_eagle_head_computes_its_formula(tmp_path: Path, backend: str) -> None:
    target = make_model(tmp_path / "model", "qwen3", num_hidden_layers=3)
    folder = make_eagle(tmp_path / "eagle", target, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 0, 1]})
    check_formula(target, f"eagle:{folder}", EagleFormula(folder, target), backend)


@pytest.mark.parametrize("architecture", ["glm4_moe", "qwen3_5", pytest.param("deepseek_v3", marks=pytest.mark.deep)])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.deep)])
def test_drafts_of_a_predicting_layer_change_nothing(tmp_path: Path, architecture: str, dtype: str) -> None:
    """With penalties, seeds and forks, in a small pool that preempts."""
    folder = make_mtp_model(tmp_path / "model", architecture, agrees=True)
    plain = answers_of(make_runner(folder, dtype))
    runner = make_speculating(folder, dtype=dtype, num_blocks=40, max_num_batched_tokens=24)
    for depth in (2, 3):
        assert answers_of(runner, depth, burst_s=0.02) == plain
    counts = runner.draft_counts
    assert counts.accepted[0] > 0.6 * counts.drafted[0] > 0


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.deep)])
def test_drafts_of_an_eagle_head_change_nothing(mtp_dir: Path, tmp_path: Path, dtype: str) -> None:
    folder = make_eagle(tmp_path / "eagle", mtp_dir, agrees=True)
    plain = answers_of(make_runner(mtp_dir, dtype))
    runner = make_speculating(mtp_dir, f"eagle:{folder}", dtype=dtype, num_blocks=40, max_num_batched_tokens=24)
    for depth in (2, 3):
        assert answers_of(runner, depth, burst_s=0.02) == plain
    counts = runner.draft_counts
    assert counts.accepted[0] > 0.3 * counts.drafted[0] > 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM is no EAGLE-3 head"),
        ({"num_hidden_layers": 2}, "num_hidden_layers: 2 is not supported"),
        ({"norm_before_residual": True}, "norm_before_residual: true is not supported"),
        ({"vocab_size": 999}, "vocab_size: 999 .* is above the 211 of the model"),
        ({"eagle_config": {}}, r"layer_ids: \[2, 1, 0\] must be 3 layers"),
        ({"hidden_size": 32}, "tensor .* has shape"),
        ({"draft_vocab_size": 100}, "tensor .* has shape"),
    ],
)
def test_folders_that_are_no_head_of_the_model_are_refused(
    mtp_dir: Path, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    folder = make_eagle(tmp_path / "eagle", mtp_dir, **fields)
    with pytest.raises(CheckpointError, match=message):
        make_runner(mtp_dir, speculate=f"eagle:{folder}")


def test_a_cached_prefix_has_the_entries_of_the_head(mtp_dir: Path) -> None:
    runner = make_speculating(mtp_dir)
    answers, shares = [], []
    for _ in range(2):
        runner.draft_counts.drafted[:] = runner.draft_counts.accepted[:] = 0
        system = System(runner)
        system.add(PROMPT * 3, StopCondition(30, ignore_eos=True), seed=4)
        answers.append(list(system.run().values()))
        shares.append(runner.draft_counts.accepted.sum() / runner.draft_counts.drafted.sum())
    assert answers[0] == answers[1]
    assert shares[1] > 0.5


def test_updated_weights_have_their_head(mtp_dir: Path, tmp_path: Path) -> None:
    """Also after a sleep, and with the tensors of the head in the update."""
    runner = make_speculating(mtp_dir)
    before = answers_of(runner)
    runner.sleep(("weights",))
    assert runner._drafts._proposer.head is None
    runner.activate(runner.stage(1, ()))
    runner._drafts.counts.accepted[:] = 0
    assert answers_of(runner) == before
    assert runner.draft_counts.accepted.sum() > 0
