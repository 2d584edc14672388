"""The checker and the loop on live desktops: sound candidates pass, spoilt ones do not, and a killed run loses nothing."""
from __future__ import annotations
import asyncio, json, os, signal, subprocess, sys, time
import pytest
from scalecua_nb.core.store import EpisodeStore
from scalecua_nb.core.tasks import TaskPool
from scalecua_nb.judging.jail import Jail
from scalecua_nb.verigen.candidate import Candidate
from scalecua_nb.verigen.checker import Checker
from scalecua_nb.verigen.grammar import grammar_of
from scalecua_nb.verigen.loop import Journal, lender, synthesise
from scalecua_nb.verigen.script import click, turn

pytestmark = [pytest.mark.desktop, pytest.mark.slow]

def spoilt(c: Candidate, **changes) -> Candidate: return c.model_copy(update=changes)

def lax(c: Candidate) -> Candidate:
    "The same task with a judge that pays as soon as its getter sees something."
    name = c.task.evaluator.func
    return spoilt(c, functions={**c.functions, name: f'def {name}(result, expected, **options):\n    return float(result is not None)\n'})

async def test_sound_and_spoilt_candidates(tmp_path):
    calc, link, edit = grammar_of('calc').propose(0), grammar_of('files').propose(12), grammar_of('files').propose(6)
    store = EpisodeStore(tmp_path / 'episodes'); desktops = lender('live', 2)
    async with Jail() as jail:
        try:
            checker = Checker(desktops, jail, store)
            good, paid, unsaved, lost, gone = await asyncio.gather(checker(calc), checker(lax(edit)), checker(spoilt(edit, oracle=edit.oracle[:-2])),
                checker(spoilt(link, oracle=[click('No such button', timeout=1)])), checker(spoilt(link, task=link.task.model_copy(update=dict(config=[dict(type='open', parameters=dict(path='/home/user/nowhere.txt'))])))))
        finally: await desktops.close()
    assert good.passed and [r['name'] for r in good.details['runs']][:2] == ['untouched', 'oracle'] and len(good.details['runs']) == len(calc.scripts())
    assert [r.kind for r in paid.reasons] == ['solved_at_reset']
    assert [r.kind for r in unsaved.reasons] == ['unsolvable']
    assert [r.kind for r in lost.reasons] == ['script_error'] and 'No such button' in lost.reasons[0].detail
    assert [r.kind for r in gone.reasons] == ['setup_error'] and 'nowhere' in gone.reasons[0].detail
    kept = {e.rollout_id: e for e in store.episodes(images=True)}                # the proof, with its screens
    proof = kept[good.details['runs'][1]['rollout_id']]
    assert proof.score == 1 and len(proof.observations) == len(proof.turns) + 1 and proof.observations[0].image.shape == (800, 1280, 3)

async def test_a_broken_desktop_is_not_the_candidates_fault():
    "The first desktop dies in the middle of the oracle; the run is repeated on a fresh one."
    desktops, c, died = lender('live', 1), grammar_of('files').propose(12), []
    class Dying:
        def lease(self): return self._lease()
        from contextlib import asynccontextmanager
        @asynccontextmanager
        async def _lease(self):
            async with desktops.lease() as desktop:
                act = desktop.act
                async def once(actions):
                    if not died and any(a.action == 'type' for a in actions):
                        died.append(True); await desktop.close()
                    return await act(actions)
                desktop.act = once
                try: yield desktop
                finally: del desktop.act
    async with Jail() as jail:
        try: said = await Checker(Dying(), jail)(c)
        finally: await desktops.close()
    assert died and said.passed, said.reasons

RUN = 'import asyncio, sys; from scalecua_nb.verigen.loop import main; main(sys.argv[1], "files", 5, 2, 10)'

@pytest.mark.parametrize('how', [signal.SIGKILL, signal.SIGINT])
async def test_killed_and_resumed(tmp_path, how):
    said = tmp_path / 'stderr.txt'
    run = subprocess.Popen([sys.executable, '-c', RUN, str(tmp_path)], stderr=said.open('w'))
    for _ in range(600):
        await asyncio.sleep(.2); assert run.poll() is None, said.read_text()[-1000:]
        if (tmp_path / 'pool' / 'catalog.jsonl').exists() and len(TaskPool(tmp_path / 'pool')) >= 2: break
    run.send_signal(how); run.wait(30)
    before = set(TaskPool(tmp_path / 'pool'))
    assert len(before) >= 2
    with (tmp_path / 'rounds.jsonl').open('ab') as f: f.write(b'{"place": "files-')
    said = await synthesise(tmp_path, ["files"], 5, 2, 10, progress=False)
    pool, rounds = TaskPool(tmp_path / 'pool'), Journal(tmp_path / 'rounds.jsonl').rounds
    assert before <= set(pool) and said['verified'] == len(pool) == 5 and said['unverified_accepted'] == 0
    lines = (tmp_path / 'pool' / 'catalog.jsonl').read_text().splitlines()
    assert len(lines) == len({json.loads(l)['id'] for l in lines}) == 5             # each accepted task written once
    assert sorted(r.place for r in rounds if r.outcome == 'accepted') == sorted(f'files-{s}' for s in range(10, 15))
    for i in pool: assert Candidate.from_json((tmp_path / 'candidates' / f'{i}.json').read_text()).functions == pool.functions(i) and pool[i].metadata['validation']['validation_passed']

async def test_mistakes_are_told(tmp_path):
    for error, kw in (('no task grammar', dict(applications=['paint'])), ('at least 1', dict(count=0)), ('no role', dict(without=['boss']))):
        with pytest.raises(ValueError, match=error): await synthesise(tmp_path, **kw)
    (tmp_path / 'rounds.jsonl').write_text('{"place": 3}\n')
    with pytest.raises(ValueError, match='line 1 is not a recorded round'): await synthesise(tmp_path, ['files'], 1)
