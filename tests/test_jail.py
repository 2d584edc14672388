"""Hostile judges: each is contained, none raises a score, and the verdict after it finds nothing of it."""
import asyncio, os, re, shutil, signal, subprocess, sys, textwrap
import pytest, pytest_asyncio
from scalecua_nb.desktop.base import DesktopError
from scalecua_nb.judging import jail as jail_module
from scalecua_nb.judging.jail import Jail, JailError, Limits, remedy
from scalecua_nb.judging.request import Call, Request, fault_of

pytestmark = [pytest.mark.asyncio(loop_scope='module'), pytest.mark.skipif(not shutil.which('bwrap'), reason='needs bubblewrap: apt-get install bubblewrap')]

class Desk:
    "A desktop reduced to its files, some of which misbehave."
    size = (1280, 800)
    async def read_file(self, path):
        if path == '/broken': raise DesktopError('the desktop is gone')
        if path == '/slow': await asyncio.sleep(60)
        if path == '/big': return bytes(1 << 20)
        if path == '/home/user/a.txt': return b'one'
        raise FileNotFoundError(path)

def judge(body: str, getter: str = 'return 0') -> dict[str, str]:
    "A judge's sources from the bodies of its functions."
    fn = lambda head, b: f'{head}\n{textwrap.indent(textwrap.dedent(b).strip(), "    ")}\n'
    return {'get_x__1': fn('def get_x__1(env, config):', getter), 'check_x__1': fn('def check_x__1(result):', body)}

def request(functions, desktop=None): return Request(desktop or Desk(), [Call('check_x__1', {'type': 'x__1'})], functions=functions)

CLEAN = judge('''
    import builtins, json, os, sys, threading, openpyxl
    assert os.getpid() == 1 and threading.active_count() == 1
    assert os.listdir('/tmp') == ['cache'] and os.listdir('/tmp/cache') == []
    assert json.loads('{"a": 1}') == {'a': 1} and len([1, 2]) == 2 and openpyxl.Workbook().active.title == 'Sheet'
    assert not any(m.startswith(('evil', 'judge_')) for m in sys.modules) and 'EVIL' not in os.environ
    return 1.0
''')

@pytest_asyncio.fixture(loop_scope='module', scope='module')
async def jail():
    async with Jail(limits=Limits(seconds=4, cpu=1, memory=384 << 20, disk=4 << 20, traffic=8 << 20)) as j: yield j

@pytest_asyncio.fixture(loop_scope='module', scope='module')
async def open_jail():
    "Judges in it may start programs."
    async with Jail(limits=Limits(seconds=4, cpu=1, memory=384 << 20, disk=4 << 20, processes=8)) as j: yield j

async def stays_clean(jail):
    v = await jail.judge(request(CLEAN))
    assert (v.score, v.status) == (1., 'scored'), v.detail

