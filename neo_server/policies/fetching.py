"""What prompts in the CPU-cache cost beyond their arithmetic.

Their stores; and where they are cut into chunks, each but the first fetches those before it, layer
by layer (``gpu_worker/cuda/chunks.py``).
"""

from __future__ import annotations

from neo_server.cost_model import CostModel
from neo_server.plan import Seqs, SeqView, View


def first_on_cpu(view: View, started: Seqs, on_cpu: set[int], more: float) -> int:
    """Tokens of the prompt that comes first, if it is of the CPU-cache; else 0.

    ``more``: tokens that whoever waits would decode on the CPU; 0 where it goes to the GPU.
    """
    if len(started):
        return int(started.num_tokens[0]) if int(started.id[0]) in on_cpu else 0
    return view.waiting[0].num_tokens if more else 0


def fetching(cost: CostModel, seq: SeqView, chunk: float) -> float:
    """Seconds that a prompt stores, and that its later chunks fetch: half of it each, on average.

    One an iteration: its last chunk ends within one, in which the next prompt's first begins.
    """
    stored = cost.storing(seq.remaining)
    if seq.remaining <= chunk:
        return cost.num_layers * stored
    iterations = seq.remaining / max(chunk, 1.0)
    return cost.num_layers * (stored + iterations * cost.staging(seq.remaining / 2))


def worth_fetching(view: View, cost: CostModel, token: float, seq: SeqView, chunk: float) -> bool:
    """That costs no more than the tokens that it will decode are worth, ``token`` each."""
    return not view.mean_output or fetching(cost, seq, chunk) <= view.mean_output * token
