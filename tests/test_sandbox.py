"""Live desktops: text arrives exactly, nothing gets in or out, nothing stays behind."""
import asyncio, io, os, signal, subprocess, sys, time, zipfile
from pathlib import Path
from xml.etree import ElementTree as ET

import openpyxl
import pytest

from scalecua_nb.core.actions import *
from scalecua_nb.core.tasks import parse_task
from scalecua_nb.desktop.base import Desktop, DesktopError, SetupError
from scalecua_nb.desktop.bench import family
from scalecua_nb.desktop.bubble import check, sweep
from scalecua_nb.desktop.channel import FileRefused
from scalecua_nb.desktop.pool import Pool
from scalecua_nb.desktop.probe import Settle
from scalecua_nb.desktop.sandbox import SandboxDesktop

try: check(); missing = ''
except DesktopError as e: missing = str(e)
pytestmark = [pytest.mark.desktop, pytest.mark.skipif(bool(missing), reason=missing)]

ASCII = ''.join(map(chr, range(33, 127)))
HARD = f'{ASCII} é ñ ß “quoted” – € ≤ 漢字 かな 한글 Ωμέγα Жук ‏שלום 😀👩‍🚀'


@pytest.fixture
async def desktop():
    async with SandboxDesktop() as d: yield d


async def open_file(d, path, data=b''):
    await d.setup([dict(type='write_file', parameters=dict(path=path, content=data.decode())), dict(type='open', parameters=dict(path=path))] if path.endswith('.txt') else
                  [dict(type='open', parameters=dict(path=path))])


async def eventually(read, want, seconds=20):
    "Read until it is what was wanted: a loaded machine may take its time to save."
    end = time.monotonic() + seconds
    while (got := await read()) != want and time.monotonic() < end: await asyncio.sleep(.1)
    assert got == want


async def text_of(d, path): return (await d.read_file(path)).decode()


# ---- text ----------------------------------------------------------------------------------------------------------------------------------------------

async def test_text_arrives_exactly_in_an_editor(desktop):
    await open_file(desktop, '/home/user/note.txt')
    text = f'{HARD}\n\tindented\n<a href="x">&amp;</a> | tee\n'
    await desktop.act([Type(text=text), Key(text='ctrl+s')])
    await eventually(lambda: text_of(desktop, '~/note.txt'), text)


@pytest.mark.slow
async def test_more_characters_than_spare_keys_arrive_exactly(desktop):
    await open_file(desktop, '/home/user/note.txt')
    text = ''.join(chr(0x4e00 + 7 * i) for i in range(400)) + ''.join(chr(0x4e00 + 7 * i) for i in range(0, 400, 3))
    await desktop.act([Type(text=text), Key(text='ctrl+s')])
    await eventually(lambda: text_of(desktop, '~/note.txt'), text)


async def test_text_arrives_exactly_in_a_terminal(desktop):
    await desktop.setup([dict(type='launch', parameters=dict(command='xfce4-terminal'))])
    await desktop.act([Type(text=f"cat > out.txt <<'END'\n{HARD}\nEND\n")])
    await eventually(lambda: text_of(desktop, '~/out.txt'), HARD + '\n')


@pytest.mark.slow
async def test_text_arrives_exactly_in_calc(desktop):
    book, file = openpyxl.Workbook(), io.BytesIO()
    book.save(file); await desktop.write_file('~/book.xlsx', file.getvalue())
    await desktop.setup([dict(type='open', parameters=dict(path='/home/user/book.xlsx'))])
    cells = ['x<|>é', '漢字😀', "it's", '"quoted" -- (c)', 'two  spaces', 'iPhone', 'TWo', '1st', 'a,b;c', HARD]
    await desktop.act([Type(text=''.join(f'{c}\n' for c in cells)), Key(text='ctrl+s')])
    async def saved():
        try: sheet = openpyxl.load_workbook(io.BytesIO(await desktop.read_file('~/book.xlsx'))).active
        except (zipfile.BadZipFile, KeyError): return None               # half written
        return [sheet.cell(i + 1, 1).value for i in range(len(cells))]
    await eventually(saved, cells)


async def test_text_is_not_changed_by_caps_lock(desktop):
    await open_file(desktop, '/home/user/note.txt')
    await desktop.act([Key(text='caps_lock'), Type(text='Not Shouting'), Key(text='ctrl+s')])
    await eventually(lambda: text_of(desktop, '~/note.txt'), 'Not Shouting')
    assert await desktop.probe.x.locked()


