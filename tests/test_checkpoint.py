"""Checkpoints under kill -9, a full disk and Ctrl-C; a killed run that goes on to the same numbers."""
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from scalecua_nb.rl.checkpoint import CheckpointError, Checkpoints, restore_rng

ROOT = Path(__file__).resolve().parent.parent


def start(script: str, *args) -> subprocess.Popen:
    "A Python process running `script` with `args`."
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(script), *map(str, args)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


SAVING = """
    import os, sys
    from scalecua_nb.rl.checkpoint import Checkpoints
    points = Checkpoints(sys.argv[1], keep=2, identity={"run": 1})
    def write(folder):
        for i in range(6): (folder / f"{i}.bin").write_bytes(os.urandom(200_000))
    step = points.steps()[-1] if points.steps() else 0
    print("ready", flush=True)
    while True:
        step += 1
        points.save(step, {"step": step, "filler": list(range(5000))}, {"trainer": write})
"""


@pytest.mark.slow
def test_killed_at_any_moment_the_newest_checkpoint_is_sound(tmp_path):
    points, last, rng = Checkpoints(tmp_path / "run", identity={"run": 1}), 0, random.Random(0)
    for _ in range(3):
        process = start(SAVING, tmp_path / "run")
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        for _ in range(10):                       # stopped and looked at, as a kill would leave it
            time.sleep(rng.uniform(0.005, 0.08))
            process.send_signal(signal.SIGSTOP)
            copy = tmp_path / "copy"
            shutil.copytree(tmp_path / "run", copy)
            process.send_signal(signal.SIGCONT)
            found = Checkpoints(copy, identity={"run": 1}).latest()
            assert found is None or (found.state["step"] == found.step >= last and len(list(found.part("trainer").iterdir())) == 6)
            last = found.step if found else last
            shutil.rmtree(copy)
        process.kill(); process.communicate()
        found = points.latest()
        assert found.step >= last > 0 and found.state["step"] == found.step
        last = found.step
    points.save(last + 1, {})
    assert not list((tmp_path / "run").glob(".writing-*"))          # what the dead left is gone


def test_a_full_disk_leaves_the_last_one_good(tmp_path):
    points = Checkpoints(tmp_path, identity={"run": 1})
    points.save(1, {"n": 1}, {"trainer": lambda d: (d / "w").write_bytes(b"x" * 1000)})
    old, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old[1]))     # a write beyond fails with an error of the file system, as on a full disk
    try:
        with pytest.raises(CheckpointError, match="could not be written.*the last one, step 1, is intact"):
            points.save(2, {"n": 2}, {"trainer": lambda d: (d / "w").write_bytes(os.urandom(1_000_000))})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old); signal.signal(signal.SIGXFSZ, handler)
    assert points.steps() == [1] and points.latest().state["n"] == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "step-00000001"]


def test_interrupted_saving_leaves_the_last_one_good(tmp_path):
    points = Checkpoints(tmp_path)
    points.save(1, {})
    def interrupted(folder): (folder / "half").write_bytes(b"1"); raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): points.save(2, {}, {"trainer": interrupted})
    assert points.latest().step == 1 and not list(tmp_path.glob(".writing-*"))


@pytest.mark.parametrize("harm, message", [
    (lambda d: (d / "state.json").write_text("{}"), "not as written"),
    (lambda d: (d / "trainer" / "w").unlink(), "missing or not as written"),
    (lambda d: (d / "checkpoint.json").write_text("{"), "cannot be read"),
    (lambda d: (d / "checkpoint.json").write_text("[]"), "format None"),
    (lambda d: (d / "checkpoint.json").write_text(json.dumps(dict(format=1, step=2, identity={}, files={"../../secret": [1, None]}))), "outside it"),
])
def test_a_damaged_checkpoint_is_told_and_passed_over(tmp_path, harm, message):
    points = Checkpoints(tmp_path)
    for step in (1, 2): points.save(step, {}, {"trainer": lambda d: (d / "w").write_bytes(b"1")})
    harm(points.folder(2))
    with pytest.raises(CheckpointError, match=message): points.load(2)
    with pytest.warns(UserWarning, match=message): assert points.latest().step == 1


def test_two_writers_are_told(tmp_path):
    points = Checkpoints(tmp_path)
    def inner(folder):
        with pytest.raises(CheckpointError, match="another process is writing"): Checkpoints(tmp_path).save(2, {})
    points.save(1, {}, {"trainer": inner})
    assert points.steps() == [1]


def test_no_pickle_is_read(tmp_path):
    points = Checkpoints(tmp_path)
    points.save(1, {})
    state = points.latest().state["rng"]
    with pytest.raises(CheckpointError, match="older checkpoint"): restore_rng({**state, "torch": "zz"})
    before = torch.rand(3)
    restore_rng(state); a = torch.rand(3), np.random.rand()
    restore_rng(state); b = torch.rand(3), np.random.rand()
    assert torch.equal(a[0], b[0]) and a[1] == b[1] and before is not None


