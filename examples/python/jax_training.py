"""Private training in JAX: logistic regression on three classes, in five passes over the data.

    pip install dpmf[jax] && python jax_training.py [SEED]
"""

import sys

import dpmf
import dpmf.jax
import jax
import jax.numpy as jnp
import numpy as np
import optax

EXAMPLES, BATCH, EPOCHS, CLASSES, FEATURES = 6000, 240, 5, 3, 10
random = np.random.default_rng(0)
centres = random.standard_normal((CLASSES, FEATURES))


def draw(size):
    labels = random.integers(CLASSES, size=size)
    return jnp.asarray(centres[labels] + random.standard_normal((size, FEATURES)), jnp.float32), jnp.asarray(labels)


def loss(parameters, inputs, label):
    logits = inputs @ parameters["weights"] + parameters["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, label)


# 1. Plan: what there is, what the optimizer does, what is promised.
plan = dpmf.plan(
    examples=EXAMPLES, batch=BATCH, epochs=EPOCHS, momentum=0.9, schedule="cooldown:0.5:0.1", epsilon=1, delta=1e-6, clip=1.0
)
key = dpmf.NoiseKey.from_seed(int(sys.argv[1])) if len(sys.argv) > 1 else dpmf.NoiseKey.generate()
inputs, labels = draw(EXAMPLES)
parameters = {"weights": jnp.zeros((FEATURES, CLASSES)), "bias": jnp.zeros(CLASSES)}
# 2. Begin the run, which makes the batches and their noise, and take the optimizer that was planned.
run = dpmf.jax.Run(plan, key, parameters)
optimizer = dpmf.jax.sgd(run, learning_rate=0.2)


@jax.jit
def step(parameters, state, batch):
    examples = inputs[batch.indices], labels[batch.indices]
    # 3. Clip every example. What was seen on the way is not covered by the guarantee.
    total, seen = dpmf.jax.accumulate(loss, parameters, *examples, clip=1.0, batch=batch, micro_batch=64)
    updates, state = optimizer.update(total, state, parameters, batch=batch)
    return optax.apply_updates(parameters, updates), state, seen


state = optimizer.init(parameters)
for batch in run.batches(state):
    parameters, state, seen = step(parameters, state, batch)
    # 4. Say what the step made of its noise.
    run.commit(state)

test_inputs, test_labels = draw(5000)
predictions = jnp.argmax(test_inputs @ parameters["weights"] + parameters["bias"], axis=1)
print(plan, "\n")
print(f"test accuracy {float(jnp.mean(predictions == test_labels)):.3f}")