# ---- every kind of action, as a program sees it ---------------------------------------------------------------------------------------------------------

LOGGER = '''
import tkinter as tk
root = tk.Tk(); root.overrideredirect(True); root.geometry('400x300+0+0'); log = open('/home/user/events', 'w', buffering=1)
def tell(kind): return lambda e: log.write(f'{kind} {e.num if "button" in kind else e.keysym if "key" in kind else "-"} {e.x} {e.y} {e.state & 0x10d}\\n')
for kind, event in dict(button='<Button>', unbutton='<ButtonRelease>', key='<Key>', unkey='<KeyRelease>', motion='<Motion>').items(): root.bind(event, tell(kind))
root.focus_force(); root.mainloop()
'''


@pytest.fixture
async def logger(tmp_path):
    (tmp_path / 'log.py').write_text(LOGGER)
    tmp_path.chmod(0o755)
    service = dict(argv=['python3', '/opt/programs/log.py'], after='/tmp/.X11-unix/X0')
    async with SandboxDesktop(size=(400, 300), session='bare', settle=Settle(.05, .02, .05), binds={'/opt/programs': tmp_path}, services=[service]) as d:
        while not (await d.observe()).image.any(): await asyncio.sleep(.02)
        await d.act([MouseMove(coordinate=(500, 500))]); await d.run(': > events')
        yield d


async def events(d, *actions):
    await d.run(': > events')
    step = await d.act(list(actions))
    await asyncio.sleep(.1)
    return [line.split() for line in (await d.read_file('~/events')).decode().replace('\0', '').splitlines()], step


async def test_clicks_and_modifiers_reach_a_program(logger):
    got, _ = await events(logger, LeftClick(coordinate=(250, 500)), RightClick(), MiddleClick(), DoubleClick(coordinate=(750, 100)), LeftClick(text='ctrl+shift'))
    buttons = [g for g in got if g[0] == 'button']
    assert [(b[1], b[2], b[3]) for b in buttons] == [('1', '100', '150'), ('3', '100', '150'), ('2', '100', '150'), ('1', '300', '30'), ('1', '300', '30'), ('1', '300', '30')]
    assert [int(b[4]) & 5 for b in buttons] == [0, 0, 0, 0, 0, 5]


async def test_drags_move_in_steps(logger):
    got, _ = await events(logger, LeftClickDrag(start_coordinate=(100, 100), coordinate=(900, 900)))
    moves = [g for g in got if g[0] == 'motion' and int(g[4]) & 256]
    down, up = (next(g for g in got if g[0] == k) for k in ('button', 'unbutton'))
    assert (down[2:4], up[2:4]) == (['40', '30'], ['360', '270']) and len(moves) > 5
    got, _ = await events(logger, LeftMouseDown(coordinate=(100, 100)), MouseMove(coordinate=(500, 500)), LeftMouseUp())
    assert [g[0] for g in got if 'button' in g[0]] == ['button', 'unbutton'] and got[-1][2:4] == ['200', '150']


async def test_wheel_keys_and_cursor(logger):
    got, _ = await events(logger, Scroll(coordinate=(500, 500), direction='down', amount=3), Scroll(direction='up', amount=2))
    assert [g[1] for g in got if g[0] == 'button'] == ['5'] * 3 + ['4'] * 2
    got, _ = await events(logger, Key(text='ctrl+shift+S'), Key(text='F5'))
    assert [g[1] for g in got if g[0] == 'key'] == ['Control_L', 'Shift_L', 'S', 'F5'] and [g[1] for g in got if g[0] == 'unkey'] == ['S', 'Shift_L', 'Control_L', 'F5']
    start = time.monotonic()
    await events(logger, HoldKey(text='a', duration=.4))
    assert time.monotonic() - start > .4
    _, step = await events(logger, MouseMove(coordinate=(250, 750)), CursorPosition())
    assert to_pixels(eval(step.results[1].output, {}), logger.size) == to_pixels((250, 750), logger.size)


async def test_bad_actions_are_results_and_signals_end_the_turn(logger):
    step = await logger.act([Key(text='ctrl+nonsense'), WriteFile(text='/usr/bin/x', content=''), WriteFile(text='~/ok.txt', content='é'), Type(text='a\x1bb'), WriteFile(text='~/a\0b'), Done(), LeftClick(coordinate=(1, 1))])
    assert [r.ok for r in step.results] == [False, False, True, False, False, True, False] and step.signal == 'done' and 'nonsense' in step.results[0].error
    assert await logger.read_file('~/ok.txt') == 'é'.encode()


