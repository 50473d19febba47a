"""Train the small reference model: a Llama that reads novels and uses its context.

    python examples/train_reference_model.py --text novels.tar.xz --tokenizer MODEL --output RUN \
        --minutes 60

Text is tokenised once into a cached uint16 file. Synthetic documents are mixed in that cannot be
predicted without the context: facts asked for again (rap.evaluation's `documents`) and repeated
passages. Sequence length, distance and share of these documents follow `Recipe`.

The batch of a step depends on the seed, the step and the progress alone, so a run with a token
budget repeats exactly; one with a time budget depends on the speed of the machine. A run that is
started again goes on from its last checkpoint in `--output`; `--init` takes only the weights.

Shapes: B rows, T tokens.
"""

import argparse
import json
import math
import os
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from numpy.random import Generator
from torch.nn import functional as F
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rap.evaluation.retrieval import documents
from rap.evaluation.retrieval.documents import Document

SHAPE = LlamaConfig(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    tie_word_embeddings=True,
    bos_token_id=0,
    eos_token_id=0,
)
COPIED, NOISE = 3, 4  # kinds beside those of documents: second time of a passage, shuffled tokens
WEIGHTS = [1.0, 0.0, 4.0, 1.0, 0.0]  # of the loss: text, stated, answer, copied, noise


@dataclass
class Recipe:
    """Hyper-parameters; every one is a flag. Curricula are functions of the progress in [0, 1]."""

    minutes: float = 0.0  # budget in time, or
    tokens: float = 0.0  # in tokens
    seed: int = 0
    batch: int = 8192  # tokens per step
    micro: int = 4096  # tokens per forward pass
    lr: float = 3e-3
    decay: float = 0.1
    warmup: float = 0.01
    cooldown: float = 0.4
    threads: int = 2
    checkpoint: float = 90.0  # seconds

    def length(self, step: int, progress: float) -> int:
        """Tokens per row: short until copying is learned, then in turn short and long."""
        parts = ((0.8, (1024, 2048)), (0.45, (512, 512, 1024, 2048)), (0.13, (512,)), (0.0, (256,)))
        lengths = next(lengths for start, lengths in parts if progress >= start)
        return lengths[step % len(lengths)]

    def reach(self, length: int, progress: float) -> int:
        """Longest distance asked for; it grows over the first part of the run to most of a row."""
        return int(min(length * 0.85, 32 * (length / 32) ** min(1.0, progress / 0.13)))

    def shares(self, progress: float) -> list[float]:
        """Shares of rows with recall and with copies, and of copies that are shuffled tokens."""
        points = [0.0, 0.1, 0.2, 0.75, 0.8]
        recalls, copies = [0.3, 0.25, 0.1, 0.1, 0.06], [0.3, 0.25, 0.1, 0.1, 0.24]
        shuffled = [0.5, 0.5, 0.5, 0.5, 0.2]
        return [float(np.interp(progress, points, y)) for y in (recalls, copies, shuffled)]

    def lr_at(self, progress: float) -> float:
        """Warm-up, plateau, linear cool-down."""
        warm, left = (progress + 1e-4) / self.warmup, (1.0 - progress) / self.cooldown
        return self.lr * max(0.01, min(1.0, warm, left))


def read_texts(path: Path) -> Iterator[str]:
    """The text files of a folder or a tar archive, in order of name."""
    if path.is_dir():
        yield from (file.read_text("utf-8") for file in sorted(path.rglob("*.txt")))
        return
    with tarfile.open(path) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            file = archive.extractfile(member) if member.isfile() else None
            if file is not None:
                yield file.read().decode("utf-8")


def token_file(text: Path, tokenizer: AutoTokenizer, cache: Path) -> np.ndarray:
    """All texts as one uint16 stream, each followed by the end token; tokenised once."""
    if not cache.exists():
        with open(cache.with_suffix(".part"), "wb") as out:
            for document in tqdm(read_texts(text), desc="tokenise", unit="file"):
                ids = tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
                np.array([*ids, tokenizer.eos_token_id], np.uint16).tofile(out)
        cache.with_suffix(".part").rename(cache)
    return np.memmap(cache, np.uint16, "r")


