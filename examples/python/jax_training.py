"""Private training in JAX: logistic regression on three classes, in one pass over the data.

    pip install dpmf[jax] && python jax_training.py
"""

import sys

import dpmf
import dpmf.jax
import jax
import jax.numpy as jnp
import numpy as np
import optax

STEPS, BATCH, CLASSES, FEATURES = 100, 64, 3, 10
random = np.random.default_rng(0)
centres = random.standard_normal((CLASSES, FEATURES))


def draw(size):
    labels = random.integers(CLASSES, size=size)
    return jnp.asarray(centres[labels] + random.standard_normal((size, FEATURES)), jnp.float32), jnp.asarray(labels)


def loss(parameters, inputs, label):
    logits = inputs @ parameters["weights"] + parameters["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, label)


# 1. Plan for the optimizer.
mechanism = dpmf.plan(
    steps=STEPS, momentum=0.9, schedule="cooldown:0.5:0.1", epsilon=3, delta=1e-6, clip=1.0
)
key = dpmf.NoiseKey.from_seed(int(sys.argv[1])) if len(sys.argv) > 1 else dpmf.NoiseKey.generate()
# 2. Take the optimizer that was planned, with noise. The mean divides by the planned size of a batch.
optimizer = dpmf.jax.sgd(mechanism, key, learning_rate=0.2, denominator=BATCH)


@jax.jit
def step(parameters, state, inputs, labels):
    gradients = jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))(parameters, inputs, labels)
    # 3. Clip every example.
    total = dpmf.jax.clipped_sum(gradients, mechanism.privacy.clip)
    updates, state = optimizer.update(total, state, parameters)
    return optax.apply_updates(parameters, updates), state


inputs, labels = draw(STEPS * BATCH)
parameters = {"weights": jnp.zeros((FEATURES, CLASSES)), "bias": jnp.zeros(CLASSES)}
state = optimizer.init(parameters)
for i in range(STEPS):
    # One pass over disjoint batches: every record takes part once.
    batch = slice(i * BATCH, (i + 1) * BATCH)
    parameters, state = step(parameters, state, inputs[batch], labels[batch])

test_inputs, test_labels = draw(5000)
predictions = jnp.argmax(test_inputs @ parameters["weights"] + parameters["bias"], axis=1)
print(mechanism.privacy, "\n")
print(f"test accuracy {float(jnp.mean(predictions == test_labels)):.3f}")
