"""Task grammars offline: reproducible, through JSON and back, and judges that are right on made files, in the jail."""
from __future__ import annotations
import asyncio, base64, io, json, os, re, shutil, subprocess, sys, zipfile
import openpyxl, pytest, pytest_asyncio
from openpyxl.styles import Alignment, Font
from scalecua_nb.core.records import CommandResult
from scalecua_nb.judging.jail import Jail
from scalecua_nb.judging.request import make_request
from scalecua_nb.judging.rules import validate
from scalecua_nb.verigen.candidate import Candidate
from scalecua_nb.verigen.calc_documents import xlsx
from scalecua_nb.verigen.grammar import grammar_of

LIVE = ('calc', 'files')
TEMPLATES = [(a, t) for a in LIVE for t in grammar_of(a).templates]
HOME = '/home/user'

class Folder:
    "A folder of this machine that plays the part of a desktop's home."
    size = (1280, 800)
    def __init__(self, home): self.home = str(home)
    def here(self, path): return path.replace(HOME, self.home)
    async def read_file(self, path):
        if not os.path.isfile(self.here(path)): raise FileNotFoundError(path)
        with open(self.here(path), 'rb') as f: return f.read()
    async def run(self, command, timeout=60):
        argv = [self.here(a) for a in (command if isinstance(command, list) else ['bash', '-c', command])]
        r = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, timeout=timeout)
        return CommandResult(r.returncode, r.stdout.replace(self.home, HOME), r.stderr)

    def set_up(self, task):
        "Carry out the steps that make files."
        for step in task.config:
            p = step['parameters']
            if step['type'] == 'download':
                for f in p['files']: self.write(f['path'], base64.b64decode(f['url'].partition(',')[2]))
            elif step['type'] == 'execute': subprocess.run([self.here(a) for a in p['command']], check=True)
    def write(self, path, data):
        os.makedirs(os.path.dirname(self.here(path)), exist_ok=True)
        with open(self.here(path), 'wb') as f: f.write(data.encode() if isinstance(data, str) else data)

@pytest_asyncio.fixture
async def judge(tmp_path):
    "A function that scores a candidate on a folder after `change(folder)`."
    async with Jail() as jail:
        async def scored(candidate, change=None):
            home = tmp_path / 'home'
            if home.exists(): shutil.rmtree(home)
            home.mkdir(); folder = Folder(home); folder.set_up(candidate.task)
            if change: change(folder)
            verdict = await jail.judge(make_request(folder, candidate.task.evaluator, candidate.functions))
            assert not verdict.blocked, verdict.detail
            return verdict.score
        yield scored

def test_a_proposal_is_a_function_of_its_arguments():
    "The same in another process with another hash seed."
    code = 'import sys; from scalecua_nb.verigen.grammar import grammar_of; print([grammar_of(a).propose(s, attempt=s % 2).id for a in ("calc", "files") for s in range(40)])'
    runs = [subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True, env={**os.environ, 'PYTHONHASHSEED': h}).stdout for h in ('1', '2')]
    assert runs[0] == runs[1] and len(set(eval(runs[0]))) == 80

@pytest.mark.parametrize('application,template', TEMPLATES)
def test_candidates(application, template):
    grammar = grammar_of(application); instructions = set(); judges = set()
    for seed in range(12):
        c = grammar.propose(seed, template)
        assert Candidate.from_json(json.dumps(c.to_json())) == c
        assert len(c.near_misses) >= 2 and c.oracle and len({json.dumps(s) for s in map(str, [c.oracle, *[m for _, m in c.near_misses]])}) == 1 + len(c.near_misses)
        assert set(c.functions) == {c.task.evaluator.func, 'get_' + c.task.evaluator.result['type']}
        assert validate(c.task, c.functions) == []
        assert re.match(r'[A-Z0-9/$]', c.task.instruction) or c.task.instruction[0].islower(), c.task.instruction
        assert '  ' not in c.task.instruction and c.task.instruction.rstrip()[-1] in '.)', c.task.instruction
        instructions.add(c.task.instruction); judges |= set(c.functions)
    assert len(instructions) == 12 and len(judges) == 2                        # one judge for all tasks of a template

