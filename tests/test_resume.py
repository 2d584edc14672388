"A training stage that is killed in the middle goes on to the same numbers."
import asyncio, json, os, signal, subprocess, sys, time
from pathlib import Path
import pytest

pytestmark = pytest.mark.slow

STAGE = '''
import asyncio, sys
from scalecua_nb.core.config import load_preset
from scalecua_nb.core.tasks import TaskPool
from scalecua_nb.launch.local import Local, TaskSet
from scalecua_nb.launch.train import run_stage
pool, model, out = sys.argv[1:4]
c = load_preset('demo', {'rl.batch_tasks': 4, 'rl.rollouts_per_task': 4, 'rl.checkpoint_every': 2, 'stages.probe_rollouts': 2, 'desktop.concurrency': 16})
async def main():
    async with Local(c, model) as parts: await run_stage(parts, TaskSet.of_pool(TaskPool(pool)), out, 'rl', 7)
asyncio.run(main())
'''
TIMED = ('seconds', 'cpu_s', 'step_s', 'tokens_per_s')


@pytest.fixture(scope='module')
def start(tmp_path_factory):
    "A pool of MiniDesk tasks and a policy that sometimes solves them."
    from scalecua_nb.core.settings import WarmStartSettings
    from scalecua_nb.engine.tiny_model import build_tiny_model
    from scalecua_nb.launch.train import save_policy
    from scalecua_nb.rl.warmstart import warm_start
    from scalecua_nb.verigen.loop import synthesise
    folder = tmp_path_factory.mktemp('start'); families = ('press_1', 'check_1', 'popup')
    asyncio.run(synthesise(folder / 'run', ('minidesk',), 12, templates=families, progress=False))
    model = build_tiny_model(seed=0)
    asyncio.run(warm_start(model, WarmStartSettings(enabled=True, batch_episodes=32, evaluate_every=10, evaluate_episodes=60, stop_at=.3, steps=150), families))
    return folder / 'run' / 'pool', save_policy(model, folder / 'policy')


def launch(start, out):
    return subprocess.Popen([sys.executable, '-c', STAGE, *map(str, start), str(out)], env={**os.environ, 'OMP_NUM_THREADS': '1'}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def rows(out):
    lines = [json.loads(line) for line in (Path(out) / 'metrics.jsonl').read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.rpartition('/')[2].startswith(TIMED) and not k.startswith('seconds')} for row in lines]


def test_killed_stage_goes_on_to_the_same_numbers(start, tmp_path):
    whole = launch(start, tmp_path / 'whole')
    assert whole.wait(300) == 0, whole.stderr.read().decode()[-2000:]
    want = rows(tmp_path / 'whole')
    assert [r['iteration'] for r in want] == list(range(1, 8)) and any(r['trained_tokens'] for r in want)

    victim = launch(start, tmp_path / 'killed'); metrics = tmp_path / 'killed' / 'metrics.jsonl'
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count('\n') >= 3): time.sleep(.01)
    victim.send_signal(signal.SIGKILL); victim.wait(); victim.stderr.close()
    assert metrics.read_text().count('\n') < 7, 'it was to be killed in the middle'

    again = launch(start, tmp_path / 'killed')
    assert again.wait(300) == 0, again.stderr.read().decode()[-2000:]
    assert rows(tmp_path / 'killed') == want