# ---- walls ----------------------------------------------------------------------------------------------------------------------------------------------

async def test_nothing_of_this_machine_is_visible(desktop, tmp_path, monkeypatch):
    (tmp_path / 'secret').write_text('x')
    for path in (tmp_path / 'secret', '/etc/shadow', '/root', '/usr/local/lib', '/opt/x', '/srv', Path(__file__).resolve(), sys.prefix):
        assert (await desktop.run(['test', '-e', str(path)])).returncode == 1, path
    assert (await desktop.run('ls /home')).stdout == 'user\n'
    assert (await desktop.run('touch /usr/bin/x /etc/x /opt/x')).returncode != 0
    assert 'SCALECUA' not in (await desktop.run('env')).stdout and (await desktop.run('echo $HOME $USER')).stdout == '/home/user user\n'
    seen = (await desktop.run('ps -eo args=')).stdout
    assert 'Xvfb' not in seen and 'pytest' not in seen


async def test_there_is_no_network(desktop):
    r = await desktop.run(['python3', '-c', 'import socket; socket.create_connection(("1.1.1.1", 53), 2)'])
    assert r.returncode and 'unreachable' in r.stderr.lower()
    assert (await desktop.run('cat /proc/net/dev')).stdout.count(':') == 1


async def test_process_1_cannot_be_killed_traced_or_reached(desktop):
    trace = 'import ctypes, os; l = ctypes.CDLL(None, use_errno=True); print(l.ptrace(16, 1, 0, 0), ctypes.get_errno())'
    assert (await desktop.run(['python3', '-c', trace])).stdout.split() == ['-1', '1']
    assert (await desktop.run('kill -9 1; kill -STOP 1; sleep .1; cat /proc/1/mem')).returncode
    assert (await desktop.run('ls /proc/1/fd')).returncode
    assert (await desktop.run('rm -f /tmp/.X11-unix/X0; mv /tmp/.X11-unix /tmp/y; touch /tmp/.X11-unix/z')).returncode
    assert (await desktop.run('echo alive')).stdout == 'alive\n'


async def test_a_program_that_grabs_the_server_does_not_stop_us(desktop):
    grab = 'import ctypes, time; x = ctypes.CDLL("libX11.so.6"); x.XOpenDisplay.restype = ctypes.c_void_p; d = ctypes.c_void_p(x.XOpenDisplay(None)); x.XGrabServer(d); x.XSync(d, 0); print(1); time.sleep(3)'
    task = asyncio.create_task(desktop.run(['python3', '-c', grab]))
    await asyncio.sleep(.6)
    start = time.monotonic()
    step = await desktop.act([MouseMove(coordinate=(200, 200)), CursorPosition()])
    assert step.results[1].ok and time.monotonic() - start < 2.4 and not task.done()
    assert (await task).stdout == '1\n'


async def test_what_must_not_be_read_is_refused(desktop):
    await desktop.run('ln -s /etc/passwd out; ln -s /proc/1/environ env; mkfifo pipe; truncate -s 2G big 2>/dev/null || truncate -s 1000M big; ln -s Documents in; echo hi > Documents/a; ln -s loop loop')
    for path in ('~/out', '~/pipe', '~/big', '~/../../etc/passwd', '~/loop', '~/Documents', '/dev/zero'):
        with pytest.raises(FileNotFoundError) as e: await desktop.read_file(path)
        assert isinstance(e.value, DesktopError), path
    for path in ('~/none', '~/Documents/a/b'):
        with pytest.raises(FileNotFoundError): await desktop.read_file(path)
    assert await desktop.read_file('~/in/a') == await desktop.read_file('/home/user/Documents/a') == b'hi\n'
    with pytest.raises(FileRefused): await desktop.write_file('~/out', b'x')


async def test_commands_end_and_their_output_is_bounded(desktop):
    start = time.monotonic()
    r = await desktop.run('echo before; sleep 60', timeout=.5)
    assert r.timed_out and r.stdout == 'before\n' and time.monotonic() - start < 5
    r = await desktop.run(['yes'], limit=100_000)
    assert r.returncode and len(r.stdout) == 100_000 and 'output' in r.stderr
    assert (await desktop.run(['no-such-program'])).returncode == 127
    assert (await desktop.run('sleep 60 & echo started')).stdout == 'started\n'


