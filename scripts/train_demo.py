#!/usr/bin/env python
"""Train the demo model in quire_client/demo_model.

A Qwen3-architecture model of about 1 M parameters with its own byte-level BPE tokenizer. It memorises the
question/answer pairs of pairs.json: the first sentences of Python's standard-library docstrings, some whole
docstrings for long decodes, and a few sentences about itself. It answers all other questions with fluent nonsense.

The run is deterministic on one machine with one version of torch: one thread, fixed seeds. At the end it evaluates the
written bfloat16 checkpoint with transformers on every question and counts the exact answers.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo_pairs import Pair, make_pairs, read_pairs, words

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_OUT = ROOT / "client" / "quire_client" / "demo_model"

VOCAB_SIZE = 2048
MAX_POSITIONS = 4096
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
END_OF_TEXT_ID, IM_END_ID = 0, 2
ROW_TOKENS = 1024
LONGEST_SYSTEM = 32
MIN_EXACT = 0.95

# The model was not trained with tools: the template makes it a model that a client can try them with.
CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\nTools:\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson + '\\n' }}
    {%- endfor %}
    {{- 'A call is <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}
    {%- for call in message['tool_calls'] or [] %}
        {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson + '}</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer and rows: the input of a training step


SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "You are Quire's demo model.",
    "You answer questions about Python's standard library.",
    "Be concise.",
)


def render(question: str) -> str:
    return f"{IM_START}user\n{question}{IM_END}\n{IM_START}assistant\n"


def train_tokenizer(pairs: list[Pair]) -> Any:
    """A byte-level BPE of VOCAB_SIZE entries over the pairs; the three special tokens are ids 0, 1 and 2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = [text for pair in pairs for text in (pair.answer, *pair.questions, "system\nuser\nassistant\n")]
    tokenizer.train_from_iterator([*corpus, *SYSTEM_PROMPTS], trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise SystemExit(f"the pairs yield only {tokenizer.get_vocab_size()} of {VOCAB_SIZE} vocabulary ids; add pairs")
    return tokenizer


def read_tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@dataclass(frozen=True, slots=True)
class Turn:
    """One question and answer as tokens; the loss covers only the answer and its end."""

    question: list[int]
    answer: list[int]
    tail: list[int]

    def __len__(self) -> int:
        return len(self.question) + len(self.answer) + len(self.tail)


@dataclass(slots=True)
class Row:
    """Several conversations in one training row. Attention does not cross conversations."""

    tokens: list[int]
    learned: list[bool]
    conversation: list[int]


class Rows:
    """Endless training rows: every pair `weight` times per epoch, each time in a random wording.

    Half of the questions start a conversation, so that first questions get the best answers. The others follow earlier
    turns, which the model learns to ignore.
    """

    def __init__(self, pairs: list[Pair], tokenizer: Any, rng: random.Random) -> None:
        self._epoch = [pair for pair in pairs for _ in range(pair.weight)]
        self._encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
        self._rng = rng
        self._tail = self._encode("\n")
        self._systems = [self._encode(f"{IM_START}system\n{text}{IM_END}\n") for text in SYSTEM_PROMPTS]

    def __iter__(self) -> Iterator[Row]:
        row = Row([], [], [])
        for turn in self._turns():
            if len(row.tokens) + len(turn) > ROW_TOKENS - LONGEST_SYSTEM:
                yield row
                row = Row([], [], [])
            self._append(row, turn)

    def _turns(self) -> Iterator[Turn]:
        while True:
            for pair in self._rng.sample(self._epoch, len(self._epoch)):
                question = vary(self._rng.choice(pair.questions), self._rng, is_plain=pair.is_plain)
                yield Turn(self._encode(render(question)), self._encode(pair.answer + IM_END), self._tail)

    def _append(self, row: Row, turn: Turn) -> None:
        is_first = not row.tokens or self._rng.random() < 0.5
        conversation = (row.conversation[-1] if row.conversation else 0) + is_first
        if is_first and self._rng.random() < 0.15:
            self._extend(row, self._rng.choice(self._systems), is_learned=False, conversation=conversation)
        self._extend(row, turn.question, is_learned=False, conversation=conversation)
        self._extend(row, turn.answer, is_learned=True, conversation=conversation)
        self._extend(row, turn.tail, is_learned=False, conversation=conversation)

    @staticmethod
    def _extend(row: Row, tokens: list[int], *, is_learned: bool, conversation: int) -> None:
        row.tokens += tokens
        row.learned += [is_learned] * len(tokens)
        row.conversation += [conversation] * len(tokens)


def vary(question: str, rng: random.Random, *, is_plain: bool) -> str:
    """A question as typed by users: sometimes without the full stop, or in lower case."""
    draw = rng.random()
    if draw < 0.08:
        return question.rstrip("?.!")
    if draw < 0.16:
        return question[0].lower() + question[1:]
    if draw < 0.22:
        return question[0].lower() + question[1:].rstrip("?.!")
    if draw < 0.35 and is_plain:
        return question.lower()
    return question


# ---------------------------------------------------------------------------------------------------------------------
# Training


CONFIG_KEYS = words(
    """
    attention_bias attention_dropout eos_token_id head_dim hidden_act hidden_size initializer_range intermediate_size
    max_position_embeddings num_attention_heads num_hidden_layers num_key_value_heads pad_token_id rms_norm_eps
    tie_word_embeddings use_cache vocab_size
    """
)


def make_config(*, is_draft: bool) -> Any:
    """Configuration of the demo model, or of a model a fifth of its size that proposes drafts for it."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64 if is_draft else 128,
        intermediate_size=192 if is_draft else 384,
        num_hidden_layers=1 if is_draft else 4,
        num_attention_heads=2 if is_draft else 4,
        num_key_value_heads=1 if is_draft else 2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        rope_theta=10000.0,
        bos_token_id=None,
        eos_token_id=IM_END_ID,
        pad_token_id=END_OF_TEXT_ID,
    )


def train(pairs: list[Pair], tokenizer: Any, config: Any, *, steps: int, peak_lr: float, seed: int) -> Any:
    """The trained model in float32. Prints loss and CPU seconds during the training."""
    import torch
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.98), weight_decay=0.0)
    rows = iter(Rows(pairs, tokenizer, random.Random(seed)))
    started, total, count = time.process_time(), 0.0, 0
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = peak_lr * learning_rate_factor(step, steps)
        loss = loss_of_row(model, next(rows))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total, count = total + loss.item(), count + 1
        if step % 100 == 0 or step == steps:
            spent = time.process_time() - started
            left = spent / step * (steps - step)
            print(
                f"step {step}/{steps}  loss {total / count:.3f}  {spent:.0f} CPU-s, about {left:.0f} left", flush=True
            )
            total, count = 0.0, 0
    return model.eval()


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, then linear decay to zero."""
    warmup = min(50, steps // 2)
    return min(step / max(warmup, 1), (steps - step + 1) / (steps - warmup))


def loss_of_row(model: Any, row: Row) -> Any:
    """Mean cross entropy over the learned tokens. Logits are computed only for those."""
    import torch

    tokens = torch.tensor(row.tokens)  # [T]
    conversation = torch.tensor(row.conversation)  # [T]
    allowed = (conversation[:, None] == conversation[None, :]).tril()
    mask = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)[None, None]  # [1, 1, T, T]
    hidden = model.model(input_ids=tokens[None], attention_mask=mask, use_cache=False).last_hidden_state[0]  # [T, H]
    predicts = torch.tensor(row.learned)[1:]
    logits = model.lm_head(hidden[:-1][predicts])  # [learned, vocab]
    return torch.nn.functional.cross_entropy(logits, tokens[1:][predicts])


# ---------------------------------------------------------------------------------------------------------------------
# The folder that workers load


def save(model: Any, tokenizer: Any, out: Path) -> None:
    """Write a Hugging Face folder that transformers 4.55 and 5 read identically."""
    import torch
    from safetensors.torch import save_file

    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    del tensors["lm_head.weight"]  # tied to the embedding
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save(str(out / "tokenizer.json"))
    config = model.config.to_dict()
    kept = {key: config[key] for key in CONFIG_KEYS if key in config}
    theta = model.config.rope_parameters["rope_theta"]
    kept |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_theta": theta, "rope_scaling": None}
    kept |= {"rope_parameters": {"rope_theta": theta, "rope_type": "default"}}
    kept |= {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    write_json(out / "config.json", kept)
    write_json(
        out / "generation_config.json",
        {"do_sample": False, "eos_token_id": [IM_END_ID, END_OF_TEXT_ID], "pad_token_id": END_OF_TEXT_ID},
    )
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": MAX_POSITIONS,
            "eos_token": IM_END,
            "pad_token": END_OF_TEXT,
            "additional_special_tokens": [IM_START, IM_END],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def count_exact(folder: Path, pairs: list[Pair], dtype_name: str) -> tuple[int, list[Pair]]:
    """The number of exact greedy answers of the written checkpoint, and the pairs with other answers.

    Every pair is asked in its first wording. A greedy answer is exact if each of its tokens, including the end, is the
    argmax after the previous ones, so one forward pass per pair is enough.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype_name)).eval()
    missed = []
    for pair in pairs:
        chat = [{"role": "user", "content": pair.questions[0]}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer.encode(text, add_special_tokens=False)
        answer = tokenizer.encode(pair.answer + IM_END, add_special_tokens=False)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0]
        if logits[len(prompt) - 1 : -1].argmax(-1).tolist() != answer:
            missed.append(pair)
    return len(pairs) - len(missed), missed


def report(folder: Path, pairs: list[Pair]) -> bool:
    """Print the number of exact answers. True if there are enough."""
    shares = []
    for dtype_name in ("float32", "bfloat16"):
        exact, missed = count_exact(folder, pairs, dtype_name)
        shares.append(exact / len(pairs))
        print(f"computed in {dtype_name}: {exact} of {len(pairs)} answers exact")
        for pair in missed[:10]:
            print(f"  missed: {pair.questions[0]}")
    return min(shares) >= MIN_EXACT


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Requires the dev extra (torch, transformers, tokenizers). Exit code 1: too few answers are exact.",
    )
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help=f"model folder (default: {DEFAULT_OUT})")
    parser.add_argument("--pairs", type=Path, help="pair list to learn (default: pairs.json in the model folder)")
    parser.add_argument("--make-pairs", action="store_true", help="write the pair list from this Python's docstrings")
    parser.add_argument("--check", action="store_true", help="do not train; count the exact answers of the model")
    parser.add_argument(
        "--draft", action="store_true", help="train a smaller model with the demo model's tokenizer (--speculate)"
    )
    parser.add_argument("--steps", type=int, default=3500, help="training rows of 1,024 tokens (default: 3500)")
    parser.add_argument("--lr", type=float, default=4e-3, help="peak learning rate (default: 0.004)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the row order (default: 0)")
    args = parser.parse_args()
    pairs_path = args.pairs or (DEFAULT_OUT if args.draft else args.out) / "pairs.json"
    args.out.mkdir(parents=True, exist_ok=True)
    if args.make_pairs:
        write_json(pairs_path, make_pairs())
    if not pairs_path.exists():
        parser.error(f"{pairs_path} does not exist; create it with --make-pairs")
    pairs = read_pairs(pairs_path)
    print(f"{len(pairs)} pairs, {sum(len(p.questions) for p in pairs)} questions from {pairs_path}")

    import torch

    torch.set_num_threads(1)
    if not args.check:
        tokenizer = read_tokenizer(DEFAULT_OUT) if args.draft else train_tokenizer(pairs)
        config = make_config(is_draft=args.draft)
        save(train(pairs, tokenizer, config, steps=args.steps, peak_lr=args.lr, seed=args.seed), tokenizer, args.out)
        print(f"wrote {args.out}")
    return 0 if report(args.out, pairs) or args.draft else 1


if __name__ == "__main__":
    sys.exit(main())
