"""The page of the planner: how long an answer to a moved slider takes, against the whole plan for the same request.

The server of `dpmf plan --page` is asked as the page asks it: a first question, then the same with other ε. Beside each of those,
in the same run, `dpmf plan --no-cache` plans the request without hurry. Fails if the page's noise is more than 5 % above that of
the whole plan, or if no answer of a request is sooner than the whole plan.
"""

import argparse
import json
import re
import statistics
import subprocess
import time
import urllib.parse
import urllib.request

#: As the presets of the page: examples, batch, epochs.
REQUESTS = [(60_000, 1000, 10), (50_000, 500, 20), (1_000_000, 5000, 1)]
EPSILONS = [4.0, 3.7, 3.4, 3.1]


def timed(ask):
    begun = time.perf_counter()
    answer = ask()
    return answer, time.perf_counter() - begun


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="target/release/dpmf")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    command = [arguments.program, "plan", "--page", "--port", "0", "--no-open", "--no-cache"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            results = measure(arguments.program, re.search(r"http://\S+/", server.stderr.readline())[0])
        finally:
            server.terminate()
    if arguments.json:
        print(json.dumps({"schema": 1, "results": results}))
        return
    for row in results:
        moved = ", ".join(f"{seconds:.2f}" for seconds in row["moved_seconds"])
        print(
            f"{row['steps']} steps: first answer {row['first_seconds']:.2f} s, moved slider {moved} s; whole plans"
            f" {statistics.median(row['whole_seconds']):.2f} s: {row['ratio']:.1f} times as long; noise {row['noise']:.3f} times"
        )


def measure(program, address):
    results = []
    for examples, batch, epochs in REQUESTS:
        moved, whole, noise = [], [], []
        for epsilon in EPSILONS:
            settings = dict(examples=examples, batch=batch, epochs=epochs, epsilon=epsilon, delta=1e-5)
            query = urllib.parse.urlencode(settings)
            answer, seconds = timed(lambda: json.load(urllib.request.urlopen(f"{address}plan?{query}")))
            moved.append(seconds)
            if epsilon == EPSILONS[0]:
                continue
            words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
            plain = [program, "plan", *words, "--no-cache", "--json"]
            plan, seconds = timed(lambda: json.loads(subprocess.run(plain, check=True, capture_output=True).stdout))
            whole.append(seconds)
            noise.append(answer["chosen"]["rmse"] / plan["chosen"]["rmse"])
        first, *moved = moved
        ratio = statistics.median(a / b for a, b in zip(whole, moved))
        result = dict(steps=examples // batch * epochs, first_seconds=first, moved_seconds=moved, whole_seconds=whole,
                      ratio=ratio, noise=max(noise))
        results.append(result)
        assert max(noise) <= 1.05 and ratio > 1, result
    return results


if __name__ == "__main__":
    main()