async def test_a_fork_bomb_stays_inside(desktop):
    await desktop.write_file('~/a.txt', b'x')
    await desktop.run(['python3', '-c', 'import os, time\nfor _ in range(5000):\n  try:\n    if os.fork() == 0: time.sleep(30); os._exit(0)\n  except OSError: break'], timeout=20)
    assert await desktop.read_file('~/a.txt') == b'x'
    await desktop.reset()
    assert (await desktop.run('echo ok')).stdout == 'ok\n'


async def test_two_desktops_do_not_meet():
    async with SandboxDesktop() as a, SandboxDesktop() as b:
        await a.write_file('~/only-a.txt', b'x')
        before = (await b.observe()).sha256
        await a.setup([dict(type='open', parameters=dict(path='/home/user/only-a.txt'))])
        assert (await b.observe()).sha256 == before and not await b.windows()
        with pytest.raises(FileNotFoundError): await b.read_file('~/only-a.txt')
        assert 'mousepad' not in (await b.run('ps -e')).stdout
        assert a.folder.uid is None or a.folder.uid != b.folder.uid


# ---- life and death -------------------------------------------------------------------------------------------------------------------------------------

def alive(pids): return [p for p in pids if os.path.exists(f'/proc/{p}') and 'Z' not in Path(f'/proc/{p}/stat').read_text().rsplit(')', 1)[1].split()[0]]


def mounts(): return Path('/proc/self/mountinfo').read_text()


async def test_reset_brings_back_the_first_screen(desktop):
    assert isinstance(desktop, Desktop)
    first = await desktop.reset()
    await open_file(desktop, '/home/user/Desktop/note.txt')
    await desktop.act([Type(text='é'), MouseMove(coordinate=(5, 5))])
    keys = dict(desktop.probe.keys.borrowed)
    again = await desktop.reset()
    assert again.sha256 == first.sha256 and keys and not desktop.probe.keys.borrowed
    assert not await desktop.windows() and (await desktop.run('ls ~/Desktop')).stdout == ''


async def test_close_leaves_nothing():
    before = mounts()
    d = await SandboxDesktop().start()
    pids, folder = family([p.pid for p in d._processes]), d.folder.path
    assert len(pids) > 8 and folder.is_dir() and mounts() == before
    await d.close(); await d.close()
    assert not alive(pids) and not folder.exists() and mounts() == before
    with pytest.raises(DesktopError, match='closed'): await d.reset()


@pytest.mark.parametrize('half', [0, 1])
async def test_a_dead_desktop_says_so_and_a_reset_revives_it(desktop, half):
    os.kill(desktop._processes[half].child, signal.SIGKILL)
    await asyncio.sleep(.2)
    for use in (desktop.observe(), desktop.act([LeftClick(coordinate=(5, 5))]), desktop.run('true'), desktop.read_file('~/x'), desktop.windows()):
        with pytest.raises(DesktopError) as e: await use
        assert '\n' not in str(e.value)
    await desktop.reset()
    assert (await desktop.act([LeftClick(coordinate=(5, 5))])).results[0].ok


async def test_death_in_the_middle_of_a_command(desktop):
    task = asyncio.create_task(desktop.run('sleep 30'))
    await asyncio.sleep(.2)
    os.kill(desktop._processes[1].child, signal.SIGKILL)
    with pytest.raises(DesktopError): await asyncio.wait_for(task, 5)


ORPHAN = '''
import asyncio, sys, time
from scalecua_nb.desktop.bench import family
from scalecua_nb.desktop.sandbox import SandboxDesktop
async def main():
    ds = [SandboxDesktop(), SandboxDesktop()]
    await asyncio.gather(*[d.start() for d in ds])
    await ds[0].launch(['mousepad']); await asyncio.sleep(.5)
    print(*family([p.pid for d in ds for p in d._processes]), flush=True); print(*[d.folder.path for d in ds], flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
'''


def test_a_killed_parent_leaves_nothing_running():
    p = subprocess.Popen([sys.executable, '-c', ORPHAN], stdout=subprocess.PIPE, text=True)
    pids, folders = [int(x) for x in p.stdout.readline().split()], p.stdout.readline().split()
    assert len(alive(pids)) > 16
    p.kill(); p.wait()
    end = time.monotonic() + 5
    while alive(pids) and time.monotonic() < end: time.sleep(.02)
    assert not alive(pids)
    sweep()
    assert not any(os.path.exists(f) for f in folders)


