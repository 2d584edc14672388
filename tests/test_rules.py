"""Rules against what language models really get wrong, what they get right, and text that is built to break a parser."""
import random
import pytest
from scalecua_nb.core.tasks import parse_task
from scalecua_nb.judging.rulebook import RULES, example
from scalecua_nb.judging.rules import validate

found = lambda **kw: {i.rule for i in validate(*example(**kw))}

@pytest.mark.parametrize('name', RULES)
def test_each_rule_tells_its_examples_apart(name):
    r = RULES[name]
    assert found(**r.passes) == set() and name in found(**r.fails)
    assert r.why.endswith('.')

MISTAKES = [   # (rule, what is changed in a sound judge)
    ('parses', dict(getter='return env.controller.get_file(config["path"]')),
    ('parses', dict(metric='x = ' + '(' * 300 + ')' * 300)),
    ('parses', dict(metric='x = "' + 'a' * 70_000 + '"\nreturn float(result == x)')),
    ('defines', dict(get='def get_text(env, config):')),
    ('defines', dict(check='class check_text__1a2b:\n  def f(self, result):', metric='  return float(result)')),
    ('named', dict(functions={'get_text__xyz!': 'def f(): pass'})),
    ('named', dict(functions={'check_text': 'def check_text(result, expected): return float(result == expected)'}, func='check_text')),
    ('imports', dict(top='import subprocess')), ('imports', dict(top='import urllib.request')), ('imports', dict(top='from urllib import request')),
    ('imports', dict(top='from os import *')), ('imports', dict(top='from . import helper')), ('imports', dict(metric='import random\nreturn float(bool(result)) * random.random()')),
    ('imports', dict(top='import numpy, torch')),
    ('names', dict(metric='return float(Path(result).exists())')), ('names', dict(getter='return helper(env.controller.get_file(path))')),
    ('names', dict(metric='score = 0.0\nfor row in result: score += weight\nreturn score')),
    ('wired', dict(func='check_other__1a2b')), ('wired', dict(func='get_text__1a2b')), ('wired', dict(result=dict(path='/a'))), ('wired', dict(result={})),
    ('wired', dict(func=['check_text__1a2b', 'infeasible'], result=[dict(type='text__1a2b', path='/a')] * 2)), ('wired', dict(expected=dict(type='cloud_file', path='http://x'))),
    ('wired', dict(func=[], result=[], expected=[])),
    ('used', dict(func='exact_match')), ('used', dict(result=dict(type='vm_command_line', command='ls'))),
    ('getter_signature', dict(get='def get_text__1a2b(config):')), ('getter_signature', dict(get='def get_text__1a2b(env, config, extra):')), ('getter_signature', dict(get='async def get_text__1a2b(env, config):')),
    ('metric_signature', dict(check='def check_text__1a2b():', metric='return 1.0')), ('metric_signature', dict(check='def check_text__1a2b(result):', metric='return float(result == "done")')),
    ('metric_signature', dict(check='def check_text__1a2b(result, expected, tolerance):')), ('metric_signature', dict(check='async def check_text__1a2b(result, expected):')),
    ('metric_signature', dict(options=dict(tol=1), check='def check_text__1a2b(result, expected, tolerance=0):')), ('metric_signature', dict(expected={}, metric='return float(result == "done")')),
    ('varies', dict(metric='return 1.0')), ('varies', dict(metric='if result: return 0.0\nreturn 0.0')), ('varies', dict(metric='try: return 1.0\nexcept Exception: return 1.0')),
    ('looks', dict(metric='return float(len(expected) / 2)')), ('looks', dict(getter='return config["path"]')), ('looks', dict(getter='return open("/home/user/a.txt").read()')),
    ('looks', dict(metric='ok = result == expected["text"]\nok = True\nprint(ok)\nreturn float(bool(expected))')),
    ('returns', dict(metric='for r in result:\n    if r == expected["text"]: return 1.0')), ('returns', dict(metric='if not result: return\nreturn 1.0')), ('returns', dict(metric='yield float(result == 1)')),
    ('returns', dict(getter='env.controller.get_file(config["path"])')),
    ('number', dict(metric='return result == expected["text"]')), ('number', dict(metric='return not result')), ('number', dict(metric='if result: return "pass"\nreturn 0.0')),
    ('number', dict(metric='return 100 if result == expected["text"] else 0')), ('number', dict(metric='if result is None: return None\nreturn 1.0')), ('number', dict(metric='return (1.0, "ok") if result else (0.0, "no")')),
    ('number', dict(metric='return -1 if result is None else 1')),
    ('errors_score_nothing', dict(metric='try: return float(result == expected["text"])\nexcept: return 1')),
    ('interface', dict(getter='return env.setup_controller.x')), ('interface', dict(getter='c = env.controller\nreturn c.execute("ls")')), ('interface', dict(getter='return env.vm_ip')),
    ('read_only', dict(getter='return env.controller.run_bash_script("echo done > /home/user/a.txt; cat /home/user/a.txt")')),
    ('read_only', dict(getter='return env.controller.run_bash_script(f"sed -i s/a/b/ {config[\'path\']}")')), ('read_only', dict(getter='return env.controller.run_bash_script("cd /tmp && rm -rf x")')),
    ('read_only', dict(getter='run = env.controller.run_python_script\nreturn run("open(\'/home/user/a.txt\', \'w\').write(\'done\')")')),
    ('read_only', dict(getter='return env.controller.execute_python_command("pyautogui.hotkey(\'ctrl\', \'s\')")')),
    ('read_only', dict(getter='return env.controller.run_bash_script("pkill soffice")')),
    ('missing_file', dict(getter='data = env.controller.get_file(config["path"])\nreturn data.decode()')), ('missing_file', dict(top='import io', getter='return io.BytesIO(env.controller.get_file(config["path"])).read()')),
    ('repeatable', dict(top='from datetime import datetime', metric='return float(result == str(datetime.now()))')), ('repeatable', dict(top='import time', getter='time.sleep(1)\nreturn env.controller.get_screenshot()')),
    ('repeatable', dict(metric='return float(hash(result) == 1)')),
    ('plain', dict(metric='return float(eval(result) == 1)')), ('plain', dict(top='import os', metric='os.system("true")\nreturn float(bool(result))')), ('plain', dict(metric='return float(result.__class__.__mro__ == 1)')),
    ('plain', dict(top='import os', metric='os._exit(0)\nreturn float(bool(result))')), ('plain', dict(metric='return float(bool(__import__("os") and result))')),
]

