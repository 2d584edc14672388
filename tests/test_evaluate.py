"""OSWorld's rules of evaluation, on task files in OSWorld's own shape and a real jail."""
import asyncio, shutil
import pytest, pytest_asyncio
from scalecua_nb.core.actions import parse_action
from scalecua_nb.core.records import CommandResult, Episode, Turn
from scalecua_nb.core.tasks import parse_task
from scalecua_nb.desktop.base import DesktopError, SetupError
from scalecua_nb.judging.evaluate import broke_after_acting, evaluate, judging_by
from scalecua_nb.judging.jail import Jail, Limits
from scalecua_nb.judging.request import fault_of

pytestmark = [pytest.mark.asyncio(loop_scope='module'), pytest.mark.skipif(not shutil.which('bwrap'), reason='needs bubblewrap: apt-get install bubblewrap')]

class Desk:
    "Files in memory and a real shell."
    size = (1280, 800)
    def __init__(self, files=None, fault=None): self.files, self.fault, self.setups, self.reads = files or {}, fault, [], []
    async def setup(self, steps):
        self.setups += steps
        if self.fault: raise self.fault
    async def read_file(self, path):
        self.reads.append(path)
        if path not in self.files: raise FileNotFoundError(path)
        return self.files[path]
    async def run(self, command, timeout=60):
        p = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
        out, err = await asyncio.wait_for(p.communicate(), timeout)
        return CommandResult(p.returncode, out.decode(), err.decode())

def task(func, result=None, expected=None, **kw):
    e = dict(func=func, **kw)
    if result is not None: e['result'] = result
    if expected is not None: e['expected'] = expected
    return parse_task(dict(id='t', instruction='Do it.', evaluator=e))

rule = lambda **r: dict(type='rule', rules=r)
file = lambda path: dict(type='vm_file', path=path, dest=path.rpartition('/')[2])
ended = lambda end='done', **kw: Episode('t', turns=[Turn(1, [parse_action(dict(action='wait', duration=1))])], end=end, **kw)

@pytest_asyncio.fixture(loop_scope='module', scope='module')
async def jail():
    async with Jail(limits=Limits(seconds=10)) as j: yield j

async def test_osworlds_command_line_task(jail):
    "28cc3b7e (os): a shell string, an exact match with the newline kept."
    t = task('exact_match', dict(type='vm_command_line', command="echo 'Volume: 100%' | grep '^Volume' | awk '{print $2}' | sed 's/%//g'", shell=True), rule(expected='100\n'))
    assert (await evaluate(Desk(), t, ended(), jail)).score == 1.
    t = task('exact_match', dict(type='vm_command_line', command=['printf', '%s', '70']), rule(expected='100\n'))
    assert (await evaluate(Desk(), t, ended(), jail)).score == 0.

async def test_stderr_does_not_count_as_output(jail):
    t = task('check_include_exclude', dict(type='vm_command_line', command='echo good; echo bad >&2'), rule(include=['good'], exclude=['bad']))
    assert (await evaluate(Desk(), t, ended(), jail)).score == 1.

HALF = {'check_half': 'def check_half(result, **options): return 0.0 if result is None else options.get("credit", 0.5)'}
two = lambda conj, a, b: task(['check_half', 'check_half'], [file('/a'), file('/b')], None, conj=conj, options=[{'credit': a}, {'credit': b}])

@pytest.mark.parametrize('conj,a,b,score,reads', [
    ('and', 1., .5, .75, 2), ('and', 0., 1., 0., 1), ('and', 1., 1., 1., 2), ('and', .2, 0., 0., 2),
    ('or', .2, .5, .5, 2), ('or', 1., .5, 1., 1), ('or', 0., 0., 0., 2), ('or', .5, .2, .5, 2)])
async def test_and_or(jail, conj, a, b, score, reads):
    desk = Desk({'/a': b'', '/b': b''})
    v = await evaluate(desk, two(conj, a, b), ended(), jail, HALF)
    assert v.score == pytest.approx(score) and len(desk.reads) == reads
    assert list(v.subscores) == ['check_half#1', 'check_half#2'][:reads]

async def test_missing_files(jail):
    for conj, files, score in (('and', {'/b': b''}, 0.), ('or', {'/b': b''}, 1.), ('or', {}, 0.)):
        assert (await evaluate(Desk(files), two(conj, 1., 1.), ended(), jail, HALF)).score == score

async def test_getter_that_raises_file_not_found_scores_0_even_under_or(jail):
    fns = {'get_a': 'def get_a(env, config): return open("/tmp/none").read()', **HALF}
    t = task(['check_half', 'check_half'], [dict(type='a'), file('/b')], conj='or', options=[{}, {'credit': 1.}])
    assert (await evaluate(Desk({'/b': b''}), t, ended(), jail, fns)).score == 1.
    t = task('check_half', dict(type='a'))
    v = await evaluate(Desk(), t, ended(), jail, fns)
    assert (v.score, v.status) == (0., 'scored') and v.detail.startswith('no such file')

