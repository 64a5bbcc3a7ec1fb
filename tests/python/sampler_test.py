"""dpmf.Sampler: who takes part in which step."""

import copy

import dpmf
import numpy as np
import pytest

KEY = dpmf.NoiseKey.from_seed(7)


def sampler(sampling, *, units=1000, steps=20, run="test", **arguments):
    return dpmf.Sampler(sampling, KEY, units=units, steps=steps, run=run, **arguments)


def test_members_are_those_of_the_library():
    # Value stability: the draws of the library's own test of format 1.
    drawn = sampler("balls-in-bins:4", units=20, steps=5)
    assert [drawn.members(step).tolist() for step in range(5)] == [
        [9, 10, 19],
        [0, 2, 3, 5, 6, 13],
        [7, 8, 11, 14, 16, 17, 18],
        [1, 4, 12, 15],
        [9, 10, 19],
    ]
    assert drawn.members(0).dtype == np.int64
    assert drawn.turns(9) == [0, 4]
    drawn = sampler("reshuffled-bins:4", units=20, steps=5)
    assert [drawn.members(step).tolist() for step in range(5)] == [
        [0, 2, 3, 8, 11],
        [9, 14, 17],
        [6, 10, 16, 18],
        [1, 4, 5, 7, 12, 13, 15, 19],
        [1, 4, 8, 9],
    ]


def test_reshuffled_bins_are_an_epoch_each_and_change_from_epoch_to_epoch():
    drawn = sampler("reshuffled-bins:5", units=500, steps=20)
    epochs = [[drawn.members(step).tolist() for step in range(start, start + 5)] for start in range(0, 20, 5)]
    for epoch in epochs:
        assert sorted(unit for batch in epoch for unit in batch) == list(range(500))
    assert all(epoch != epochs[0] for epoch in epochs[1:])
    # Asked for in any order, and again.
    assert drawn.members(17).tolist() == epochs[3][2] and drawn.members(3).tolist() == epochs[0][3]
    assert drawn.turns(9) == [5 * e + b for e, epoch in enumerate(epochs) for b, batch in enumerate(epoch) if 9 in batch]


@pytest.mark.parametrize("sampling, expected", [("cyclic-poisson:4:0.1", 25.0), ("balls-in-bins:8", 125.0), ("reshuffled-bins:8", 125.0)])
def test_a_sampler_goes_on_from_any_step(sampling, expected):
    whole = sampler(sampling)
    assert (whole.sampling, whole.units, whole.steps, whole.expected_batch) == (sampling, 1000, 20, expected)
    batches = [batch.tolist() for batch in whole]
    assert len(batches) == 20 and whole.next_step == 20 and len(whole) == 0
    assert list(whole) == []
    assert abs(np.mean([len(batch) for batch in batches]) - expected) < 0.3 * expected

    rest = sampler(sampling, start=13)
    assert len(rest) == 7 and [batch.tolist() for batch in rest] == batches[13:]

    first = sampler(sampling)
    for _ in range(5):
        next(first)
    other = sampler(sampling)
    other.load_state_dict(first.state_dict())
    assert [batch.tolist() for batch in other] == batches[5:]
    assert dpmf.Sampler(sampling, KEY, units=1000, steps=20, run=first.run).members(3).tolist() == batches[3]


def test_another_samplers_state_is_refused():
    state = sampler("balls-in-bins:8").state_dict()
    for other, what in [
        (sampler("balls-in-bins:9"), "sampling"),
        (sampler("balls-in-bins:8", units=999), "units"),
        (sampler("balls-in-bins:8", steps=21), "steps"),
        (sampler("balls-in-bins:8", run="other"), "run"),
        (dpmf.Sampler("balls-in-bins:8", dpmf.NoiseKey.from_seed(8), units=1000, steps=20, run="test"), "key"),
    ]:
        with pytest.raises(dpmf.MismatchError, match=what):
            other.load_state_dict(state)
    with pytest.raises(ValueError, match="next_step"):
        sampler("balls-in-bins:8").load_state_dict({**state, "next_step": 21})
    with pytest.raises(ValueError, match="next_step"):
        sampler("balls-in-bins:8").load_state_dict({})


def test_bad_arguments_are_named():
    for arguments, message in [
        (dict(sampling="none"), "the order is up to you"),
        (dict(sampling="poisson:0.1"), "cyclic-poisson:G:Q"),
        (dict(sampling="balls-in-bins:2", units=0), "units is 0"),
        (dict(sampling="balls-in-bins:2", steps=0), "steps is 0"),
        (dict(sampling="balls-in-bins:2", start=21), "start is 21"),
    ]:
        with pytest.raises(ValueError, match=message):
            sampler(**arguments)
    with pytest.raises(ValueError, match="step is 20"):
        sampler("balls-in-bins:2").members(20)
    with pytest.raises(ValueError, match="unit is 1000"):
        sampler("balls-in-bins:2").turns(1000)
    with pytest.raises(ValueError, match='run is "words"'):
        dpmf.Sampler("balls-in-bins:2", dpmf.NoiseKey.generate(), units=10, steps=2, run="words")


def test_it_is_a_secret():
    drawn = sampler("balls-in-bins:2")
    with pytest.raises(TypeError, match="cannot be pickled or copied"):
        copy.copy(drawn)
    assert repr(drawn).startswith("<dpmf.Sampler: balls-in-bins:2, step 0 of 20, 1000 units, run ")
    fresh = dpmf.Sampler("balls-in-bins:2", dpmf.NoiseKey.generate(), units=100, steps=2)
    assert fresh.run != dpmf.Sampler("balls-in-bins:2", dpmf.NoiseKey.generate(), units=100, steps=2).run
