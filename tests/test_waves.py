"""The worked example of compiled step loops, by physics: arrival times, a closed form, energy, reciprocity."""

import functools

import numpy as np
import pytest
import torch
from waves import Waves, make_waves, ricker

from rsnakit.stepping import compile_steps

HZ, DX, DT = 15.0, 10.0, 1e-3
PEAK_S = 1.1 / HZ  # of the wavelet, after its start


@functools.cache
def modelled(
    speeds: tuple[float, ...], shots: int = 1, pad: int = 120, coarser: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """A second by the plain loop: pressure along the surface (steps, shots, nx), and all energy inside (steps,).

    Args:
        speeds: of layers of equal thickness, in m/s.
        coarser: cells and steps are that much larger.
    """
    n, pad = 70 // coarser, pad // coarser
    velocity = torch.tensor(speeds).repeat_interleave(n // len(speeds))[:, None].expand(n, n)
    wavelet = ricker(1000 // coarser, DT * coarser)
    step, waves = make_waves(velocity, wavelet, shots, pad, DX * coarser, DT * coarser)
    surface, energy = [], []
    with torch.no_grad():
        for _ in wavelet:
            waves = step(waves)
            inside = waves.now[:, pad : pad + n, pad : pad + n]
            surface.append(inside[:, 1].clone())
            energy.append(inside.square().sum())
    return torch.stack(surface).numpy(), torch.stack(energy).numpy()


def closed_form(distance: float, speed: float) -> np.ndarray:
    """Pressure a distance from a point source in the plane, after each step: its Green's function with the wavelet.

    Green's function of the equation is 1 / (2 pi sqrt(t^2 - r^2 / v^2)) from t = r / v on, for a source as strong as the
    wavelet (Morse & Feshbach, 1953, 7.3); with t = r / v cosh(a) its pole goes. A cell's source is dx^2 times as strong.
    """
    found = np.zeros(1000)
    for number, t in enumerate(DT * np.arange(1, 1001)):
        if t * speed > distance:
            a = np.linspace(0, np.arccosh(t * speed / distance), 1001)
            since = t - distance / speed * np.cosh(a)
            b = (np.pi * HZ * (since - PEAK_S)) ** 2
            y = (1 - 2 * b) * np.exp(-b)
            found[number] = (y[1:] + y[:-1]).sum() * (a[1] - a[0]) / 2
    return DX**2 / (2 * np.pi) * found


def test_it_is_as_openfwi_sets_it():
    step, waves = make_waves(torch.full((70, 70), 3000.0), ricker())
    assert waves.now.shape == waves.before.shape == (5, 310, 310) and waves.number.tolist() == [0]
    after = step(waves)
    shot, z, x = after.now.nonzero().T
    assert isinstance(after, Waves) and shot.tolist() == [0, 1, 2, 3, 4] and z.unique().tolist() == [121]  # 10 m deep
    assert (x - 120).tolist() == [0, 17, 34, 51, 69]
    assert after.number.tolist() == [1] and after.before is waves.now


def test_the_wavelet_peaks_at_15_hz():
    wavelet = ricker().numpy()
    spectrum = np.abs(np.fft.rfft(wavelet, 16_000))
    assert np.fft.rfftfreq(16_000, DT)[spectrum.argmax()] == pytest.approx(HZ, abs=0.1)
    assert wavelet.argmax() * DT == pytest.approx(PEAK_S, abs=DT) and abs(wavelet[0]) < 0.001


@pytest.mark.parametrize("speed", [2000.0, 3000.0, 4500.0])
def test_arrival_times_are_distance_over_speed(speed):
    surface, _ = modelled((speed,))
    receivers = np.arange(5, 70)
    arrival = receivers * DX / speed
    traces = surface[:, 0, receivers]
    peaks = DT * (1 + traces.argmax(0))
    assert (np.abs(peaks - PEAK_S - arrival) < 0.5 / HZ).all()
    begun = DT * (1 + (np.abs(traces) > 0.01 * np.abs(traces).max(0)).argmax(0))
    assert (begun > arrival).all() and (begun < arrival + 1 / HZ).all()
    assert np.polyfit(receivers * DX, peaks, 1)[0] == pytest.approx(1 / speed, rel=0.01)


@pytest.mark.parametrize(("receiver", "error"), [(10, 0.005), (35, 0.01), (69, 0.02)])
def test_waveforms_are_those_of_the_closed_form(receiver, error):
    found, expected = modelled((3000.0,))[0][:, 0, receiver], closed_form(receiver * DX, 3000.0)
    assert np.sqrt(((found - expected) ** 2).sum() / (expected**2).sum()) < error


def test_a_finer_grid_comes_nearer_to_the_closed_form():
    """Not four times, as the order in time would have it: what the boundary sends back is in both."""
    errors = []
    for coarser in (1, 2):
        found = modelled((3000.0,), coarser=coarser)[0][:, 0, 50 // coarser] / coarser**2
        expected = closed_form(50 * DX, 3000.0)[coarser - 1 :: coarser]
        errors.append(np.sqrt(((found - expected) ** 2).sum() / (expected**2).sum()))
    assert errors[1] > 2 * errors[0]


def test_a_layer_sends_back_an_echo():
    """From 335 m below the source, at twice the distance over the upper layer's speed."""
    echo = modelled((2000.0, 4000.0))[0][:, 0, 0] - modelled((2000.0,))[0][:, 0, 0]
    arrival = 2 * 335 / 2000
    assert DT * (1 + np.abs(echo).argmax()) - PEAK_S == pytest.approx(arrival, abs=0.5 / HZ)
    assert np.abs(echo[: int((arrival - 0.2 / HZ) / DT)]).max() < 0.01 * np.abs(echo).max()


def test_energy_falls_once_the_wave_has_left():
    """From 690 m and 1,000 m away it has gone after 0.6 s; without a boundary that absorbs it stays inside."""
    _, energy = modelled((3000.0,))
    assert energy[600:].max() < 1e-4 * energy.max()
    _, walled = modelled((3000.0,), pad=0)
    assert walled[600:].min() > 0.1 * walled.max()


def test_source_and_receiver_may_change_places():
    surface, _ = modelled((2000.0, 4000.0), shots=2)  # at both ends
    there, back = surface[:, 0, 69], surface[:, 1, 0]
    np.testing.assert_allclose(there, back, atol=1e-4 * np.abs(there).max())
    layers = torch.linspace(1500, 4500, 70).expand(70, 70)  # and from slow to fast, so that left and right differ
    step, waves = make_waves(layers, ricker(), shots=2, pad=30)
    found = []
    with torch.no_grad():
        for _ in range(1000):
            waves = step(waves)
            found.append(waves.now[:, 31, 30:100].clone())
    there, back = torch.stack(found)[:, 0, 69], torch.stack(found)[:, 1, 0]
    np.testing.assert_allclose(there, back, atol=1e-4 * float(there.abs().max()))


@pytest.mark.slow
def test_compiled_it_is_the_plain_loop_to_the_bit():
    """In earnest, by inductor: five shots, a second."""
    velocity = torch.linspace(1500, 4500, 70)[:, None].expand(70, 70)
    step, waves = make_waves(velocity, ricker(1002))
    steps = compile_steps(step, 4, record=lambda waves: waves.now[:, 121, 120:190])
    with torch.no_grad():
        found, surface = steps.run(waves, 1002)
        expected, traces = waves, []
        for _ in range(1002):
            expected = step(expected)
            traces.append(expected.now[:, 121, 120:190])
    assert surface.shape == (1002, 5, 70) and surface.abs().max() > 1
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)) and torch.equal(
        surface, torch.stack(traces)
    )