@pytest.mark.parametrize('rule,change', MISTAKES, ids=[f'{r}-{i}' for i, (r, _) in enumerate(MISTAKES)])
def test_mistake_is_found(rule, change): assert rule in found(**change)

SOUND = [   # judges as a careful author writes them: nothing to complain about
    dict(top='import io, openpyxl', getter='data = env.controller.get_file(config["path"])\nif not data: return None\nbook = openpyxl.load_workbook(io.BytesIO(data), data_only=True)\nreturn [[c.value for c in row] for row in book.active]',
         metric='if result is None: return 0.0\nwanted = expected["rows"]\nhits = sum(1 for a, b in zip(result, wanted) if a == b)\nreturn hits / max(len(wanted), 1)'),
    dict(getter='path = config["path"]\nif (data := env.controller.get_file(path)) is None:\n    return None\nreturn data.decode("utf8")'),
    dict(getter='return env.controller.get_file(config["path"])', metric='return float(result is not None and expected["text"].encode() in result)'),
    dict(getter='found = []\nfor p in config["paths"]:\n    data = env.controller.get_file(p)\n    found.append(None if data is None else len(data))\nreturn found', metric='return float(all(result))'),
    dict(getter='out = env.controller.run_bash_script("find /home/user -name \'*.txt\' -newer /etc/hostname 2>/dev/null | sort | head -5")\nreturn out["output"] if out["returncode"] == 0 else None'),
    dict(getter='out = env.controller.run_bash_script("[ $(stat -c %s /home/user/a.txt) -ge 10 ] && echo big; awk \'$1 >= 3\' /home/user/a.txt")\nreturn out["output"].split()', metric='return float("big" in result)'),
    dict(top='import re\nfrom xml.etree import ElementTree', getter='tree = env.controller.get_accessibility_tree()\nif not tree: return []\nroot = ElementTree.fromstring(tree)\nreturn [n.get("name", "") for n in root.iter()]',
         metric='pattern = re.compile(expected["text"])\nfor name in result:\n    if pattern.search(name):\n        return 1.0\nreturn 0.0'),
    dict(top='import io\nfrom PIL import Image', getter='png = env.controller.get_screenshot()\nreturn Image.open(io.BytesIO(png)).size if png else None', metric='try:\n    w, h = result\nexcept TypeError:\n    return 0.0\nreturn 1.0 if w > h else 0.0'),
    dict(top='import os, sqlite3, tempfile', getter='data = env.controller.get_file(config["path"])\nif data is None: return None\nlocal = os.path.join(env.cache_dir, "db")\nwith open(local, "wb") as f: f.write(data)\nwith sqlite3.connect(local) as db: return [r[0] for r in db.execute("select url from urls")]',
         metric='return float(expected["text"] in (result or []))'),
    dict(check='def check_text__1a2b(result, expected, *, strict=True):', options=dict(strict=False), metric='a, b = str(result), expected["text"]\nif not strict: a, b = a.lower(), b.lower()\nreturn float(a == b)'),
    dict(metric='total = 0.0\nweights = {"a": 0.5, "b": 0.5}\nfor key, weight in weights.items():\n    if (result or {}).get(key) == expected["text"]: total += weight\nreturn min(total, 1.0)'),
    dict(metric='match result:\n    case [first, *_] if first == expected["text"]: return 1.0\n    case _: return 0.0'),
]