ERRORS = {   # name -> (metric, getter, what the detail says)
    'loops':              ('while True: pass', '', '(processor time|no score)'),
    'sleeps':             ('import time; time.sleep(600)', '', 'no score within 4 s'),
    'loops in C':         ('return float(len("a" * 10) ** 10 ** 10)', '', '(processor time|no score|MemoryError)'),
    'exits':              ('import sys; sys.exit(0)', '', 'SystemExit'),
    'exits hard':         ('import os; os._exit(0)', '', 'exited with status 0'),
    'raises':             ('raise ValueError("no")', '', r'ValueError: no \(check_x__1 line 2\)'),
    'raises bare':        ('class E(BaseException): pass\nraise E()', '', 'E'),
    'raises interrupt':   ('raise KeyboardInterrupt', '', 'KeyboardInterrupt'),
    'raises stop':        ('raise StopIteration', '', 'StopIteration'),
    'unprintable error':  ('class E(Exception):\n    def __str__(self): raise SystemExit\nraise E()', '', 'cannot be shown'),
    'half a pair':        ('raise ValueError("\\ud800\\a\\n")', '', r'ValueError: \?'),
    'endless message':    ('raise ValueError("x" * (50 << 20))', '', 'ValueError: xxx'),
    'getter raises':      ('return 1.0', 'raise KeyError("A1")', 'KeyError'),
    'module raises':      ('return 1.0\nraise ImportError', '1/0', 'ZeroDivisionError'),
    'recursion':          ('def f(): return f()\nreturn f()', '', 'RecursionError'),
    'stack overflow':     ('import sys; sys.setrecursionlimit(10**9)\ndef f(x): return max([x], key=f)\nreturn f(1)', '', '(SIGSEGV|RecursionError|MemoryError|processor)'),
    'null pointer':       ('import ctypes; ctypes.string_at(0)', '', 'SIGSEGV'),
    'aborts':             ('import os; os.abort()', '', '(SIGABRT|SIGSEGV|SIGILL)'),
    'memory at once':     ('return float(len(bytearray(1 << 33)))', '', 'MemoryError'),
    'memory bit by bit':  ('a = []\nwhile True: a.append(bytearray(1 << 20))', '', '(MemoryError|processor)'),
    'disk':               ('f = open("/tmp/x", "wb")\nwhile True: f.write(bytes(1 << 20)); f.flush()', '', r'OSError: \[Errno (27|28)\]|SIGXFSZ'),
    'many files':         ('for i in range(10**6): open(f"/tmp/{i}", "w").close()', '', r'Errno 28'),
    'descriptors':        ('import os\nwhile True: os.dup(1)', '', 'Too many open files'),
    'threads':            ('import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()', '', "(can't start new thread|processor|no score)"),
    'forks':              ('import os\nwhile True: os.fork()', '', 'PermissionError'),
    'starts a program':   ('import subprocess; return float(subprocess.run(["/bin/true"]).returncode == 0)', '', 'PermissionError'),
    'becomes a program':  ('import os, sys; os.execv(sys.executable, ["python3", "-c", "pass"])', '', 'PermissionError'),
    'multiprocessing':    ('import multiprocessing as m\np = m.Process(target=print); p.start(); return 1.0', '', 'PermissionError'),
    'connects':           ('import socket; socket.create_connection(("127.0.0.1", 22), 1); return 1.0', '', 'PermissionError'),
    'listens':            ('import socket; socket.socket(socket.AF_UNIX).bind("\\0x"); return 1.0', '', 'PermissionError'),
    'fetches':            ('import urllib.request; urllib.request.urlopen("http://example.org"); return 1.0', '', 'URLError'),
    'reads shadow':       ('open("/etc/shadow").read(); return 1.0', '', '(FileNotFoundError|PermissionError)'),
    'reads /proc':        ('open("/proc/self/status").read(); return 1.0', '', 'FileNotFoundError'),
    'becomes root':       ('import os; os.setuid(0); return 1.0', '', '(OSError|PermissionError)'),
    'lifts its limits':   ('import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1)); return 1.0', '', '(ValueError|PermissionError|OSError)'),
    'anonymous memory':   ('import os; os.memfd_create("x"); return 1.0', '', 'PermissionError'),
    'closes its channel': ('import os; os.close(3)\nimport time; time.sleep(600)', '', '(closed its channel|no score)'),
    'closes all':         ('import os; os.closerange(0, 100); return 1.0', '', '(closed its channel|exited with status 1)'),
    'garbage':            ('import os; os.write(3, b"garbage" * 100); import time; time.sleep(600)', '', 'wrote to its channel'),
    'huge header':        ('import os; os.write(3, b"\\xff" * 8); import time; time.sleep(600)', '', 'wrote to its channel: a message of 4294967295 bytes'),
    'half a frame':       ('import os; os.write(3, b"\\0\\0"); import time; time.sleep(600)', '', 'no score'),
    'nested answer':      ('import os, struct; t = b"[" * 100000; os.write(3, struct.pack("!II", len(t), 0) + t); import time; time.sleep(600)', '', 'not JSON'),
    'forges 7':           ('import os, struct; t = b\'{"value": 7.0}\'; os.write(3, struct.pack("!II", len(t), 0) + t); return 0.0', '', 'not a score'),
    'forges true':        ('import os, struct; t = b\'{"value": true}\'; os.write(3, struct.pack("!II", len(t), 0) + t); return 0.0', '', 'not a score'),
    'forges NaN':         ('import os, struct; t = b\'{"value": NaN}\'; os.write(3, struct.pack("!II", len(t), 0) + t); return 0.0', '', 'not a score'),
    'forges a fault':     ('import os, struct; t = b\'{"broken": "jail"}\'; os.write(3, struct.pack("!II", len(t), 0) + t); return 0.0', '', 'not a score'),
    'unknown call':       ('return 1.0', 'return env.controller._call("shutdown")', 'env.controller has no shutdown'),
    'private call':       ('return 1.0', 'return env.controller._call("__class__")', 'env.controller has no'),
    'call with extras':   ('return 1.0', 'return env.controller._call("get_file", path="/a", mode="w")', 'get_file: mode'),
    'no such method':     ('return 1.0', 'return env.controller.execute("ls")', 'AttributeError'),
    'no such attribute':  ('return 1.0', 'return env.desktop', 'AttributeError'),
    'huge call':          ('return 1.0', 'return env.controller.get_file("a" * (5 << 20))', 'wrote to its channel: a message of'),
    'long path':          ('return 1.0', 'return env.controller.get_file("a" * 5000)', 'at most 4096 characters'),
    'floods calls':       ('return 1.0', 'while True: env.controller.get_vm_screen_size()', 'more calls'),
    'floods unread':      ('return 1.0', 'import os, struct\nt = b\'{"call": "get_vm_screen_size", "args": {}}\'\nwhile True: os.write(3, struct.pack("!II", len(t), 0) + t)', 'more calls'),
    'floods data':        ('return 1.0', 'while True: env.controller.get_file("/big")', 'more data'),
    'returns NaN':        ('return float("nan")', '', 'not a number in'),
    'returns infinity':   ('return float("inf")', '', 'not a number in'),
    'returns text':       ('return "1.0"', '', r"'1.0' \(str\)"),
    'returns None':       ('return None', '', r'None \(NoneType\)'),
    'returns True':       ('return True', '', r'True \(bool\)'),
    'returns 1.5':        ('return 1.5', '', '1.5'),
    'returns -1':         ('return -1', '', '-1'),
    'returns a list':     ('return [1.0]', '', 'list'),
    'returns a complex':  ('return 1j', '', 'complex'),
    'returns numpy NaN':  ('import numpy; return numpy.float32("nan")', '', 'not a number in'),
    'returns numpy True': ('import numpy; return numpy.bool_(True)', '', 'bool'),
    'lies about order':   ('class F(float):\n    __le__ = __ge__ = lambda s, o: True\nreturn F(9)', '', 'not a score'),
    'hides in an object': ('class V:\n    def item(self): raise SystemExit\nreturn V()', '', 'SystemExit'),
    'blocks signals':     ('import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nfor s in (2, 14, 15): signal.signal(s, signal.SIG_IGN)\nwhile True: pass', '', '(processor time|no score)'),
}

