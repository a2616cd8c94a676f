"""The worked example of compiled step loops: waveforms as OpenFWI models them (Deng et al., 2022), in numbers:

70x70 cells of 10 m, 5 shots along the surface at a depth of 10 m, 70 receivers there, 1,000 steps of 1 ms, a Ricker wavelet
of 15 Hz, an absorbing boundary of 120 cells on all four sides; of second order in time and fourth in space.
From its title on this is the cell of 07_speed.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F


# The acoustic wave equation in two dimensions
class Waves(NamedTuple):
    now: torch.Tensor  # (shots, nz, nx) pressure, the boundary's cells included
    before: torch.Tensor  # a step earlier
    number: torch.Tensor  # (1,) of the step


def ricker(total=1000, dt=1e-3, hz=15.0):
    a = (math.pi * hz * (dt * torch.arange(total) - 1.1 / hz)) ** 2  # its peak is 1.1 periods after the start
    return (1 - 2 * a) * torch.exp(-a)


def make_waves(velocity, wavelet, shots=5, pad=120, dx=10.0, dt=1e-3):  # velocity: (nz, nx) in m/s
    v = F.pad(velocity[None], (pad,) * 4, mode="replicate")[0]
    beyond = [(torch.arange(n + 2 * pad) - pad - (n - 1) / 2).abs() - (n - 1) / 2 for n in velocity.shape]
    into = torch.maximum(beyond[0][:, None], beyond[1]).clamp(min=0) / max(pad, 1)  # 0 inside, 1 at the outermost cell
    damping = 1.5 * math.log(1e7) * velocity.detach().min() * dt / (max(pad, 1) * dx) * into**2
    source = torch.zeros(shots, *v.shape)
    source[torch.arange(shots), pad + 1, pad + torch.linspace(0, velocity.shape[1] - 1, shots).long()] = 1
    courant, push = (v * dt / dx) ** 2, source * (v * dt) ** 2

    def step(w):
        p = F.pad(w.now, (2, 2, 2, 2))
        near = p[:, 1:-3, 2:-2] + p[:, 3:-1, 2:-2] + p[:, 2:-2, 1:-3] + p[:, 2:-2, 3:-1]
        far = p[:, :-4, 2:-2] + p[:, 4:, 2:-2] + p[:, 2:-2, :-4] + p[:, 2:-2, 4:]
        laplacian = 4 / 3 * near - far / 12 - 5 * w.now
        after = w.now + (1 - damping) * (w.now - w.before) + courant * laplacian + push * wavelet[w.number]
        return Waves(after, w.now, w.number + 1)

    return step, Waves(torch.zeros_like(source), torch.zeros_like(source), torch.zeros(1, dtype=torch.long))