@pytest.mark.parametrize('change', SOUND, ids=range(len(SOUND)))
def test_sound_judge_passes(change): assert validate(*example(**change)) == []

def test_issues_say_where_and_what():
    issues = validate(*example(metric='x = 1\nreturn flaot(result)'))
    assert [(i.rule, i.where) for i in issues] == [('names', 'check_text__1a2b line 4')] and 'flaot is defined nowhere' in issues[0].message

def test_several_metrics():
    two = dict(func=['check_text__1a2b', 'check_include_exclude'], result=[dict(type='text__1a2b', path='/a'), dict(type='vm_command_line', command='ls')], conj='or',
               expected=[dict(type='rule', rules=dict(text='done')), dict(type='rule', rules=dict(include=['a']))])
    assert found(**two) == set()
    assert found(**{**two, 'func': ['check_text__1a2b', 'check_nothing__1a2b']}) == {'wired'}

def test_infeasible_needs_no_judge():
    t = parse_task(dict(id='t', instruction='x', evaluator=dict(func='infeasible')))
    assert validate(t, {}) == [] and {i.rule for i in validate(t, {'check_a__1a2b': 'x'})} == {'used'}

BOMBS = ['(' * 10_000, '[' * 500 + ']' * 500, '-' * 50_000 + '1', 'x' + '.a' * 20_000, 'f' + '()' * 20_000, 'lambda: ' * 5_000 + '1', 'not ' * 20_000 + 'x', 'x = ' * 10_000 + '1', '\0', '\ud800', '"\\ud800"', '1' * 60_000,
         'if x:\n' + ''.join(' ' * i + 'if x:\n' for i in range(1, 120)), 'a+' * 20_000 + 'a', 'f"{' * 200, '\t x\n  y', '# coding: rot13\nx', 'def f():\n  return\n' * 3000]

@pytest.mark.parametrize('source', BOMBS, ids=range(len(BOMBS)))
def test_no_source_breaks_the_validator(source):
    functions = {**example()[1], 'check_text__1a2b': source}
    assert validate(example()[0], functions)

def test_scrambled_judges_do_not_break_the_validator():
    rng = random.Random(0)
    for _ in range(300):
        task, functions = example()
        name = rng.choice(list(functions)); text = list(functions[name])
        for _ in range(rng.randrange(1, 6)): text[rng.randrange(len(text))] = rng.choice(' \n():=.,abc"\'[]{}0')
        validate(task, {**functions, name: ''.join(text)})

def test_every_grammar_writes_judges_that_pass():
    from scalecua_nb.verigen.grammar import grammars
    for g in grammars().values():
        for template in g.templates:
            c = g.propose(1, template)
            assert validate(c.task, c.functions) == [], (g.application, template)
