"""Trains a small convolutional network on MNIST-1D, which is made here: nothing is downloaded.

    python examples/train_mnist1d.py
    python examples/train_mnist1d.py --optimizer AdamW --lr 0.005

MNIST-1D (Sam Greydanus and Dmitry Kobak, "Scaling down deep learning with MNIST-1D", arXiv:2011.14439) has a
template of twelve points for each digit, which is padded, stretched, scaled, moved, covered with noise,
sheared and sampled at 40 points. The sizes are those that were published. The templates are drawn here after
the shapes of the digits, so accuracies are not to be compared with published ones.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

import oxidion

Signal = NDArray[np.float64]

TEMPLATES = np.array(
    [
        [0, 2, 4, 5, 6, 6, 6, 6, 5, 4, 2, 0],  # 0: one bow
        [0, -3, -2, -1, 0, 1, 2, 3, 4, 5, 1, 0],  # 1: a slope
        [0, 3, 5, 4, 2, 0, -2, -4, -5, -5, -3, 0],  # 2: up, then down
        [0, 3, 5, 4, 1, 0, 1, 4, 5, 4, 2, 0],  # 3: two bows
        [0, -1, -2, -3, -4, -5, 1, 1, 1, 1, 1, 0],  # 4: down, then a step
        [0, -4, -5, -5, -3, 0, 3, 5, 5, 4, 1, 0],  # 5: down, then up
        [0, -1, -3, -5, -5, -3, -6, -7, -6, -4, -2, 0],  # 6: a deep bow with a knot
        [0, 6, 6, 5, 4, 3, 2, 1, 0, -1, -1, 0],  # 7: a step, then a slope
        [0, -3, -4, -3, 0, 2, 0, -3, -4, -3, -1, 0],  # 8: two bows below
        [0, -4, -5, -4, -1, 0, 0, 0, -1, -1, -1, 0],  # 9: a bow below, then a line
    ],
    dtype=np.float64,
)
PADDING = (36, 60)
SCALE, SHEAR, TRANSLATION = 0.4, 0.75, 48
NOISE, CORRELATED_NOISE, BLUR = 0.02, 0.25, 2.0
LENGTH = 40


def sampled(signal: Signal, length: int) -> Signal:
    """Resamples the signal to ``length`` points by linear interpolation."""
    return np.interp(np.linspace(0, 1, length), np.linspace(0, 1, len(signal)), signal)


def smooth_noise(length: int, random: np.random.Generator) -> Signal:
    """White noise blurred by a Gaussian."""
    reach = int(4 * BLUR)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / BLUR) ** 2)
    noise = random.standard_normal(length + 2 * reach)
    return np.convolve(noise, kernel / kernel.sum(), mode="valid")


def example(template: Signal, random: np.random.Generator) -> Signal:
    """One signal of a template: every call gives another."""
    padded = np.concatenate([template, np.zeros(random.integers(PADDING[0], PADDING[1] + 1))])
    digit = np.concatenate([np.ones(len(template)), np.zeros(len(padded) - len(template))])
    length = len(template) + PADDING[1]
    signal = sampled(padded, length) * (1 + SCALE * (random.random() - 0.5))
    inside = sampled(digit, length)
    shift = random.integers(TRANSLATION)
    signal, inside = np.roll(signal, shift), np.roll(inside, shift)
    signal = np.where(inside > 0, signal, CORRELATED_NOISE * smooth_noise(length, random))
    signal = signal + NOISE * random.standard_normal(length)
    signal = signal - SHEAR * (random.random() - 0.5) * np.linspace(-0.5, 0.5, length)
    return sampled(signal, LENGTH)


def mnist1d(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Signals [count, 1, 40] and their digits, as many of each."""
    random = np.random.default_rng(seed)
    shapes = (TEMPLATES - TEMPLATES.mean(1, keepdims=True)) / TEMPLATES.std(1, keepdims=True)
    shapes = (shapes - shapes[:, :1]) / 6
    targets = np.arange(count) % len(shapes)
    signals = np.stack([example(shapes[target], random) for target in targets])
    signals = (signals - signals.mean()) / signals.std()
    return torch.from_numpy(signals).float().unsqueeze(1), torch.from_numpy(targets)


def network(width: int) -> nn.Sequential:
    """Three convolutions that each halve the signal, and a linear output layer called ``head``."""
    layers: list[tuple[str, nn.Module]] = []
    for at, channels in enumerate((1, width, width)):
        convolution = nn.Conv1d(channels, width, 5, stride=2, padding=2)
        layers += [(f"conv{at}", convolution), (f"relu{at}", nn.ReLU())]
    model = nn.Sequential()
    for name, layer in [*layers, ("flatten", nn.Flatten()), ("head", nn.Linear(5 * width, 10))]:
        model.add_module(name, layer)
    return model


def main() -> int:
    """Trains and prints the accuracy on signals that were held out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizer", choices=("AdamW", "Dion", "Muon", "NorMuon"), default="Muon")
    parser.add_argument("--lr", type=float, default=0.02, help="of the filters")
    parser.add_argument("--scalar-lr", type=float, default=3e-3, help="of the output layer and the biases")
    parser.add_argument("--steps", type=int, default=600, help="length of the run")
    parser.add_argument("--batch", type=int, default=100, help="signals in a step")
    parser.add_argument("--width", type=int, default=25, help="channels")
    parser.add_argument("--count", type=int, default=4000, help="signals to train on, and a quarter more")
    parser.add_argument("--seed", type=int, default=0, help="weights, signals and their order")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    everything = mnist1d(options.count + options.count // 4, options.seed)
    signals, targets = (part[: options.count] for part in everything)
    held_signals, held_targets = (part[options.count :] for part in everything)
    model = network(options.width)
    optimizer = getattr(oxidion, options.optimizer)(
        model, lr=options.lr, scalar_lr=options.scalar_lr, weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=options.steps)
    for step in range(options.steps):
        chosen = torch.randint(len(signals), (options.batch,))
        loss = F.cross_entropy(model(signals[chosen]), targets[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % max(1, options.steps // 5) == 0:
            with torch.no_grad():
                right = (model(held_signals).argmax(1) == held_targets).double().mean().item()
            done = f"step {step + 1}, loss {loss.item():.3f}"
            print(f"{options.optimizer}: {done}, held-out accuracy {right:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
