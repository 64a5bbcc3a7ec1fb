"""A mechanism refuses what it was not made for, and says what to do."""

import dpmf
import numpy as np
import pytest

PROMISE = dict(epsilon=8, delta=1e-6)
MOMENTUM = dpmf.mechanism(steps=100, momentum=0.9, schedule="cooldown:0.5:0.1", **PROMISE)
COUPLED = dpmf.mechanism(steps=100, momentum=0.9, weight_decay=0.01, coupled=True, learning_rate=0.5, **PROMISE)


def test_the_optimizer_that_was_planned_for_passes():
    rates = MOMENTUM.workload.learning_rates
    MOMENTUM.check_optimizer(momentum=0.9)
    MOMENTUM.check_optimizer(momentum=0.9, learning_rates=rates)
    # Without weight decay only the shape of the schedule counts, also in single precision, also in part.
    MOMENTUM.check_optimizer(momentum=0.9, learning_rates=0.03 * rates)
    MOMENTUM.check_optimizer(momentum=0.9, learning_rates=(0.03 * rates).astype(np.float32))
    MOMENTUM.check_optimizer(momentum=0.9, learning_rates=[0.1, 0.1, 0.1])
    COUPLED.check_optimizer(momentum=0.9, weight_decay=0.01, coupled=True, learning_rates=[0.5] * 100)
    # Rate times decay counts, not each alone.
    COUPLED.check_optimizer(momentum=0.9, weight_decay=0.05, coupled=True, learning_rates=[0.1] * 100)


@pytest.mark.parametrize("mechanism, optimizer, message", [
    (MOMENTUM, dict(momentum=0.95), r"momentum 0.95, but the mechanism was planned for 0.9: plan with momentum=0.95"),
    (MOMENTUM, dict(), r"momentum 0, but"),
    (MOMENTUM, dict(momentum=0.9, nesterov=True), "Nesterov momentum.*plan with nesterov=True"),
    (MOMENTUM, dict(momentum=0.9, weight_decay=1e-4, coupled=True), "plan with weight_decay=0.0001, coupled=True and"),
    (MOMENTUM, dict(momentum=0.9, learning_rates=[0.1] * 100), r"step 51 has 1 times .* planned for 0.98\d* times"),
    (MOMENTUM, dict(momentum=0.9, learning_rates=[0.1] * 101), "101 learning rates.*plan with steps=101"),
    (MOMENTUM, dict(momentum=0.9, learning_rates=[0.1, float("nan")]), "step 1 has NaN times"),
    (COUPLED, dict(momentum=0.9, weight_decay=0.01), "decouples weight decay.*plan with coupled=False"),
    (COUPLED, dict(momentum=0.9), "weight decay 0, but the mechanism was planned for 0.01"),
    (COUPLED, dict(momentum=0.9, weight_decay=0.01, coupled=True, learning_rates=[0.1]),
     "plan with weight_decay=0.01 and learning_rate=0.1"),
])
def test_another_optimizer_is_refused_with_the_plan_it_needs(mechanism, optimizer, message):
    with pytest.raises(dpmf.MismatchError, match=message) as refusal:
        mechanism.check_optimizer(**optimizer)
    assert "The guarantee would hold" in str(refusal.value) and isinstance(refusal.value, ValueError)


def test_learning_rates_are_checked_step_by_step():
    rates = MOMENTUM.workload.learning_rates
    for step in (0, 49, 50, 75, 99):
        MOMENTUM.check_learning_rate(step, 0.2 * rates[step], 0.2)
    with pytest.raises(dpmf.MismatchError, match="step 75 has 1 times the learning rate of the first step"):
        MOMENTUM.check_learning_rate(75, 0.2, 0.2)
    with pytest.raises(dpmf.MismatchError, match="the run has 101 steps"):
        MOMENTUM.check_learning_rate(100, 0.2, 0.2)


def test_a_matrix_has_no_optimizer_to_check():
    matrix = dpmf.mechanism(workload=dpmf.Workload.from_matrix(np.tril(np.ones((8, 8)))), **PROMISE)
    matrix.check_optimizer(momentum=0.5, learning_rates=[1.0])


def test_more_steps_than_the_horizon():
    MOMENTUM.check_steps(100)
    MOMENTUM.check_steps(1)
    with pytest.raises(dpmf.MismatchError, match="the run has 101 steps.*planned for 100.*plan with steps=101"):
        MOMENTUM.check_steps(101)


@pytest.mark.parametrize("sampler, epochs, message", [
    ("poisson", 1, "Poisson sampling may draw the same example.*poisson_sampling=False"),
    ("with-replacement", 1, "with replacement"),
    ("epochs", 3, "in 3 epochs each example takes part in 3 steps"),
])
def test_samplers_that_break_single_participation(sampler, epochs, message):
    with pytest.raises(dpmf.MismatchError, match=message) as refusal:
        MOMENTUM.check_sampling(sampler, epochs=epochs)
    assert "for data that takes part in at most one step: " in str(refusal.value)
    assert "disjoint batches" in str(refusal.value)


def test_samplers_that_keep_it():
    MOMENTUM.check_sampling("single-epoch")
    MOMENTUM.check_sampling("epochs", epochs=1)
    with pytest.raises(ValueError, match='sampler is "sorted"'):
        MOMENTUM.check_sampling("sorted")
    with pytest.raises(ValueError, match="epochs is 0"):
        MOMENTUM.check_sampling("epochs", epochs=0)


def test_a_warm_up_from_zero_is_checked_up_to_its_scale():
    schedule = [0.0, 0.5, 1.0, 1.0, 0.0]
    mechanism = dpmf.mechanism(schedule=schedule, epsilon=2, delta=1e-6)
    mechanism.check_optimizer(learning_rates=[0.3 * rate for rate in schedule])
    mechanism.check_optimizer(learning_rates=[0.0])
    for rates in ([0.1], [0.0, 0.15, 0.2], [0.0, 0.1, 0.2, 0.2, 0.1]):
        with pytest.raises(dpmf.MismatchError, match="plan with"):
            mechanism.check_optimizer(learning_rates=rates)
    for step, rate in enumerate(schedule):
        mechanism.check_learning_rate(step, 0.3 * rate, 0.0)
    with pytest.raises(dpmf.MismatchError, match="step 0 has learning rate 0.1"):
        mechanism.check_learning_rate(0, 0.1, 0.1)