SLOW = {'loops', 'loops in C', 'sleeps', 'half a frame', 'blocks signals', 'memory bit by bit', 'fork bomb', 'memory herd', 'threads'}       # run into a limit
marked = lambda names: [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in names]

@pytest.mark.parametrize('name', marked(ERRORS))
async def test_is_reported_as_the_judges_error(jail, name):
    metric, getter, says = ERRORS[name]
    v = await jail.judge(request(judge(metric, getter or 'return 0')))
    assert v.status == 'blocked' and v.score == 0. and fault_of(v) in (('getter', 'judge error') if getter else ('judge error',)), v
    assert re.search(says, v.detail), v.detail
    v.detail.encode()
    await stays_clean(jail)

ATTACKS = {   # name -> a metric that returns 1.0 where its attack succeeds
    'host files':        'import os; return float(any(map(os.path.exists, ["/etc/passwd", "/root/.bashrc", "/home", "/work", "/var", "/sys", "/boot", "/run", "/usr/bin/env"])))',
    'host environment':  'import os; return float("SCALECUA_SECRET" in os.environ or len(os.environ) > 16)',
    'writes to the library': '''
        import json, os, sys
        def can(p):
            try: open(p, 'a').close(); return True
            except OSError: return False
        import openpyxl
        return float(any(map(can, [openpyxl.__file__, json.__file__, '/library/scalecua_nb/judging/metrics.py', '/packages/evil.py', '/library/evil.py', '/evil', '/dev/evil', '/usr/lib/evil', sys.executable])))''',
    'leaves files':      'import os\nfor p in ("/tmp/x", "/tmp/cache/x", "/var/tmp/x", "/dev/shm/x"):\n    try: open(p, "w").write("x")\n    except OSError: pass\nreturn 0.0',
    'kills the server':  'import os\nfor p in {os.getppid(), 1, 2, 3, 0, -1}:\n    for s in (9, 15, 19):\n        try: os.kill(p, s)\n        except OSError: pass\ntry: os.killpg(0, 9)\nexcept OSError: pass\nreturn 0.0',
    'traces':            'import ctypes; c = ctypes.CDLL(None); return float(any(c.ptrace(16, p, 0, 0) == 0 for p in range(2, 50)) or c.ptrace(0, 0, 0, 0) == 0)',
    'reads memory':      'import ctypes; c = ctypes.CDLL(None); b = ctypes.create_string_buffer(8); v = (ctypes.c_size_t * 2)(ctypes.addressof(b), 8); return float(c.process_vm_readv(1, v, 1, v, 1, 0) > 0)',
    'new namespaces':    'import ctypes; c = ctypes.CDLL(None); return float(any(c.unshare(f) == 0 for f in (0x10000000, 0x20000, 0x20000000, 0x40000000)))',
    'mounts':            'import ctypes; c = ctypes.CDLL(None); return float(c.mount(b"t", b"/tmp", b"tmpfs", 0, b"") == 0 or c.umount2(b"/tmp", 2) == 0 or c.umount2(b"/proc", 2) == 0 or c.chroot(b"/tmp") == 0)',
    'kernel doors':      'import ctypes; c = ctypes.CDLL(None); return float(any(c.syscall(n, 0, 0, 0, 0, 0) != -1 for n in (321, 323, 425, 250, 298, 310, 101, 0x40000065)))',
    'clock':             'import time\ntry: time.clock_settime(time.CLOCK_REALTIME, 0); return 1.0\nexcept OSError: return 0.0',
    'device nodes':      'import os\ntry: os.mknod("/tmp/m", 0o600 | 0o20000, os.makedev(1, 1)); return 1.0\nexcept OSError: return 0.0',
    'patches':           'import builtins, json, openpyxl, sys\nbuiltins.sorted = builtins.open = None\njson.loads = lambda s: {"value": 1.0}\nopenpyxl.Workbook = None\nsys.modules["evil"] = sys\nimport os; os.environ["EVIL"] = "1"\nreturn 0.0',
    'threads left':      'import threading\ndef spin():\n    while True: pass\nfor _ in range(8): threading.Thread(target=spin, daemon=True).start()\nreturn 0.0',
    'timers left':       'import signal; signal.signal(signal.SIGALRM, lambda *a: None); signal.setitimer(signal.ITIMER_REAL, .001, .001); return 0.0',
    'prints':            'import os, sys\nfor _ in range(100): print("x" * 100_000); sys.stderr.write("y" * 100_000)\nos.write(1, b"z" * 1000); os.write(2, b"z" * 1000)\nreturn 0.0',
    'finds old secrets': 'import gc; return float(any(isinstance(o, dict) and "old_secret" in o for o in gc.get_objects()))',
    'shared memory':     'import ctypes; c = ctypes.CDLL(None); return float(c.shmget(7, 4096, 0o1600) >= 0 or c.semget(7, 1, 0o1600) >= 0 or c.msgget(7, 0o1600) >= 0)',
    'descriptors':       'import os\ndef ok(fd):\n    try: os.fstat(fd); return True\n    except OSError: return False\nreturn float([fd for fd in range(64) if ok(fd)] != [0, 1, 2, 3])',
}

