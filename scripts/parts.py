"""Parts of a test run: side by side where they may be, each with a log, a limit and a line in the closing table."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
#: Ends what hangs; no part takes a tenth of it, and a loaded machine may be several times slower.
MINUTES = 75
#: Exit status of a part whose tools this machine does not have.
MISSING = 2


@dataclasses.dataclass
class Part:
    """A command of the shell that begins when those it comes after have passed."""

    name: str
    command: str
    after: tuple[str, ...] = ()
    #: Parts that have to be over, whatever became of them: they hold a lock.
    behind: tuple[str, ...] = ()
    #: Not in `--quick`.
    whole: bool = True
    #: Skipped on machines that lack what it needs (status 2), but not in CI.
    optional: bool = False
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Result:
    """What became of a part: passed, failed, skipped, or not run."""

    verdict: str
    seconds: float = 0.0
    #: Of processors, with all that it started.
    busy: float = 0.0
    summary: str = ""


def counted(text: str) -> str:
    """What the runners say they counted, in their own closing lines."""
    found = []
    for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines():
        if match := re.search(r"(\d+) tests? run: (\d+) passed", line):  # nextest
            found.append(int(match[2]))
        elif match := re.match(r"test result: ok\. (\d+) passed", line):  # cargo test
            found.append(int(match[1]))
        elif match := re.match(r"=*\s*(\d+) passed.* in [\d.]+s", line):  # pytest
            found.append(int(match[1]))
    return f"{sum(found)} passed" if found else ""


def closing(parts: list[Part], results: dict[str, Result]) -> str:
    """The table at the end."""
    width = max(len(part.name) for part in parts)
    rows = [
        f"  {part.name:<{width}}  {end.verdict:<8}  {end.seconds:6.0f} s  {end.busy:6.0f} s busy  {end.summary}"
        for part, end in ((part, results[part.name]) for part in parts)
    ]
    return "\n".join(row.rstrip() for row in rows)


def run(parts: list[Part], lanes: int) -> int:
    """Runs the parts, as many at a time as there are lanes; prints each one's output when it ends. The exit status."""
    logs = TARGET / "test-logs"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    begun, results, waiting = time.monotonic(), {}, list(parts)
    running: dict[str, tuple[Part, subprocess.Popen[bytes], float]] = {}
    names = {part.name for part in parts}

    def path(part: Part) -> pathlib.Path:
        return logs / (re.sub(r"\W+", "-", part.name) + ".log")

    def start(part: Part) -> None:
        print(f"-- {part.name}: started; tail -f {os.path.relpath(path(part))}", flush=True)
        with path(part).open("wb") as log:
            process = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", part.command],
                cwd=ROOT,
                env={**os.environ, **part.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        running[part.name] = (part, process, time.monotonic())

    def stop(process: subprocess.Popen[bytes]) -> None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()

    def ended(process: subprocess.Popen[bytes]) -> tuple[int | None, float]:
        """The exit status, or None of what is still running, and what it took of processors."""
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
        return process.returncode, usage.ru_utime + usage.ru_stime

    def finish(part: Part, status: int | None, seconds: float, busy: float) -> None:
        text = path(part).read_text(errors="replace")
        left_out = status == MISSING and part.optional and not os.environ.get("CI")
        verdict = "passed" if status == 0 else "skipped" if left_out else "failed"
        summary = counted(text) if status == 0 else "" if status is not None else f"did not finish in {MINUTES} minutes"
        results[part.name] = Result(verdict, seconds, busy, summary)
        print(f"\n== {part.name}\n{text.strip()}\n== {part.name}: {verdict}, {seconds:.0f} s\n", flush=True)

    try:
        while waiting or running:
            for part in list(waiting):
                needed = [name for name in part.after if name in names]
                if any(name in results and results[name].verdict != "passed" for name in needed):
                    waiting.remove(part)
                    others = [name for name in needed if name in results and results[name].verdict == "skipped"]
                    results[part.name] = Result("skipped" if others else "not run")
                elif len(running) < lanes and all(name in results for name in (*needed, *part.behind) if name in names):
                    waiting.remove(part)
                    start(part)
            for name, (part, process, since) in list(running.items()):
                seconds, (status, busy) = time.monotonic() - since, ended(process)
                if status is None and seconds > 60 * MINUTES:
                    stop(process)
                elif status is None:
                    continue
                del running[name]
                finish(part, status, seconds, busy)
            time.sleep(0.1)
    finally:
        for _, process, _ in running.values():
            stop(process)
    print(closing(parts, results))
    print(f"  total {time.monotonic() - begun:.0f} s; logs in {os.path.relpath(logs)}")
    failed = [name for name, end in results.items() if end.verdict in ("failed", "not run")]
    passed = sum(end.verdict == "passed" for end in results.values())
    print(f"parts: {passed} passed, {len(failed)} failed, {len(results) - passed - len(failed)} skipped", flush=True)
    return 1 if failed else 0


def chosen(parts: list[Part], names: list[str], quick: bool) -> list[Part]:
    """The parts that were asked for, with those that they come after; all of them without names."""
    known = {part.name: part for part in parts}
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"unknown part {unknown[0]!r}; the parts are: {', '.join(known)}")
    wanted = set(names or [part.name for part in parts if not (quick and part.whole)])
    while more := {name for part in wanted for name in known[part].after} - wanted:
        wanted |= more
    return [part for part in parts if part.name in wanted]