# ---- Calc: golden and spoilt workbooks made with openpyxl

def golden(c: Candidate):
    "Bytes of a workbook in the solved state, or a function that changes the openpyxl workbook; and values that LibreOffice would have computed."
    e, p = c.task.evaluator.expected['rules'], c.params
    sheet = lambda f: (lambda book: [f(book.worksheets[0], x) for x in e.get('cells', [None])])
    match c.template:
        case 'enter_value' | 'add_record' | 'mark_rows' | 'copy_column' | 'find_replace': return xlsx(e['sheets'])
        case 'sort_rows': return xlsx({e['sheet']: [e['header'], *sorted(e['rows'], key=lambda r: r[e['by']], reverse=e['descending'])], **e['others']})
        case 'delete_row': return xlsx({c.task.evaluator.result['sheet']: e['rows'], **e['others']})
        case 'bold_cells_of': return sheet(lambda s, x: setattr(s[x], 'font', Font(b=True)))
        case 'number_format': return sheet(lambda s, x: setattr(s[x], 'number_format', {'%': '0.0%', r'\$': '[$$-409]#,##0.00', r'[Ee][+-]0': '0.00E+00'}[e['pattern']]))
        case 'align_column': return sheet(lambda s, x: setattr(s[x], 'alignment', Alignment(horizontal=e['how'])))
        case 'rename_sheet': return lambda book: setattr(book.worksheets[0], 'title', p['new'])
        case 'add_sheet': return lambda book: book.create_sheet(p['new'])
        case 'freeze_panes': return lambda book: setattr(book.worksheets[0], 'freeze_panes', f'{"AB"[p["columns"]]}{p["rows"] + 1}')
        case 'hide_column': return sheet(lambda s, x: setattr(s.column_dimensions[e['columns'][0]], 'hidden', True))
        case 'add_filter': return lambda book: setattr(book.worksheets[0].auto_filter, 'ref', p['range'])
        case 'merge_title': return lambda book: book.worksheets[0].merge_cells(p['range'])
        case 'column_total': return sheet(lambda s, x: s.__setitem__(p['cell'], f'={p["function"]}({e["cells"][0]}:{e["cells"][-1]})'))
        case 'fill_formula':
            r = c.task.evaluator.result
            def fill(book):
                for row, goal in zip(range(r['first'], r['last'] + 1), e['column']):
                    book.worksheets[0][f'{r["column"]}{row}'] = goal['value'] if not goal['formula_of'] else '=' + '*'.join(goal['formula_of'])
            return fill
    raise AssertionError(f'no golden state for {c.template}')

def computed(data: bytes, values: list) -> bytes:
    "Write computed values beside the formulas of the first sheet, in order, as LibreOffice does."
    left, out = list(values), io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, 'w') as new:
        for i in old.infolist():
            text = old.read(i)
            if i.filename == 'xl/worksheets/sheet1.xml': text = re.sub(rb'(</f>)<v\s*/>|(</f>)<v></v>', lambda m: b'</f><v>%s</v>' % repr(left.pop(0)).encode(), text)
            new.writestr(i, text)
    assert not left
    return out.getvalue()

def changed(folder, path, change):
    "Apply a change to a workbook of the folder."
    with open(folder.here(path), 'rb') as f: book = openpyxl.load_workbook(f)
    change(book); out = io.BytesIO(); book.save(out); return out.getvalue()

