"""GRPO on the demo model: Quire makes the samples, this program trains an adapter; each update is a new adapter.

    quire up --adapter-dir /tmp/policy --max-adapters 2
    python examples/grpo.py /tmp/policy --updates 30        # needs torch, transformers, peft

The reward is the share of the letter "e". A sample and its log probabilities are functions of adapter, prompt, seed and
sample index; killing workers or the scheduler meanwhile changes no bit of the weights that this program ends with.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from quire_client import GenerateResult, QuireError
from quire_client.demo import demo_model_dir
from quire_client.sync import Client
from transformers import AutoModelForCausalLM

PROMPTS = ("What does len do?", "import os", "The best way to", "def main():")
GROUP, MAX_TOKENS, CLIP = 4, 12, 0.2


def make_policy() -> Any:
    """The model with a new adapter, the same in each run."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    base = AutoModelForCausalLM.from_pretrained(demo_model_dir(), dtype=torch.float32)
    return get_peft_model(base, LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"])).eval()


def publish(client: Client, policy: Any, folder: Path, update: int) -> str:
    """Load the weights on all workers under a new name. No step mixes two adapters, and no cached block of one is used
    for another."""
    name = f"policy-{update}"
    policy.save_pretrained(str(folder / name))
    retried(lambda: client.load_adapter(name, name))
    if update:
        retried(lambda: client.unload_adapter(f"policy-{update - 1}"))
    return name


def retried(call: Any) -> None:
    """Loading is idempotent: while a worker is lost or starts, try again."""
    for _ in range(600):
        try:
            return call()
        except QuireError as error:
            if "no adapter" in str(error):  # an earlier try has unloaded it
                return None
            last = error
            time.sleep(0.1)
    raise last


def advantages_of(result: GenerateResult) -> torch.Tensor:
    """The rewards of a group, relative to each other."""
    rewards = torch.tensor([sample.text.count("e") / max(1, len(sample.text)) for sample in result.samples])
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


def loss_of(policy: Any, prompt: tuple[int, ...], result: GenerateResult) -> torch.Tensor:
    """The clipped objective of one group, relative to the log probabilities with which the tokens were drawn."""
    losses = []
    for sample, advantage in zip(result.samples, advantages_of(result), strict=True):
        tokens = torch.tensor([*prompt, *sample.token_ids])
        logits = policy(tokens[None]).logits[0, len(prompt) - 1 : -1]
        new = logits.log_softmax(-1).gather(1, tokens[len(prompt) :, None])[:, 0]
        old = torch.tensor([entry.logprob for entry in sample.logprobs])
        ratio = (new - old).exp()
        losses.append(-torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean())
    return torch.stack(losses).mean()


def train(target: str, folder: Path, updates: int) -> None:
    policy = make_policy()
    optimizer = torch.optim.Adam([weight for weight in policy.parameters() if weight.requires_grad], lr=2e-3)
    with Client(target) as client:
        prompts = [tuple(client.tokenize(text).token_ids) for text in PROMPTS]
        for update in range(updates):
            name = publish(client, policy, folder, update)
            results = [
                client.generate(
                    token_ids=list(prompt), adapter=name, n=GROUP, seed=update, temperature=1.0, top_p=1.0,
                    max_tokens=MAX_TOKENS, logprobs=0, logprobs_mode="processed",
                )
                for prompt in prompts
            ]  # fmt: skip
            loss = torch.stack([loss_of(policy, *pair) for pair in zip(prompts, results, strict=True)]).mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            share = sum(sample.text.count("e") for one in results for sample in one.samples) / GROUP / len(prompts)
            print(f"update {update}: loss {loss.item():+.4f}, {share:.2f} letters per sample", flush=True)
    policy.save_pretrained(str(folder / "final"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the workers' --adapter-dir")
    parser.add_argument("--target", default="localhost:50051")
    parser.add_argument("--updates", type=int, default=30)
    args = parser.parse_args()
    train(args.target, args.folder, args.updates)