TRAINING = """
    import asyncio, copy, hashlib, sys
    import numpy as np, torch
    from scalecua_nb.core.records import Episode, ImageSpan, Observation, Segment, Verdict
    from scalecua_nb.core.settings import LossSettings, RLSettings, SamplerSettings
    from scalecua_nb.core.store import EpisodeStore
    from scalecua_nb.engine.base import Sampling
    from scalecua_nb.engine.tiny_model import BOS, IMAGE_PAD, VISION_END, VISION_START, build_tiny_model, image_grid
    from scalecua_nb.engine.torch import TorchEngine
    from scalecua_nb.rl.advantage import grade
    from scalecua_nb.rl.batch import Batch
    from scalecua_nb.rl.checkpoint import Checkpoints, restore_rng
    from scalecua_nb.rl.torch_trainer import TorchTrainer
    from scalecua_nb.sampling.base import Outcome
    from scalecua_nb.sampling.baselines import make_sampler
    torch.set_num_threads(1)

    root, iterations = sys.argv[1], int(sys.argv[2])
    bans = tuple(i for i in range(128) if not 40 <= i < 44)
    tasks = {f"t{i}": None for i in range(20)}
    screens = {t: np.random.default_rng(i).integers(0, 256, (64, 96, 3), dtype=np.uint8) for i, t in enumerate(tasks)}

    async def roll(engine, task, name, seed, group):
        obs = Observation(screens[task]); n, thw = image_grid((96, 64))
        ids = [BOS, VISION_START] + [IMAGE_PAD] * n + [VISION_END]; span = ImageSpan(obs.sha256, 2, n, thw)
        g = await engine.generate(name, ids, [(span, obs)], Sampling(max_tokens=1, banned_ids=bans, seed=seed)); await engine.release(name)
        ids = np.array(ids + g.ids, np.int32); mask = np.zeros(len(ids), np.uint8); mask[-1] = 1; logp = np.zeros(len(ids), np.float32); logp[-1] = g.logprobs[0]
        segment = Segment(ids, mask, logp, np.where(mask, g.versions[0], -1).astype(np.int32), mask.astype(np.int32), [span], name, group, task)
        return Episode(task, name, group, observations=[obs], segments=[segment], verdict=Verdict(float(g.ids[0] == 40 + int(task[1:]) % 4)), end="done")

    async def main():
        model = build_tiny_model()
        trainer = TorchTrainer(model, RLSettings(learning_rate=2e-3), LossSettings(kl=0.01), banned_ids=bans)
        engine = TorchEngine(copy.deepcopy(model))
        sampler, noise = make_sampler(SamplerSettings(), 0, iterations * 6), np.random.default_rng(1)
        sampler.start(tasks)
        points, done, flying = Checkpoints(root, identity={"run": "toy"}), 0, []
        if last := points.latest():
            trainer.load(last.part("trainer")); sampler.load_state_dict(last.state["sampler"]); restore_rng(last.state["rng"], noise=noise); done = last.step
            flying = list(EpisodeStore(last.part("in_flight")).episodes(segments=True, images=True))
        await trainer.publish(engine, done)
        for it in range(done, iterations):
            draws = sampler.draw(6)
            episodes = [await roll(engine, d.task_id, f"{it}-{k}-{i}", int(noise.integers(2**62)), f"{it}-{k}") for k, d in enumerate(draws) for i in range(4)]
            ready, flying = flying + episodes[:-8], episodes[-8:]        # two groups of each step serve the next one
            grades = grade(ready); batch = Batch.from_episodes(ready, grades)
            loss = trainer.step(batch)["loss"] if batch.items else 0.0
            await trainer.publish(engine, it + 1)
            groups = {}
            for e in episodes: groups.setdefault((e.group_id, e.task_id), []).append(e.score)
            sampler.update([Outcome(t, tuple(s), 0) for (_, t), s in groups.items()])
            def in_flight(folder):
                store = EpisodeStore(folder)
                for e in flying: store.put(e)
            points.save(it + 1, {"sampler": sampler.state_dict(), "loss": loss}, {"trainer": trainer.save, "in_flight": in_flight}, {"noise": noise})
            print(it + 1, repr(loss), flush=True)
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
        print("end", digest, noise.random(), hashlib.sha256(str(sampler.state_dict()).encode()).hexdigest(), flush=True)
    asyncio.run(main())
"""


@pytest.mark.slow
def test_a_run_killed_anywhere_goes_on_to_the_same_numbers(tmp_path):
    "Weights, optimizer, reference, sampler, random numbers and episodes in flight: killed, the run ends as if it had never been."
    whole = start(TRAINING, tmp_path / "whole", 5)
    out, err = whole.communicate(timeout=300)
    assert "end" in out, err
    lines, seen = out.splitlines(), []
    for kill_after in (2, None):
        process = start(TRAINING, tmp_path / "killed", 5)
        if kill_after is None: seen += process.communicate(timeout=300)[0].splitlines(); break
        for _ in range(kill_after): seen.append(process.stdout.readline().strip())
        time.sleep(0.03 * kill_after)                                    # somewhere inside the next iteration
        process.kill(); process.communicate()
    assert seen[-1] == lines[-1]                                         # the same weights to the last bit
    assert set(seen) <= set(lines)                                       # and the same loss at every iteration