async def test_a_pool_replaces_the_dead():
    async with Pool(SandboxDesktop, size=2) as pool:
        async with pool.lease() as d: os.kill(d._processes[0].child, signal.SIGKILL)
        async with pool.lease() as e: assert (await e.run('echo ok')).stdout == 'ok\n'
        ds = list(pool._all)
    assert pool.metrics.leases == 2 and all(not d._processes for d in ds)


NOT_ROOT = '''
import asyncio, os
from scalecua_nb.core.actions import *
from scalecua_nb.desktop.sandbox import SandboxDesktop
async def main():
    assert os.getuid()
    async with SandboxDesktop() as d:
        await d.setup([dict(type='write_file', parameters=dict(path='/home/user/n.txt', content='')), dict(type='open', parameters=dict(path='/home/user/n.txt'))])
        await d.act([Type(text='é漢<'), Key(text='ctrl+s')])
        print((await d.read_file('~/n.txt')).decode())
        await d.run('mkdir -p a/b; touch a/b/c; chmod 0 a/b a')
        await d.reset()
        print((await d.run('ls ~ | wc -l; id -u')).stdout.split())
asyncio.run(main())
'''


@pytest.mark.skipif(os.geteuid() != 0, reason='starts a desktop as another user, so run it as root; without root every other test here covers it')
def test_it_works_without_root(tmp_path):
    for d in (tmp_path, *tmp_path.parents[:2]): d.chmod(0o755)
    home = tmp_path / 'home'; home.mkdir(); os.chown(home, 65534, 65534)
    packages = next(p for p in sys.path if p.endswith('site-packages'))
    env = dict(PATH=os.environ['PATH'], HOME=str(home), SCALECUA_STATE=str(home / 'state'), PYTHONPATH=f'{Path(__file__).resolve().parents[1]}:{packages}', PYTHONDONTWRITEBYTECODE='1')
    def as_nobody(python, code): return subprocess.run(['setpriv', '--reuid=65534', '--regid=65534', '--clear-groups', python, '-c', code], env=env, cwd='/', capture_output=True, text=True, timeout=120)
    pythons = [p for p in (sys.executable, f'/usr/bin/python3.{sys.version_info.minor}') if as_nobody(p, 'import numpy, pydantic, scalecua_nb').returncode == 0]
    if not pythons: pytest.skip('no Python here that a user other than root may run: install one outside /root')
    r = as_nobody(pythons[0], NOT_ROOT)
    assert r.returncode == 0, r.stderr
    assert r.stdout == "é漢<\n['7', '1000']\n" and not list((home / 'state').glob('[0-9]'))


# ---- set-up and trouble ---------------------------------------------------------------------------------------------------------------------------------

async def test_a_task_is_set_up(desktop):
    task = parse_task(dict(id='t', instruction='x', evaluator=dict(func='f'), config=[
        dict(type='download', parameters=dict(files=[dict(url='data:text/plain;base64,aGk=', path='/home/user/Documents/new/a.txt')])),
        dict(type='execute', parameters=dict(command=['python', '-c', 'open("size", "w").write("{SCREEN_WIDTH} {SCREEN_HEIGHT_HALF} {CLIENT_PASSWORD}")'])),
        dict(type='open', parameters=dict(path='/home/user/Documents/new/a.txt')), dict(type='launch', parameters=dict(command='xfce4-terminal')),
        dict(type='activate_window', parameters=dict(window_name='a.txt')), dict(type='sleep', parameters=dict(seconds=.1))]))
    await desktop.reset(task)
    assert await desktop.read_file('~/size') == b'1280 400 password'
    assert [w.title.split(' - ')[0] for w in await desktop.windows()] == ['~/Documents/new/a.txt', 'Terminal']
    await desktop.act([Type(text='top ')]); await desktop.act([Key(text='ctrl+s')])
    await eventually(lambda: text_of(desktop, '~/Documents/new/a.txt'), 'top hi')
    await desktop.setup([dict(type='close_window', parameters=dict(window_name='Mousepad'))])
    assert len(await desktop.windows()) == 1