async def test_missing_file_of_what_was_expected_blocks(jail):
    fns = {'get_gold': 'def get_gold(env, config): return open("/tmp/none").read()'}
    v = await evaluate(Desk({'/a': b'x'}), task('exact_match', file('/a'), dict(type='gold')), ended(), jail, fns)
    assert fault_of(v) == 'getter'

async def test_expected_is_left_out_where_the_task_has_none(jail):
    fns = {'check_one': 'def check_one(*args, **kw): return float(len(args) == 1)', 'check_two': 'def check_two(*args, **kw): return float(len(args) == 2)'}
    for func, expected in (('check_one', None), ('check_one', {}), ('check_two', rule(x=1))):
        assert (await evaluate(Desk({'/a': b''}), task(func, file('/a'), expected), ended(), jail, fns)).score == 1.

async def test_metric_without_a_getter(jail):
    assert (await evaluate(Desk(), task('check_none'), ended(), jail, {'check_none': 'def check_none(): return 0.25'})).score == .25

async def test_one_options_object_serves_all_metrics(jail):
    t = task(['check_half', 'check_half'], [file('/a'), file('/b')], options={'credit': .25, '_note': 'for readers'})
    assert (await evaluate(Desk({'/a': b'', '/b': b''}), t, ended(), jail, HALF)).score == .25

@pytest.mark.parametrize('end,infeasible,feasible', [('fail', 1., 0.), ('done', 0., 1.), ('turn_limit', 0., 1.), ('length', 0., 1.), ('answer', 0., 1.)])
async def test_giving_up(jail, end, infeasible, feasible):
    assert (await evaluate(Desk(), task('infeasible'), ended(end), jail)).score == infeasible
    assert (await evaluate(Desk(), task('check_none'), ended(end), jail, {'check_none': 'def check_none(): return 1.0'})).score == feasible

async def test_giving_up_does_not_touch_a_dead_desktop(jail):
    desk = Desk(fault=DesktopError('gone'))
    t = task('check_half', file('/a'), postconfig=[dict(type='sleep', parameters=dict(seconds=1))])
    v = await evaluate(desk, t, ended('fail'), jail, HALF)
    assert (v.score, v.status, desk.setups) == (0., 'scored', [])

async def test_postconfig_runs_first_and_blocks(jail):
    steps = [dict(type='execute', parameters=dict(command=['true']))]
    t = task('check_half', file('/a'), postconfig=steps)
    desk = Desk({'/a': b''}); assert (await evaluate(desk, t, ended(), jail, HALF)).score == .5 and desk.setups == steps
    for fault, name in ((SetupError('execute failed'), 'postconfig'), (DesktopError('gone'), 'desktop')):
        desk = Desk({'/a': b''}, fault); v = await evaluate(desk, t, ended(), jail, HALF)
        assert fault_of(v) == name and not desk.reads and broke_after_acting(ended(verdict=v))

async def test_blocked_and_broken_episodes(jail):
    v = await evaluate(Desk(), two('and', 1., 1.), ended('blocked', cause='DesktopError: gone'), jail, HALF)
    assert v.status == 'blocked' and 'gone' in v.detail
    v = await evaluate(Desk(), task('infeasible'), ended('agent_broke', cause='gone'), jail)
    assert (v.score, v.status) == (0., 'scored')

@pytest.mark.parametrize('evaluator,says', [
    (dict(func='check_nowhere', result=dict(type='rule', rules=1)), 'no getter or metric is called check_nowhere'),
    (dict(func='exact_match', result=dict(type='cloud_file')), 'no getter or metric is called get_cloud_file'),
    (dict(func='exact_match', result=dict(path='/a')), '"type" that names a getter'),
    (dict(func='exact_match', result=dict(type='rule', rules=1), expected=[1]), '"type" that names a getter'),
    (dict(func='get_rule', result=dict(type='rule', rules=1)), ''),
    (dict(func='__import__', result=dict(type='rule', rules='os')), 'no getter or metric is called __import__'),
    (dict(func=[], result=[]), 'names no metric')])
async def test_a_task_that_is_wired_wrongly_is_no_score(jail, evaluator, says):
    v = await evaluate(Desk(), parse_task(dict(id='t', instruction='x', evaluator=evaluator)), ended(), jail)
    assert v.status == 'blocked' and says in v.detail, v

async def test_unused_broken_source_blocks_too(jail):
    v = await evaluate(Desk({'/a': b''}), task('check_half', file('/a')), ended(), jail, {**HALF, 'get_b': 'def get_b(:'})
    assert fault_of(v) == 'judge error' and 'get_b cannot be loaded' in v.detail

async def test_judging_by_is_what_rollout_takes(jail):
    judge = judging_by(jail, lambda t: HALF)
    vs = await asyncio.gather(*(judge(Desk({'/a': b''}), task('check_half', file('/a')), ended()) for _ in range(20)))
    assert [v.score for v in vs] == [.5] * 20