@pytest.mark.parametrize('name', ATTACKS)
async def test_attack_fails(jail, name, monkeypatch):
    monkeypatch.setenv('SCALECUA_SECRET', 'token')
    await jail.judge(request(judge('old = {"old_secret": 1}; return 0.0')))
    v = await jail.judge(request(judge(ATTACKS[name])))
    assert (v.score, v.status) == (0., 'scored'), v
    await stays_clean(jail)

PROGRAMS = {   # where programs may be started; name -> metric
    'fork bomb':     'import os\nwhile True:\n    try: os.fork()\n    except OSError: pass',
    'orphan':        '''
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                while True:
                    for p in ('/tmp/cache/evil', '/tmp/evil'):
                        try: open(p, 'w').close()
                        except OSError: pass
                    try: os.write(3, b'\\0\\0\\0\\x0e\\0\\0\\0\\0{"value": 1.0}')
                    except OSError: pass
            os._exit(0)
        os.wait(); time.sleep(.2)
        return 0.0''',
    'daemon':        'import os\nfor _ in range(4):\n    if os.fork() == 0:\n        os.setsid()\n        while True: pass\nreturn 0.0',
    'memory herd':   'import os, time\nfor _ in range(6):\n    if os.fork() == 0:\n        a = []\n        try:\n            while True: a.append(bytearray(1 << 20))\n        except MemoryError: a.clear(); time.sleep(60)\nraise ValueError',
}