@pytest.mark.parametrize('steps, says', [
    ([dict(type='lanch')], r"step 1 of 1 \(lanch\).*did you mean 'launch'"),
    ([dict(type='sleep', parameters=dict(seconds=0)), dict(type='open', parameters=dict(path='/nope'))], r'step 2 of 2 \(open\).*/nope does not exist'),
    ([dict(type='open', parameters=dict(file='/x'))], r'parameters\.(path|file)'),
    ([dict(type='download', parameters=dict(files=[dict(path='/home/user/x')]))], r'parameters\.files\.0\.url: field required'),
    ([dict(type='launch', parameters=dict(command=7))], r'parameters\.command'),
    ([dict(type='launch', parameters=dict(command='nonesuch'))], 'nonesuch'),
    ([dict(type='execute', parameters=dict(command='false'))], 'code 1'),
    ([dict(type='download', parameters=dict(files=[dict(url='https://example.org/x', path='/home/user/x')]))], 'local cache'),
    ([dict(type='write_file', parameters=dict(path='/usr/x', content=''))], 'Read-only'),
    ([dict(type='sleep', parameters=dict(seconds=1e9))], 'less than or equal to 120'),
    ([dict(type='execute', parameters=dict(command='sleep 9', timeout=.1))], 'did not end')])
async def test_a_failed_step_names_itself(desktop, steps, says):
    with pytest.raises(SetupError, match=says) as e: await desktop.setup(steps)
    assert '\n' not in str(e.value)


@pytest.mark.slow
async def test_the_tree_knows_where_a_cell_is(desktop):
    await desktop.setup([dict(type='launch', parameters=dict(command='libreoffice --calc'))])
    cp = '{https://accessibility.ubuntu.example.org/ns/component}'
    for showing in (False, True):
        cell = next(e for e in ET.fromstring(await desktop.accessibility(showing)).iter('table-cell') if e.get('name') == 'C5')
        (x, y), (w, h) = (eval(cell.get(cp + k), {}) for k in ('screencoord', 'size'))
        await desktop.act([LeftClick(coordinate=to_grid((x + w // 2, y + h // 2), desktop.size)), Type(text='here\n')])
    await desktop.act([Key(text='ctrl+s')])
    while len(await desktop.windows()) < 2: await asyncio.sleep(.1)              # the file dialog
    await desktop.act([Key(text='ctrl+a'), Type(text='/home/user/out.ods\n')])
    async def saved():
        try: content = zipfile.ZipFile(io.BytesIO(await desktop.read_file('~/out.ods'))).read('content.xml').decode()
        except (FileNotFoundError, zipfile.BadZipFile, KeyError): return None    # not yet, or half of it
        return content.count('here'), 'table:number-rows-repeated="4"' in content
    await eventually(saved, (1, True))


def test_missing_namespaces_are_explained(tmp_path, monkeypatch):
    stub = tmp_path / 'bwrap'; stub.write_text('#!/bin/sh\necho "bwrap: No permissions to create new namespace" >&2; exit 1\n'); stub.chmod(0o755)
    for p in (tmp_path, *tmp_path.parents[:2]): p.chmod(0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}'); check.cache_clear()
    try:
        with pytest.raises(DesktopError, match='user namespaces: sysctl'): check()
    finally: check.cache_clear()


@pytest.mark.skipif(os.geteuid() != 0, reason='mounting a small disk needs root: run pytest as root')
def test_a_full_disk_is_told():
    code = 'import asyncio\nfrom scalecua_nb.desktop.sandbox import SandboxDesktop\nasync def main():\n  try: await SandboxDesktop().start()\n  except Exception as e: print(type(e).__name__, e)\nasyncio.run(main())'
    r = subprocess.run(['unshare', '-m', 'sh', '-c', 'mount -t tmpfs -o size=64k none /mnt && SCALECUA_STATE=/mnt/s exec "$0" -c "$1"', sys.executable, code], capture_output=True, text=True, timeout=120)
    assert r.stdout.startswith('DesktopError') and 'No space left' in r.stdout, r.stdout + r.stderr


async def test_two_makers_of_the_home_do_not_disturb_each_other(tmp_path, monkeypatch):
    monkeypatch.setenv('SCALECUA_CACHE', str(tmp_path))
    from scalecua_nb.desktop.sandbox import home_template
    a, b = await asyncio.gather(home_template(), home_template())
    assert a == b and (a / '.config/libreoffice/4/user/registrymodifications.xcu').is_file() and [p.name for p in (tmp_path / 'homes').iterdir()] == [a.name]
