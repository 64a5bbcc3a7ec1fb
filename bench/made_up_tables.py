"""Tables that are made up, on which the rules for private schemas were chosen: `bench/tables.py --made-up 60` measures them.

Of each table the size, the kinds of columns, their centres and scales over six powers of ten, the kind of label and how much of it can be
learned are drawn at random. They have nothing of the tables that `bench/tables.py` measures otherwise.
"""

from __future__ import annotations

import math

import numpy
import pandas

#: Rows to train and hold out, and columns.
SHAPES = [(150, 6), (150, 14), (220, 8), (220, 20), (300, 5), (300, 12), (450, 10), (450, 30), (700, 16), (1200, 8), (1200, 50), (2500, 12)]
NUMBERS = ["number", "lognormal", "count", "small number"]
CLASSES = {"three words": ["kale", "oats", "millet"], "four words": ["north", "south", "east", "west"], "1 to 3": [1, 2, 3], "0 to 9": list(range(10))}
LABELS = ["number", "lognormal", "yes or no", "three words", "1 to 3", "0 to 9", "0 or 1", "four words", "count", "small number"]
KINDS = {"normal": 0.22, "lognormal": 0.22, "positive": 0.15, "count": 0.1, "zeros": 0.08, "yes or no": 0.08, "words": 0.1, "wholes": 0.05}


def column(random, z):
    """A column that follows a standard normal variable."""
    kind = random.choice(list(KINDS), p=list(KINDS.values()))
    size = 10 ** random.uniform(-2, 4)
    if kind == "normal":
        return z * size + random.choice([0, 1, 3]) * size
    if kind == "lognormal":
        return size * numpy.exp(random.uniform(0.3, 1.2) * z)
    if kind == "positive":
        return size * (random.uniform(3, 12) + z)
    if kind == "count":
        return numpy.floor(numpy.exp(random.uniform(0.5, 3) + 0.6 * z))
    if kind == "zeros":
        return numpy.where(z < random.uniform(0, 1.8), 0, numpy.floor(1 + 8 * numpy.abs(z)))
    if kind == "wholes":
        return numpy.clip(numpy.round(random.uniform(2, 8) + 2 * z), 0, None)
    if kind == "yes or no":
        return numpy.where(z < random.normal() * 0.6, "No", "Yes")
    shares = 1 / numpy.arange(1, 5)
    edges = numpy.quantile(z, numpy.cumsum(shares)[:-1] / shares.sum())
    names = numpy.array([f"w{random.integers(1000):03}" for _ in range(4)])
    return names[numpy.searchsorted(edges, z)]


def made_up(index):
    """A table with the label `y`, and whether that is a number."""
    random = numpy.random.default_rng(1000 + index)
    rows, width = SHAPES[index % len(SHAPES)]
    label = LABELS[(index * 7 + index // 10) % len(LABELS)]
    rows = rows * 4 // 3
    factors, latent = random.normal(size=(rows, 3)), []
    for _ in range(width):
        loading = random.normal(size=3)
        loading /= numpy.linalg.norm(loading)
        common = random.uniform(0.1, 0.9)
        latent.append(math.sqrt(common) * factors @ loading + math.sqrt(1 - common) * random.normal(size=rows))
    latent = numpy.array(latent).T
    columns = {f"c{at}": column(random, latent[:, at]) for at in range(width)}

    def score():
        weights = random.normal(size=width) * (random.random(width) < 0.6)
        sums = latent @ weights if numpy.any(weights) else latent[:, 0]
        return (sums - sums.mean()) / sums.std()

    explained = random.choice([0.3, 0.6, 0.9])
    y = math.sqrt(explained) * score() + math.sqrt(1 - explained) * random.normal(size=rows)
    if label == "number":
        columns["y"] = numpy.round(10 ** random.uniform(0, 3) * (y + random.uniform(2, 5)), 2)
    elif label == "small number":
        columns["y"] = numpy.round(7.5 + 3 * y, 1)
    elif label == "lognormal":
        columns["y"] = numpy.round(10 ** random.uniform(0, 4) * numpy.exp(0.6 * y), 1)
    elif label == "count":
        columns["y"] = numpy.round(numpy.exp(4 + 0.8 * y))
    elif label == "yes or no":
        columns["y"] = numpy.where(y > random.normal() * 0.5, "Yes", "No")
    elif label == "0 or 1":
        columns["y"] = (y > random.normal() * 0.5).astype(int)
    else:
        names = CLASSES[label]
        scores = numpy.array([4 * math.sqrt(explained) * score() - math.log(1 + 0.12 * at) for at in range(len(names))]).T
        columns["y"] = numpy.array(names)[(scores + math.sqrt(1 - explained) * random.gumbel(size=scores.shape)).argmax(1)]
    return pandas.DataFrame(columns), label in NUMBERS
