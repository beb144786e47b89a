"""Given parts of chapter 26: clusters, the checks of a mixture, and the frame of a classifier."""

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set

import torch
from torch import Tensor, nn

Sizes = Mapping[str, float]
Texts = Sequence[str]


def jaccard(a: Set[str], b: Set[str]) -> float:
    """What is in both over what is in either; one of the two is not empty."""
    both = len(a & b)
    return both / (len(a) + len(b) - both)


class Clusters:
    """Union-find: n things, each a cluster of its own at first."""

    def __init__(self, n: int):
        self._parent = list(range(n))

    def find(self, i: int) -> int:
        """The first member of i's cluster: equal for two things exactly if they are in one."""
        while self._parent[i] != i:
            self._parent[i] = i = self._parent[self._parent[i]]
        return i

    def link(self, i: int, j: int) -> None:
        """Make one cluster of two."""
        first, second = sorted((self.find(i), self.find(j)))
        self._parent[second] = first

    def lists(self) -> list[list[int]]:
        """The clusters of two or more, each ascending, sorted by their first member."""
        members = defaultdict(list)
        for i in range(len(self._parent)):
            members[self.find(i)].append(i)
        return [cluster for cluster in members.values() if len(cluster) > 1]


def check_mixture(sizes: Sizes, budget: float, weights: Sizes, temperature: float, max_epochs: float) -> None:
    """Whether a mixture can be planned.

    Raises:
        ValueError: other names in ``weights``, a negative weight, a temperature that is not above 0, or a budget above
            ``max_epochs`` times the sizes of all sources with weight.
    """
    if different := sorted(set(weights) ^ set(sizes)):
        raise ValueError(f"weights and sizes must name the same sources; only one of them has {', '.join(different)}")
    for name, weight in weights.items():
        if weight < 0:
            raise ValueError(f"the weight of {name}, {weight}, is negative")
    if not temperature > 0:
        raise ValueError(f"temperature = {temperature} is not above 0")
    most = max_epochs * sum(size for name, size in sizes.items() if weights[name] > 0)
    if budget > most:
        raise ValueError(f"budget = {budget}: {max_epochs} epochs of all sources with weight are {most} tokens")


class TextClassifier(nn.Module):
    """A table of rows that a text's features choose, and a bias; ``forward(texts)`` gives logits."""

    def __init__(self, labels: Texts, n_features: int = 2**16, ngrams: int = 2):
        super().__init__()
        self.labels, self.n_features, self.ngrams = list(labels), n_features, ngrams
        self.weight = nn.Parameter(torch.zeros(n_features, len(self.labels)))
        self.bias = nn.Parameter(torch.zeros(len(self.labels)))

    def targets(self, labels: Texts) -> Tensor:
        """The index of each label.

        Raises:
            ValueError: an unknown label; the message shows it.
        """
        for label in labels:
            if label not in self.labels:
                raise ValueError(f"label {label!r}: expected one of {self.labels}")
        return torch.tensor([self.labels.index(label) for label in labels], device=self.weight.device)

    @torch.no_grad()
    def predict(self, text: str) -> tuple[str, float]:
        """The most probable label and its probability."""
        probability, index = self([text])[0].softmax(-1).max(-1)
        return self.labels[int(index)], probability.item()