@pytest.mark.parametrize('name', marked(PROGRAMS))
async def test_programs_die_with_the_verdict(open_jail, name):
    v = await open_jail.judge(request(judge(PROGRAMS[name])))
    assert v.score == 0. or name == 'orphan', v            # an orphan may speak for its own judge, never for another
    for _ in range(3): await stays_clean(open_jail)
    for _ in range(100):
        if not open_jail._servers[0].forks: return
        await asyncio.sleep(.05)
    pytest.fail('forks are left')

async def test_a_program_may_run_where_allowed(open_jail):
    v = await open_jail.judge(request(judge('import subprocess, sys; return float(subprocess.run([sys.executable, "-S", "-c", "print(6*7)"], capture_output=True, text=True).stdout == "42\\n")')))
    assert v.score == 1., v

@pytest.mark.slow
async def test_neighbours_do_not_starve_each_other(open_jail):
    bombs = [request({**judge(PROGRAMS['fork bomb']), 'get_y': f'def get_y(env, config): return {i}'}) for i in range(2)]
    honest = request(judge('import subprocess, sys; return float(subprocess.run([sys.executable, "-S", "-c", "pass"]).returncode == 0)'))
    *bad, good = await open_jail.judge_batch([*bombs, honest])
    assert [v.status for v in bad] == ['blocked'] * 2 and good.score == 1., good

async def test_everything_a_judge_may_import_is_there(jail):
    from importlib.util import find_spec
    from scalecua_nb.judging.packages import DISTRIBUTIONS, STDLIB
    names = sorted(n for n in {*STDLIB, *DISTRIBUTIONS.values()} if find_spec(n))
    fns = lambda n: {f'check_{n.replace(".", "_")}': f'import {n}\ndef check_{n.replace(".", "_")}(): return 1.0'}
    got = await jail.judge_batch([Request(Desk(), [Call(next(iter(fns(n))))], functions=fns(n)) for n in names if n != '__future__'])
    assert [(n, v.detail) for n, v in zip([n for n in names if n != '__future__'], got) if v.score != 1.] == []
    assert {'openpyxl', 'lxml', 'docx', 'pptx', 'pandas', 'numpy', 'PIL', 'yaml', 'rapidfuzz'} <= set(names)

