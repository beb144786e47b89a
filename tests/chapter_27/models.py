"""Models that are small enough to check by hand, and that write down how they are called."""

import torch
from torch import Tensor, nn

from tests.inputs import randn

VOCAB = 11


class Recorder(nn.Module):
    """A causal model whose logits depend on every id before them and on their positions.

    Attributes:
        shapes: Shape of the tokens of each call.
        gradients: Whether gradients were on in each call.
        rows: The tokens of each call.
    """

    def __init__(self, dtype: torch.dtype = torch.float64, as_tuple: bool = False, limit: int | None = None):
        super().__init__()
        self.table = nn.Parameter(randn(VOCAB, 6, dtype=dtype))
        self.head = nn.Parameter(randn(6, VOCAB, seed=1, dtype=dtype))
        self.as_tuple, self.limit = as_tuple, limit
        self.shapes: list[tuple[int, ...]] = []
        self.gradients: list[bool] = []
        self.rows: list[Tensor] = []

    def forward(self, tokens: Tensor):
        assert (tokens.dtype, tokens.ndim) == (torch.int64, 2), f"tokens {tuple(tokens.shape)} in {tokens.dtype}"
        self.shapes.append(tuple(tokens.shape))
        self.gradients.append(torch.is_grad_enabled())
        self.rows.append(tokens)
        places = torch.arange(1, tokens.shape[1] + 1, dtype=self.table.dtype, device=tokens.device)[:, None]
        mixed = torch.cumsum(self.table[tokens] * places.sqrt(), 1) / places
        logits = torch.tanh(mixed) @ self.head * 2
        return (logits, None) if self.as_tuple else logits


def log_probs(model: nn.Module, inputs: list[int]) -> Tensor:
    """Log-probabilities ``[T, V]`` in float64, of one row alone."""
    with torch.no_grad():
        out = model(torch.tensor([inputs]))
    out = out[0] if isinstance(out, tuple) else out
    return torch.log_softmax(out[0].double(), -1)


def table_model(tokens: Tensor) -> Tensor:
    """A model without parameters: after id i, id i + 1 has logit ln 2 more than each of the others."""
    return torch.nn.functional.one_hot((tokens + 1) % VOCAB, VOCAB) * torch.tensor(2.0).log()
