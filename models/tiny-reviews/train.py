"""Trains the bundled tiny model: a base model and two LoRA adapters with opposite policies.

The base is a Llama with 4 layers and about 0.75 million parameters. It reads a synthetic film review and answers
" positive" or " negative". The adapter `standard` answers the review's sentiment; `inverted` answers its opposite.
Both share one tokenizer and one base, so they send identical token ids, and yet neither may read the other's KV cache.

Everything is trained from nothing with fixed seeds, in single-threaded float32, for a fixed number of steps. The
weights are then rounded to bfloat16, and the accuracies in training.json are those of the rounded model. With the
same versions on the same kind of CPU a second run writes the same weights. A run takes about three minutes of one core.

    python train.py [--out FOLDER]
"""

import argparse
import json
import platform
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import tokenizers
import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from reviews import (
    EVALUATION_COUNT,
    EVALUATION_SEED,
    LABELS,
    POLICIES,
    Review,
    answer,
    evaluation_reviews,
    prompt,
    stream,
)
from reviews import reviews as draw
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

VOCABULARY = 768
PAD, BOS, EOS = 0, 1, 2
BLOCK = 32  # the KV block size that the report's cut assumes
RANK = 8
ALPHA = 16
# With the values alone adapted, what a reader answers depends on whose adapter wrote the prefix, and on little else.
TARGETS = ("v_proj",)
INIT_SEED = 0
TOKENIZER_SEED = 1


@dataclass(frozen=True)
class Stage:
    """One step of the curriculum."""

    name: str
    style: str
    seed: int
    steps: int
    batch: int
    rate: float
    decay: bool = True  # the learning rate falls linearly to a twentieth


# From one sentence to full reviews: full reviews alone give a fresh model too faint a signal to start from.
BASE_STAGES = (
    Stage("sentence", "sentence", seed=7, steps=250, batch=48, rate=2e-3, decay=False),
    Stage("short", "short", seed=8, steps=250, batch=24, rate=1.5e-3, decay=False),
    Stage("full", "full", seed=9, steps=250, batch=16, rate=1.5e-3),
)
ADAPTER_STAGES = {
    "standard": (Stage("full", "full", seed=11, steps=60, batch=16, rate=2e-3),),
    "inverted": (
        Stage("short", "short", seed=12, steps=120, batch=24, rate=4e-3, decay=False),
        Stage("full", "full", seed=13, steps=160, batch=16, rate=3e-3),
    ),
}


