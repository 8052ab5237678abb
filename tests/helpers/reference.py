"""Hugging Face transformers as the judge of greedy output."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class Reference:
    """A checkpoint in fp32 under transformers."""

    def __init__(self, model: Path, device: str = "cpu") -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.device = device
        self.model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="sdpa"
        )
        self.model = self.model.to(device).eval()
        self._judged: dict[tuple[tuple[int, ...], tuple[int, ...]], int | None] = {}

    def encode(self, text: str) -> list[int]:
        """Token ids as transformers makes them."""
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    def first_difference(self, prompt: list[int], output: list[int]) -> int | None:
        """Index of the first output token that greedy decoding would not have chosen.

        One forward pass over prompt + output: each token must be the argmax of the logits before
        it, which by induction is what token-by-token greedy decoding gives.
        """
        key = (tuple(prompt), tuple(output))
        if key not in self._judged:
            self._judged[key] = self._judge(prompt, output)
        return self._judged[key]

    @torch.inference_mode()
    def _judge(self, prompt: list[int], output: list[int]) -> int | None:
        ids = torch.tensor([prompt + output], device=self.device)
        logits = self.model(ids, logits_to_keep=len(output) + 1).logits[0, :-1]
        wrong = (logits.argmax(-1) != ids[0, len(prompt) :]).nonzero()
        return int(wrong[0]) if len(wrong) else None

    @torch.inference_mode()
    def generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        """Token by token with transformers' own cache, past end-of-sequence."""
        ids = torch.tensor([prompt], device=self.device)
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            min_new_tokens=None,
            eos_token_id=None,
            pad_token_id=0,
        )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens
