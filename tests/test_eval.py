"""Evaluation: a run that is killed goes on where it was, and its numbers are those of a run that was not."""
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from scalecua_nb.core.actions import Done, LeftClick
from scalecua_nb.core.records import ActionResult, Observation, StepResult, Turn, Verdict
from scalecua_nb.core.store import EpisodeStore
from scalecua_nb.core.tasks import parse_task
from scalecua_nb.desktop.base import DesktopError
from scalecua_nb.eval.benchmark import BenchmarkError, alike, run_benchmark
from scalecua_nb.eval.passk import over_passes, pass_at_k, pass_curve


class Button:
    "A desktop of one button. Every fifth one that is lent does not start."
    size = (8, 8)

    def __init__(self, broken): self.broken = broken

    async def reset(self, task=None):
        if self.broken: raise DesktopError("no display came up")
        self.pressed = False
        return await self.observe()

    async def observe(self): return Observation(np.full((8, 8, 3), 255 * self.pressed, np.uint8))

    async def act(self, actions):
        self.pressed |= actions[0].coordinate == (500, 500)
        return StepResult(await self.observe(), [ActionResult()])


class Buttons:
    def __init__(self): self.lent = 0

    @asynccontextmanager
    async def lease(self):
        self.lent += 1
        yield Button(self.lent % 5 == 0)


class Coin:
    "Presses the button with even chance, by its seed."
    def __init__(self, seed): self.seed, self.turns = seed, 0
    async def begin(self, task, obs): pass

    async def act(self):
        self.turns += 1
        hit = (500, 500) if np.random.default_rng(self.seed).random() < 0.5 else (0, 0)
        return Turn(self.turns, [LeftClick(coordinate=hit) if self.turns == 1 else Done()])

    async def observe(self, turn, obs): pass
    def finish(self): return []
    async def close(self): pass


TASKS = [parse_task({"id": f"t{i}", "instruction": "Press.", "evaluator": {"func": "check_pressed"}, "related_apps": ["ab"[i % 2]]}) for i in range(40)]


async def pressed(desktop, task, episode, delay=0.0):
    time.sleep(delay)
    return Verdict(float(desktop.pressed))


async def run(delay=0.0, **kw):
    async def judge(*a): return await pressed(*a, delay=delay)
    return await run_benchmark(lambda desktop, name, seed: Coin(seed), Buttons(), TASKS, judge, **{"passes": 3, "progress": False, **kw})


def outcomes(result): return [(a.task_id, a.index, a.score, a.end) for a in result.attempts]


@pytest.mark.slow
async def test_killed_and_resumed(tmp_path):
    out = tmp_path / "run"
    code = f"import asyncio, sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); from test_eval import run; asyncio.run(run(0.01, out={str(out)!r}))"
    process = subprocess.Popen([sys.executable, "-c", code])
    lines, deadline = out / "attempts.jsonl", time.monotonic() + 60
    while not (lines.exists() and lines.read_bytes().count(b"\n") >= 20):
        assert process.poll() is None and time.monotonic() < deadline, "the run ended before it could be killed"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = lines.read_bytes().count(b"\n")
    assert 20 <= before < 120
    resumed, straight = await run(out=out), await run()
    assert outcomes(resumed) == outcomes(straight) and resumed.blocked == 0, "broken desktops were tried again"
    assert lines.read_bytes().count(b"\n") == 120, "nothing that was there was run again"
    assert alike(resumed, straight) == (1.0, 120)


async def test_more_passes_go_on_from_fewer(tmp_path):
    await run(out=tmp_path, passes=1)
    assert outcomes(await run(out=tmp_path, passes=3)) == outcomes(await run())
    assert len((await run(out=tmp_path, passes=2)).attempts) == 80


async def test_episodes_are_kept_on_request(tmp_path):
    await run(passes=1, store=EpisodeStore(tmp_path))
    episodes = list(EpisodeStore(tmp_path).episodes())
    assert len(episodes) == 40 and all(e.verdict and e.rollout_id == f"{e.task_id}.p0" for e in episodes)


async def test_foreign_and_damaged_folders_are_refused(tmp_path):
    await run(out=tmp_path, passes=1)
    with pytest.raises(BenchmarkError, match="another seed"): await run(out=tmp_path, seed=1)
    with (tmp_path / "attempts.jsonl").open("a") as f: f.write('{"what": 1}\n')
    with pytest.raises(BenchmarkError, match="line 41: not an attempt"): await run(out=tmp_path)


async def test_an_error_in_a_judge_ends_the_run_and_leaves_no_work_behind():
    async def broken(desktop, task, episode): raise RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        await run_benchmark(lambda desktop, name, seed: Coin(seed), Buttons(), TASKS, broken, progress=False)
    import asyncio
    assert len(asyncio.all_tasks()) == 1


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 60), st.data())
def test_pass_at_k_grows_with_k_and_with_successes(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    p = pass_at_k(n, c, k)
    assert 0 <= p <= 1 and pass_at_k(n, c, 1) == pytest.approx(c / n)
    if k < n: assert pass_at_k(n, c, k + 1) >= p - 1e-12
    if c < n: assert pass_at_k(n, c + 1, k) >= p - 1e-12


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=12))
def test_pass_at_one_is_the_mean_success(tasks):
    attempts = {f"t{i}": a for i, a in enumerate(tasks)}
    assert pass_curve(attempts, (1,))["pass"][0] == pytest.approx(over_passes(np.array(tasks, float).T).mean)