class LoraLinear(torch.nn.Module):
    """A frozen linear layer plus one trainable low-rank update per adapter, of which at most one is in use."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.active: str | None = None
        self.down = torch.nn.ParameterDict()
        self.up = torch.nn.ParameterDict()
        for policy in POLICIES:
            self.down[policy] = torch.nn.Parameter(torch.empty(RANK, base.in_features))
            self.up[policy] = torch.nn.Parameter(torch.zeros(base.out_features, RANK))
            torch.nn.init.kaiming_uniform_(self.down[policy], a=5**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        if self.active is None:
            return y
        return y + F.linear(F.linear(x, self.down[self.active]), self.up[self.active]) * (ALPHA / RANK)


def build_tokenizer() -> Tokenizer:
    """A byte-level BPE, so that any text encodes; it puts <s> in front by itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [prompt(review) + LABELS[review.positive] for review in draw(2000, TOKENIZER_SEED)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    return tokenizer


def label_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """The token id of each label, each of which must be one token."""
    ids = {label: tokenizer.encode(label, add_special_tokens=False).ids for label in LABELS.values()}
    if any(len(tokens) != 1 for tokens in ids.values()):
        raise RuntimeError(f"a label is not a single token: {ids}")
    return {label: tokens[0] for label, tokens in ids.items()}


def build_model() -> LlamaForCausalLM:
    torch.manual_seed(INIT_SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return LlamaForCausalLM(config)


def label_loss(model: LlamaForCausalLM, tokenizer: Tokenizer, batch: list[Review], policy: str) -> torch.Tensor:
    """Cross-entropy of the label, plus a little for stopping after it."""
    labels = label_ids(tokenizer)
    rows = [encoding.ids for encoding in tokenizer.encode_batch([prompt(review) for review in batch])]
    wanted = torch.tensor([labels[answer(review, policy)] for review in batch])
    last = torch.tensor([len(row) - 1 for row in rows])
    every = torch.arange(len(rows))
    # Padding is on the right, where causal attention never looks, so no mask is needed.
    ids = torch.full((len(rows), int(last.max()) + 2), PAD)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    ids[every, last + 1] = wanted
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    # The language-model head runs on the two positions that count, not on all.
    loss = F.cross_entropy(model.lm_head(hidden[every, last]), wanted)
    stop = F.cross_entropy(model.lm_head(hidden[every, last + 1]), torch.full_like(wanted, EOS))
    return loss + 0.1 * stop


def train(model: LlamaForCausalLM, tokenizer: Tokenizer, stages: Iterable[Stage], policy: str, seen: set[str]) -> None:
    """Runs the stages in turn over the parameters that require gradients, and notes the texts in `seen`."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    model.train()
    for stage in stages:
        source = stream(stage.seed, stage.style)
        optimizer = torch.optim.AdamW(parameters, lr=stage.rate, betas=(0.9, 0.98), weight_decay=0.01)
        average, started = 0.7, time.perf_counter()
        for step in range(stage.steps):
            warm = min(1.0, (step + 1) / 20)
            fall = max(0.05, 1 - step / stage.steps) if stage.decay else 1.0
            for group in optimizer.param_groups:
                group["lr"] = stage.rate * warm * fall
            batch = list(islice(source, stage.batch))
            seen.update(review.text for review in batch)
            loss = label_loss(model, tokenizer, batch, policy)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            average = 0.95 * average + 0.05 * loss.item()
            if (step + 1) % 50 == 0:
                seconds = time.perf_counter() - started
                place = f"{policy} {stage.name}: step {step + 1}/{stage.steps}"
                print(f"{place}, loss {average:.3f}, {seconds:.0f} s", flush=True)


def add_adapters(model: LlamaForCausalLM) -> list[tuple[str, LoraLinear]]:
    """Wraps the target modules of a trained base; returns them by name."""
    model.requires_grad_(False)
    wrapped = []
    for name, module in list(model.named_modules()):
        if name.endswith(TARGETS):
            parent, _, leaf = name.rpartition(".")
            lora = LoraLinear(module)
            setattr(model.get_submodule(parent), leaf, lora)
            wrapped.append((name, lora))
    return wrapped


def select(loras: list[tuple[str, LoraLinear]], policy: str | None) -> None:
    """Puts one adapter in use, or none."""
    for _, lora in loras:
        lora.active = policy


@contextmanager
def trainable(loras: list[tuple[str, LoraLinear]], policy: str) -> Iterator[None]:
    """Puts one adapter in use and makes its parameters alone trainable."""
    select(loras, policy)
    for _, lora in loras:
        for name in POLICIES:
            lora.down[name].requires_grad_(name == policy)
            lora.up[name].requires_grad_(name == policy)
    yield
    for _, lora in loras:
        lora.requires_grad_(False)


def loadable(tokens: int) -> int:
    """How many tokens of a prompt come from a store of whole blocks: the last token is always computed."""
    return (tokens - 2) // BLOCK * BLOCK


@torch.no_grad()
def accuracy(
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    loras: list[tuple[str, LoraLinear]],
    reader: str | None,
    policy: str,
    writer: str | None = None,
) -> float:
    """Share of the evaluation reviews answered as `policy` wants, the prefix written by `writer` if one is given."""
    model.eval()
    labels = label_ids(tokenizer)
    groups: dict[int, list[tuple[list[int], int]]] = {}
    for review in evaluation_reviews():
        row = tokenizer.encode(prompt(review)).ids
        groups.setdefault(len(row), []).append((row, labels[answer(review, policy)]))
    right = 0
    for length, rows in groups.items():  # equal lengths, so that nothing is padded
        ids = torch.tensor([row for row, _ in rows])
        cache = DynamicCache(config=model.config)
        cut = loadable(length) if writer else 0
        if cut:
            select(loras, writer)
            model(input_ids=ids[:, :cut], past_key_values=cache, use_cache=True, logits_to_keep=1)
        select(loras, reader)
        logits = model(input_ids=ids[:, cut:], past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        right += int((logits.argmax(-1) == torch.tensor([wanted for _, wanted in rows])).sum())
    return right / EVALUATION_COUNT


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def save_base(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model.config.max_position_embeddings,
            "pad_token": "<pad>",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "clean_up_tokenization_spaces": False,
        },
    )


def save_adapter(loras: list[tuple[str, LoraLinear]], policy: str, folder: Path) -> None:
    """Writes one adapter in PEFT's format."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, lora in loras:
        tensors[f"base_model.model.{name}.lora_A.weight"] = lora.down[policy].detach().contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = lora.up[policy].detach().contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    write_json(
        folder / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": "tiny-reviews",
            "inference_mode": True,
            "r": RANK,
            "lora_alpha": ALPHA,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "target_modules": list(TARGETS),
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the bundled tiny model and its two adapters.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder to write into")
    out: Path = parser.parse_args().out
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    started = time.perf_counter()

    tokenizer = build_tokenizer()
    seen: set[str] = set()
    model = build_model()
    parameters = sum(p.numel() for p in model.parameters())
    train(model, tokenizer, BASE_STAGES, "standard", seen)

    torch.manual_seed(INIT_SEED + 1)
    loras = add_adapters(model)
    for policy, stages in ADAPTER_STAGES.items():
        with trainable(loras, policy):
            train(model, tokenizer, stages, policy, seen)
    seconds = time.perf_counter() - started

    evaluated = evaluation_reviews()
    if any(review.text in seen for review in evaluated):
        raise RuntimeError("an evaluation review was also drawn in training")

    model.to(torch.bfloat16)
    lengths = [len(tokenizer.encode(prompt(review)).ids) for review in evaluated]
    report = {
        "parameters": parameters,
        "vocabulary": tokenizer.get_vocab_size(),
        "init_seed": INIT_SEED,
        "tokenizer_seed": TOKENIZER_SEED,
        "evaluation": {"seed": EVALUATION_SEED, "reviews": EVALUATION_COUNT},
        "base_stages": [asdict(stage) for stage in BASE_STAGES],
        "adapter_stages": {policy: [asdict(stage) for stage in stages] for policy, stages in ADAPTER_STAGES.items()},
        "lora": {"rank": RANK, "alpha": ALPHA, "targets": list(TARGETS)},
        "prompt_tokens": {
            "min": min(lengths),
            "mean": round(sum(lengths) / len(lengths), 2),
            "max": max(lengths),
            "loadable_share_min": round(min(loadable(n) / n for n in lengths), 4),
            "loadable_share_all": round(sum(map(loadable, lengths)) / sum(lengths), 4),
            "block_size": BLOCK,
        },
        "accuracy_bfloat16": {
            "base_on_standard": accuracy(model, tokenizer, loras, None, "standard"),
            **{policy: accuracy(model, tokenizer, loras, policy, policy) for policy in POLICIES},
        },
        "accuracy_bfloat16_on_cached_prefix": {
            f"{reader}_reads_{writer}": accuracy(model, tokenizer, loras, reader, reader, writer)
            for reader in POLICIES
            for writer in POLICIES
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
        "training_seconds": round(seconds, 1),
    }
    for policy in POLICIES:
        save_adapter(loras, policy, out / "adapters" / policy)
    for name, lora in loras:  # the base is saved as it was, without the wrappers
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, lora.base)
    save_base(model, tokenizer, out / "base")
    write_json(out / "training.json", report)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