@pytest.mark.parametrize('template', [t for a, t in TEMPLATES if a == 'calc'])
async def test_calc_judges(template, judge):
    for seed in (1, 2, 3):
        c = grammar_of('calc').propose(seed, template); path = c.task.evaluator.result['path']; e = c.task.evaluator.expected['rules']
        assert await judge(c) == 0
        assert await judge(c, lambda f: os.remove(f.here(path))) == 0
        assert await judge(c, lambda f: f.write(path, b'PK\3\4 spoilt')) == 0
        if template == 'save_as_csv':
            text = '\r\n'.join(','.join(map(str, r)) for r in e['table'])
            solve = lambda f: f.write(c.task.evaluator.result['csv'], text)
        else:
            g = golden(c)
            values = {'column_total': lambda: [e['value']], 'fill_formula': lambda: [x['value'] for x in e['column'][1:]]}.get(template, lambda: [])()
            def solve(f):
                data = g if isinstance(g, bytes) else changed(f, path, g)
                f.write(path, computed(data, values) if values else data)
        assert await judge(c, solve) == 1, c.task.instruction
        def spoil(f): solve(f); f.write(path, changed(f, path, lambda book: book.worksheets[0].__setitem__('J30', 'scribble')))
        if not values_matter(template): assert await judge(c, spoil) == 0, 'a scribble elsewhere went unnoticed'
        def other(f): solve(f); f.write(path, changed(f, path, lambda book: book.worksheets[1].__setitem__('C3', 'scribble')))
        if not values_matter(template): assert await judge(c, other) == 0, 'a scribble on the other sheet went unnoticed'

def values_matter(template):
    "openpyxl drops computed values when it writes, so these cannot be spoilt this way."
    return template in ('column_total', 'fill_formula')

# ---- files: shell oracles and near-misses run for real

def shell(script):
    "The commands that a terminal script types, `exit` aside."
    return '\n'.join(a.text for s in script if s.step == 'act' for a in s.actions if a.action == 'type' and a.text != 'exit')

@pytest.mark.parametrize('template', ['count_lines', 'make_executable', 'make_link', 'collect_files', 'make_archive', 'sort_unique'])
async def test_shell_judges(template, judge):
    for seed in range(4):
        c = grammar_of('files').propose(seed, template)
        def run(script): return lambda f: subprocess.run(['bash', '-c', f.here(shell(script))], cwd=f.here(c.params['folder']), capture_output=True)
        assert await judge(c) == 0
        assert await judge(c, run(c.oracle)) == 1, c.task.instruction
        for name, script in c.near_misses: assert await judge(c, run(script)) < 1, name

@pytest.mark.parametrize('template', ['rename_file', 'make_folder', 'move_file', 'copy_file', 'delete_file'])
async def test_folder_judges(template, judge):
    for seed in range(3):
        c = grammar_of('files').propose(seed, template); p = c.params; at = lambda f, *names: os.path.join(f.here(p['folder']), *names)
        solve = {'rename_file': lambda f: os.rename(at(f, p['old']), at(f, p['new'])), 'make_folder': lambda f: os.mkdir(at(f, p['new'])),
                 'move_file': lambda f: os.rename(at(f, p['file']), at(f, p['to'], p['file'])), 'copy_file': lambda f: shutil.copy(at(f, p['file']), at(f, p['to'])),
                 'delete_file': lambda f: os.remove(at(f, p['file']))}[template]
        assert (await judge(c), await judge(c, solve)) == (0, 1)
        assert await judge(c, lambda f: (solve(f), f.write(p['folder'] + '/.hidden', 'x'))) == 1
        assert await judge(c, lambda f: (solve(f), f.write(p['folder'] + '/stray.txt', 'x'))) == 0
        assert await judge(c, lambda f: shutil.rmtree(f.here(p['folder']))) == 0

@pytest.mark.parametrize('template', ['change_setting', 'append_line', 'delete_lines', 'replace_word', 'write_note'])
async def test_text_judges(template, judge):
    for seed in range(3):
        c = grammar_of('files').propose(seed, template); e = c.task.evaluator.expected['rules']; path = c.params['path']
        if template == 'change_setting': lines = ['# kept', *[f'{k}={v}' for k, v in e['settings'].items()]]
        elif template == 'replace_word': lines = [' '.join(e['new'] if w == e['old'] else w for w in l) for l in e['before']]
        else: lines = e['lines']
        text = '\n'.join(lines)
        assert await judge(c) == 0
        for good in (text, text + '\n', text.replace('\n', '\r\n') + '\r\n\r\n'): assert await judge(c, lambda f: f.write(path, good)) == 1
        for bad in (text + '\nextra', text[:-3], '', text.upper()): assert await judge(c, lambda f: f.write(path, bad)) < 1