async def test_office_documents_open(jail):
    fns = judge('''
        import io, docx, pptx, pandas, lxml.etree, PIL.Image
        d = docx.Document(); d.add_paragraph("hello"); d.save(f := io.BytesIO())
        p = pptx.Presentation(); p.slides.add_slide(p.slide_layouts[0]).shapes.title.text = "hi"; p.save(g := io.BytesIO())
        t = pandas.DataFrame({"a": [1, 2]}); t.to_excel(h := io.BytesIO())
        ok = docx.Document(f).paragraphs[0].text == "hello" and pptx.Presentation(g).slides[0].shapes.title.text == "hi"
        return float(ok and pandas.read_excel(h)["a"].sum() == 3)''')
    v = await jail.judge(request(fns))
    assert v.score == 1., v

# what a desktop does

async def test_missing_file_is_none_and_raising_scores_0(jail):
    none = await jail.judge(request(judge('return float(result is None)', 'return env.controller.get_file("/none")')))
    raised = await jail.judge(request(judge('return 1.0', 'return open("/tmp/cache/none").read()')))
    assert none.score == 1. and (raised.score, raised.status) == (0., 'scored') and 'no such file' in raised.detail

async def test_a_broken_desktop_blocks_whatever_the_judge_says(jail):
    getter = 'try: return env.controller.get_file("/broken")\nexcept Exception: return b""'
    v = await jail.judge(request(judge('return 1.0', getter)))
    assert fault_of(v) == 'desktop' and 'the desktop is gone' in v.detail

@pytest.mark.slow
async def test_a_slow_desktop_blocks(jail):
    v = await jail.judge(request(judge('return 1.0', 'return env.controller.get_file("/slow")')))
    assert fault_of(v) == 'desktop' and 'get_file did not answer' in v.detail
    await stays_clean(jail)

async def test_a_bug_in_a_desktop_reaches_the_caller(jail):
    class Buggy(Desk):
        async def read_file(self, path): raise ZeroDivisionError('a bug')
    with pytest.raises(ZeroDivisionError): await jail.judge(request(judge('return 1.0', 'return env.controller.get_file("/a")'), Buggy()))
    await stays_clean(jail)

# batches and servers

async def test_batch_keeps_order_and_outlives_one_bad_rollout(jail):
    class Numbered(Desk):
        def __init__(self, n): self.n = n
        async def read_file(self, path): return str(self.n).encode()
    fns = judge('n = int(result)\nif n == 3:\n    import os; os._exit(1)\nif n == 5: raise ValueError(n)\nreturn n / 10', 'return env.controller.get_file("/n")')
    got = await jail.judge_batch([request(fns, Numbered(i)) for i in range(10)])
    assert [round(v.score * 10) if v.status == 'scored' else v.status for v in got] == [0, 1, 2, 'blocked', 4, 'blocked', 6, 7, 8, 9]
    assert 'exited with status 1' in got[3].detail and 'ValueError: 5' in got[5].detail

async def test_different_judges_never_share_a_fork(jail):
    bad = judge('import builtins; builtins.EVIL = 1; return 0.0')
    look = judge('import builtins; return float(hasattr(builtins, "EVIL"))')
    got = await jail.judge_batch([request(f) for _ in range(8) for f in (bad, look)])
    assert [v.score for v in got] == [0.] * 16

async def test_a_killed_server_is_replaced_and_the_verdict_retried(jail):
    waiting = asyncio.ensure_future(jail.judge(request(judge('import time; time.sleep(1); return 1.0'))))
    while not (jail._servers[0] and jail._servers[0].forks): await asyncio.sleep(.02)
    old = jail._servers[0]
    old.process.kill()
    assert (await waiting).score == 1. and jail._servers[0] is not old
    await stays_clean(jail)

