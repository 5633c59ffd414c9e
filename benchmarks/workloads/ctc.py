"""Connectionist temporal classification (Graves et al. 2006): the likelihood of labels whose times nobody wrote down.

Between and around the labels a blank may be said, and each may last for any number of frames. The sum over all ways to
say them is the forward algorithm, here in logarithms and plain operations, one step a frame: `torch.nn.functional.
ctc_loss` reads lengths out of tensors, where torch.compile breaks the graph.
"""

import itertools

import torch
from torch.nn import functional as F

BLANK = 0
NEVER = -1e30
"""The logarithm of nothing, but finite, so that its gradient is a number."""


def ctc_loss(log_probabilities: torch.Tensor, labels: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Mean over the rows of the negative log-likelihood a label.

    `log_probabilities` are `[row, frame, label]`; each row of `labels` `[row, label]` has as many as `lengths` says,
    and blanks behind them. A row with more labels (and blanks between equal ones) than frames gets a huge loss.
    """
    most = labels.shape[1]
    with_blanks = torch.stack([torch.full_like(labels, BLANK), labels], dim=2).flatten(1)
    extended = F.pad(with_blanks, (0, 1), value=BLANK)  # a blank, a label, a blank, ..., a label, a blank
    may_skip = F.pad((extended[:, 2:] != BLANK) & (extended[:, 2:] != extended[:, :-2]), (2, 0))
    said = log_probabilities.gather(2, extended.unsqueeze(1).expand(-1, log_probabilities.shape[1], -1))

    first, *others = said.unbind(1)
    scores = F.pad(first[:, :2], (0, 2 * most - 1), value=NEVER)
    for frame in others:
        from_before = F.pad(scores[:, :-1], (1, 0), value=NEVER)
        over_blank = F.pad(scores[:, :-2], (2, 0), value=NEVER).masked_fill(~may_skip, NEVER)
        scores = torch.logaddexp(torch.logaddexp(scores, from_before), over_blank) + frame
    ends = torch.stack([2 * lengths - 1, 2 * lengths], dim=1)  # on the last label, or on the blank behind it
    likelihood = scores.gather(1, ends).logsumexp(dim=1)
    return -(likelihood / lengths).mean()


def collapse(frames: list[int]) -> list[int]:
    """The labels that a frame-by-frame answer spells: each run once, blanks left out."""
    return [label for label, _ in itertools.groupby(frames) if label != BLANK]