class Rows:
    """Makes training rows: text, recall and copy documents; `reach` is the longest distance."""

    def __init__(self, stream: np.ndarray, tokenizer: AutoTokenizer, recipe: Recipe) -> None:
        self.stream, self.recipe = stream, recipe
        self.writer = documents.FactWriter(tokenizer)

    def text_ids(self, rng: Generator, length: int) -> np.ndarray:
        start = int(rng.integers(0, len(self.stream) - length))
        return np.array(self.stream[start : start + length], np.int64)

    def recall_row(self, rng: Generator, length: int, reach: int) -> Document:
        """Text with facts, each asked for once, near ones more often than far ones."""
        filler = self.text_ids(rng, length)
        most = min(length // 28, len(documents.NAMES))
        count = round(math.exp(rng.uniform(0.0, math.log(most))))
        events = []
        for name, number in documents.draw_facts(self.writer, rng, count):
            distance = int(4 + (reach - 4) * rng.random() ** 2)
            start = int(rng.integers(0, max(length - distance - 26 * count, 1)))
            events.append((start, *self.writer.fact(name, number)))
            events.append((min(start + distance, length), *self.writer.question(name, number)))
        return documents.interleave(filler, events)

    def copy_row(self, rng: Generator, length: int, reach: int, shuffled: float) -> Document:
        """Passages read twice, with text between; a share of them is shuffled tokens."""
        ids, kinds, done = [], [], 0
        while done < length:
            size = int(math.exp(rng.uniform(math.log(8), math.log(max(reach / 2, 16)))))
            gap = int(rng.integers(0, max(reach - size, 1)))
            noise = rng.random() < shuffled
            passage = self.text_ids(rng, 4 * size if noise else size)
            if noise:
                passage = rng.permutation(passage)[:size]
            ids += [passage, self.text_ids(rng, gap), passage]
            kinds += [np.full(size, NOISE if noise else 0), np.zeros(gap), np.full(size, COPIED)]
            kinds[-1][0] = NOISE  # where the repetition starts cannot be known
            done += 2 * size + gap
        return Document(np.concatenate(ids), np.concatenate(kinds).astype(np.int64))

    def batch(self, step: int, progress: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and kinds [B, T + 1] of a step."""
        rng = np.random.default_rng([self.recipe.seed, step])
        length = self.recipe.length(step, progress)
        reach = self.recipe.reach(length, progress)
        (recalls, copies, shuffled), rows = self.recipe.shares(progress), []
        for _ in range(self.recipe.batch // length):
            if (draw := rng.random()) < recalls:
                row = self.recall_row(rng, length + 1, reach)
            elif draw < recalls + copies:
                row = self.copy_row(rng, length + 1, reach, shuffled)
            else:
                row = Document(self.text_ids(rng, length + 1), np.zeros(length + 1, np.int64))
            rows.append((row.ids[: length + 1], row.kinds[: length + 1]))
        ids, kinds = (torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))
        return ids, kinds


def make_optimizers(model: LlamaForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    muon = torch.optim.Muon(
        matrices, lr=recipe.lr, weight_decay=recipe.decay, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(others, lr=recipe.lr, weight_decay=0.0, betas=(0.9, 0.98))
    return [muon, adamw]


class Trainer:
    """Model, optimizers, position of the run, and its checkpoints."""

    def __init__(self, model: LlamaForCausalLM, recipe: Recipe, output: Path) -> None:
        self.model, self.recipe, self.output = model, recipe, output
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model.to(self.device).train()
        self.optimizers = make_optimizers(model, recipe)
        self.step, self.seen, self.seconds = 0, 0, 0.0
        self.weights = torch.tensor(WEIGHTS, device=self.device)
        self.losses = torch.compile(self._losses, dynamic=False)
        if (output / "last.pt").exists():
            self._restore()

    @property
    def progress(self) -> float:
        spent = self.seconds / 60 / self.recipe.minutes if self.recipe.minutes else 0.0
        return max(spent, self.seen / self.recipe.tokens if self.recipe.tokens else 0.0)

    def _losses(self, ids_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            logits = self.model(ids_BT, use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets_BT.flatten(), reduction="none")

    def train_step(self, ids: torch.Tensor, kinds: torch.Tensor) -> dict[str, float]:
        """One optimizer step; returns the mean loss (nats) by kind of token."""
        by_kind = torch.zeros(2, len(WEIGHTS), device=self.device)
        rows = max(1, self.recipe.micro // (ids.shape[1] - 1))
        for x, k in zip(ids.split(rows), kinds.split(rows), strict=True):
            x, k = x.to(self.device), k[:, 1:].flatten().to(self.device)
            losses = self.losses(x[:, :-1].contiguous(), x[:, 1:].contiguous())
            ((losses * self.weights[k]).sum() / (kinds.numel() - len(kinds))).backward()
            by_kind[0].index_add_(0, k, losses.detach())
            by_kind[1].index_add_(0, k, torch.ones_like(losses))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.recipe.lr_at(self.progress)
            optimizer.step()
            optimizer.zero_grad()
        names = {"text": documents.TEXT, "answer": documents.ANSWER, "copied": COPIED}
        means = (by_kind[0] / by_kind[1]).tolist()
        return {name: means[kind] for name, kind in names.items() if by_kind[1, kind]}

    def save(self, tokenizer: AutoTokenizer) -> None:
        """The state to go on from (`last.pt`) and the model in bf16 (`model/`)."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "position": (self.step, self.seen, self.seconds),
        }
        torch.save(state, self.output / "last.part")
        os.replace(self.output / "last.part", self.output / "last.pt")
        final = LlamaForCausalLM(self.model.config).to(torch.bfloat16)
        final.load_state_dict(self.model.state_dict())
        final.save_pretrained(self.output / "model")
        tokenizer.save_pretrained(self.output / "model")

    def _restore(self) -> None:
        state = torch.load(self.output / "last.pt", map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.seen, self.seconds = state["position"]

    def run(self, rows: Rows, tokenizer: AutoTokenizer) -> None:
        """Train until the budget is spent; log one JSON line every ten steps."""
        bar = tqdm(total=100.0, initial=100 * self.progress, unit="%", mininterval=5)
        clock = saved = time.monotonic()
        with open(self.output / "log.jsonl", "a", buffering=1) as log:
            while self.progress < 1.0:
                progress = self.progress
                ids, kinds = rows.batch(self.step, progress)
                losses = self.train_step(ids, kinds)
                now = time.monotonic()
                self.step, self.seen = self.step + 1, self.seen + kinds.numel() - len(kinds)
                self.seconds, clock = self.seconds + now - clock, now
                bar.update(min(100.0, 100 * self.progress) - bar.n)
                if self.step % 10 == 0:
                    record = {"step": self.step, "tokens": self.seen, "seconds": self.seconds}
                    record |= {"length": kinds.shape[1] - 1, **losses}
                    log.write(json.dumps(record) + "\n")
                if now - saved > self.recipe.checkpoint:
                    self.save(tokenizer)
                    saved = now
        self.save(tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, required=True, help="folder or tar of text files")
    parser.add_argument("--tokenizer", required=True, help="model folder or hub name")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--init", help="checkpoint to start from instead of random weights")
    for field in fields(Recipe):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    args = vars(parser.parse_args())
    recipe = Recipe(**{field.name: args[field.name] for field in fields(Recipe)})
    if not (recipe.minutes or recipe.tokens):
        parser.error("give a budget: --minutes or --tokens")
    args["output"].mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(recipe.threads)
    torch.manual_seed(recipe.seed)
    tokenizer = AutoTokenizer.from_pretrained(args["tokenizer"])
    stream = token_file(args["text"], tokenizer, args["output"] / "tokens.bin")
    model = LlamaForCausalLM(SHAPE)
    if args["init"]:
        model = AutoModelForCausalLM.from_pretrained(args["init"], dtype=torch.float32)
    Trainer(model, recipe, args["output"]).run(Rows(stream, tokenizer, recipe), tokenizer)


if __name__ == "__main__":
    main()