@pytest.mark.slow
async def test_a_server_that_keeps_dying_blocks(jail):
    waiting, killed = asyncio.ensure_future(jail.judge(request(judge('import time; time.sleep(3); return 1.0')))), set()
    while len(killed) < 2 and not waiting.done():
        await asyncio.sleep(.05)
        server = jail._servers[0]
        if server and server not in killed and server.forks: server.process.kill(); killed.add(server)
    v = await waiting
    assert fault_of(v) == 'jail', v
    await stays_clean(jail)

async def test_close_cancels_and_leaves_no_process():
    j = await Jail().start()
    pid = j._servers[0].process.pid
    waiting = asyncio.ensure_future(j.judge(request(judge('import time; time.sleep(20); return 1.0'))))
    await asyncio.sleep(.2); await j.close(); await j.close()
    with pytest.raises(asyncio.CancelledError): await waiting
    assert not os.path.exists(f'/proc/{pid}')
    with pytest.raises(JailError, match='closed'): await j.judge(request(CLEAN))

async def test_a_cancelled_verdict_frees_its_slot():
    async with Jail(concurrent=1) as j:
        waiting = asyncio.ensure_future(j.judge(request(judge('import time; time.sleep(20); return 1.0'))))
        await asyncio.sleep(.2); waiting.cancel()
        await asyncio.wait_for(stays_clean(j), 5)

async def test_the_jail_dies_with_its_parent(tmp_path):
    script = tmp_path / 'p.py'
    script.write_text('import asyncio\nfrom scalecua_nb.judging.jail import Jail\nasync def main():\n    j = await Jail().start()\n    print(j._servers[0].process.pid, flush=True)\n    await asyncio.sleep(60)\nasyncio.run(main())')
    p = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env={**os.environ, 'PYTHONPATH': os.pathsep.join([os.getcwd(), *sys.path])})
    pid = int(p.stdout.readline()); p.send_signal(signal.SIGKILL); p.wait(); p.stdout.close()
    for _ in range(50):
        if not os.path.exists(f'/proc/{pid}') or open(f'/proc/{pid}/stat').read().split()[2] == 'Z': return
        await asyncio.sleep(.1)
    pytest.fail('the jail outlived its parent')

# what is said where it cannot work

async def test_without_bubblewrap_one_sentence(monkeypatch):
    monkeypatch.setattr(jail_module.shutil, 'which', lambda name: None)
    with pytest.raises(JailError, match='apt-get install bubblewrap'): await Jail().start()

SCRIPT = """
import asyncio
from scalecua_nb.judging.jail import Jail, JailError
from scalecua_nb.judging.request import Call, Request
async def main():
    try:
        async with Jail() as j: print(await j.judge(Request(None, [Call('check_x')], functions={'check_x': 'def check_x(): return 1.0'})))
    except JailError as e: print('JailError:', e)
asyncio.run(main())
"""

def in_a_container(setup):
    "Run the script as root of a user namespace that has no other user."
    if subprocess.run(['unshare', '-Ur', 'true'], capture_output=True).returncode: pytest.skip('needs unshare (apt-get install util-linux) and user namespaces (sysctl -w user.max_user_namespaces=15000)')
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join([os.getcwd(), *sys.path]), 'PYTHON': sys.executable, 'SCRIPT': SCRIPT}
    return subprocess.run(['unshare', '-Ur', 'sh', '-c', setup + '"$PYTHON" -c "$SCRIPT"'], env=env, capture_output=True, text=True, timeout=60).stdout

async def test_root_of_a_container_without_spare_users():
    assert 'score=1.0' in in_a_container('')

async def test_without_namespaces_one_sentence():
    said = in_a_container('echo 0 > /proc/sys/user/max_user_namespaces; ')
    assert said.startswith('JailError: the judge jail needs user namespaces') and 'sysctl' in said and said.count('\n') == 1, said

async def test_remedies():
    assert 'readable for everybody' in remedy("bwrap: execvp /opt/python: Permission denied") and 'did not start' in remedy('')
