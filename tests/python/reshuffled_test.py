"""A plan in reshuffled bins: its sampler is an ordinary loader that reshuffles, with the same draws in JAX."""

import dpmf
import numpy as np
import pytest

KEY = dpmf.NoiseKey.from_seed(11)
EXAMPLES, BINS, EPOCHS = 120, 4, 3
STEPS = BINS * EPOCHS


@pytest.fixture(scope="module")
def mechanism():
    made = dpmf.make_mechanism(dpmf.Workload.prefix_sum(STEPS), "banded-toeplitz:bands=2")
    return made.with_sampling(f"reshuffled-bins:{BINS}").calibrate(4, 1e-5, clip=1.0)


def check_epochs(batches):
    """Every epoch has each example once, in other company than the last."""
    assert len(batches) == STEPS
    epochs = [batches[start : start + BINS] for start in range(0, STEPS, BINS)]
    for epoch in epochs:
        assert sorted(example for batch in epoch for example in batch) == list(range(EXAMPLES))
    # By chance a quarter of the examples meet their old batch again; 60 of 120 would be 7 standard deviations more.
    for before, after in zip(epochs, epochs[1:], strict=False):
        assert sum(len({*a} & {*b}) for a, b in zip(before, after, strict=True)) < EXAMPLES / 2
    sizes = {len(batch) for batch in batches}
    assert len(sizes) > 1, "batches of one size are not drawn for each example on its own"


def test_the_draws_are_secret_and_those_of_one_run():
    def drawn(key, run):
        sampler = dpmf.Sampler(f"reshuffled-bins:{BINS}", key, units=EXAMPLES, steps=STEPS, run=run)
        return [batch.tolist() for batch in sampler]

    batches = drawn(KEY, "test")
    check_epochs(batches)
    assert drawn(KEY, "test") == batches
    assert drawn(KEY, "other") != batches and drawn(dpmf.NoiseKey.from_seed(12), "test") != batches
    # Nothing of it follows from what a state or a representation shows.
    sampler = dpmf.Sampler(f"reshuffled-bins:{BINS}", KEY, units=EXAMPLES, steps=STEPS, run="test")
    assert set(sampler.state_dict()) == {"sampling", "run", "key", "units", "steps", "next_step"}
    assert sampler.state_dict()["key"] == KEY.fingerprint


def test_jax_has_the_same_draws(mechanism):
    pytest.importorskip("jax", reason="JAX is not installed: scripts/setup-frameworks makes an environment with it")
    import dpmf.jax

    batches = dpmf.jax.Batches(mechanism, KEY, examples=EXAMPLES, experiment="test")
    taken = [batch.indices[batch.mask].tolist() for batch in batches]
    check_epochs(taken)
    sampler = dpmf.Sampler(mechanism.sampling, KEY, units=EXAMPLES, steps=STEPS, run="test")
    assert taken == [members.tolist() for members in sampler]
    assert batches.expected_batch == EXAMPLES / BINS
    # A batch is a function of its step: a run goes on from the middle of an epoch.
    assert np.array_equal(batches.members(BINS + 2), taken[BINS + 2])
