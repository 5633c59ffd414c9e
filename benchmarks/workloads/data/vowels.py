"""Utterances of vowels, synthesised from the mean formants that Peterson and Barney (1952) measured, for vocal tracts
of different length."""

import torch
from torch.nn import functional as F

FORMANTS: dict[str, tuple[int, int, int]] = {
    "heed": (270, 2290, 3010),
    "hid": (390, 1990, 2550),
    "head": (530, 1840, 2480),
    "had": (660, 1720, 2410),
    "hod": (730, 1090, 2440),
    "hawed": (570, 840, 2410),
    "hood": (440, 1020, 2240),
    "who'd": (300, 870, 2240),
    "hud": (640, 1190, 2390),
    "heard": (490, 1350, 1690),
}
"""The first three resonances in hertz of each vowel, by the word it was read in."""

HIGHEST_HERTZ = 4000.0
MEAN_FRAMES_PER_VOWEL = 8


def mel(hertz: torch.Tensor) -> torch.Tensor:
    """Pitch as it is heard: linear below a kilohertz, logarithmic above."""
    return 2595 * torch.log10(1 + hertz / 700)


def random_vowels(rows: int, frames: int, generator: torch.Generator) -> torch.Tensor:
    """The vowel of each frame `[row, frame]`, changing at random moments."""
    changes = torch.rand(rows, frames, generator=generator) < 1 / MEAN_FRAMES_PER_VOWEL
    changes[:, 0] = False
    by_segment = torch.randint(len(FORMANTS), (rows, frames), generator=generator)
    return by_segment.gather(1, changes.long().cumsum(dim=1))


def synthesise(vowels: torch.Tensor, bins: int, generator: torch.Generator) -> torch.Tensor:
    """Mel-spectrogram-like features `[row, frame, bin]`: a ridge along each formant's track, and noise."""
    tract_length = 0.9 + 0.2 * torch.rand(len(vowels), 1, 1, generator=generator)
    targets = torch.tensor(list(FORMANTS.values()), dtype=torch.float32)[vowels] / tract_length
    # The mouth takes a few frames to move from one vowel to the next.
    tracks = F.avg_pool1d(targets.transpose(1, 2), 5, stride=1, padding=2, count_include_pad=False)
    ridge_positions = mel(tracks).transpose(1, 2).unsqueeze(-1)  # [row, frame, formant, 1]
    bin_positions = torch.linspace(0, float(mel(torch.tensor(HIGHEST_HERTZ))), bins)
    ridges = torch.exp(-0.5 * ((bin_positions - ridge_positions) / 80) ** 2).sum(dim=2)
    return ridges + 0.3 * torch.randn(ridges.shape, generator=generator)


SHORTEST_VOWEL, LONGEST_VOWEL = 4, 12


def utterances(rows: int, frames: int, generator: torch.Generator) -> torch.Tensor:
    """The vowel of each frame `[row, frame]`: each lasts a few frames, and the next one is another."""
    most = -(-frames // SHORTEST_VOWEL)
    ends = torch.randint(SHORTEST_VOWEL, LONGEST_VOWEL + 1, (rows, most), generator=generator).cumsum(dim=1)
    # The last vowel does not begin so late that the utterance cuts it short.
    moments = torch.arange(frames).clamp(max=max(0, frames - SHORTEST_VOWEL)).expand(rows, -1).contiguous()
    turns = torch.randint(1, len(FORMANTS), (rows, most), generator=generator).cumsum(dim=1) % len(FORMANTS)
    return turns.gather(1, torch.searchsorted(ends, moments, right=True))
