"""The loss over all ways to say the labels, against PyTorch's and against all ways written out."""

from __future__ import annotations

import itertools
import math

import torch
from torch.nn import functional as F

from benchmarks.workloads.ctc import collapse, ctc_loss


def test_loss_and_gradient_are_those_of_pytorch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 12, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    labels = torch.tensor([[1, 2, 3, 4], [1, 1, 0, 0], [5, 0, 0, 0], [2, 2, 2, 2], [3, 4, 3, 0]])
    lengths = torch.tensor([4, 2, 1, 4, 3])
    mine = ctc_loss(logits.log_softmax(dim=-1), labels, lengths)
    its = F.ctc_loss(logits.log_softmax(dim=-1).transpose(0, 1), labels, torch.full((5,), 12), lengths)
    torch.testing.assert_close(mine, its)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (mine, its)))


def test_the_likelihood_is_the_sum_over_all_ways_to_say_the_labels() -> None:
    log_probabilities = torch.randn(1, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    log_probabilities = log_probabilities.log_softmax(dim=-1)
    ways = [way for way in itertools.product(range(3), repeat=4) if collapse(list(way)) == [2, 2]]
    likelihood = sum(math.exp(sum(log_probabilities[0, at, label] for at, label in enumerate(way))) for way in ways)
    assert len(ways) == 5
    loss = ctc_loss(log_probabilities, torch.tensor([[2, 2]]), torch.tensor([2]))
    torch.testing.assert_close(loss.item(), -math.log(likelihood) / 2)


def test_runs_are_said_once_and_blanks_not_at_all() -> None:
    assert collapse([0, 3, 3, 0, 3, 1, 1, 0, 0]) == [3, 3, 1]
    assert collapse([0, 0]) == []
